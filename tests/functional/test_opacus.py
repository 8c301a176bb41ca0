"""Gradients of Opacus: clip_per_example is its DPOptimizer without noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tritonclip.functional import clip_per_example

opacus = pytest.importorskip("opacus", reason="needs tritonclip[test]")

# Of the norms of all parameters, some are larger.
N, LIMIT = 12, 6.5
# Opacus adds 1e-6 to norms, of which those that are clipped are 0.1 or more here.
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 1e-7}


def module_and_loss() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.GroupNorm(2, 4),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    )
    module = opacus.GradSampleModule(model)
    images = torch.randn(N, 1, 6, 6) * torch.logspace(-1, 1, N).view(N, 1, 1, 1)
    loss = torch.nn.functional.cross_entropy(module(images.requires_grad_()), torch.arange(N) % 3)
    return module, loss


def clipped_by_opacus(kind: Any, limit: Any) -> list[torch.Tensor]:
    module, loss = module_and_loss()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = kind(sgd, noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=N)
    loss.backward()
    optimizer.pre_step()
    return [p.grad for p in module.parameters()]


def test_sum_is_that_of_dp_optimizer_without_noise():
    module, loss = module_and_loss()
    loss.backward()
    gradients = {name: p.grad_sample for name, p in module.named_parameters()}
    mean, norms = clip_per_example(gradients, LIMIT, reduce="mean")
    assert 0 < int((norms > LIMIT).sum()) < N
    expected = clipped_by_opacus(opacus.optimizers.DPOptimizer, LIMIT)
    torch.testing.assert_close(list(mean.values()), expected, **CLOSE)


def test_limits_of_single_tensors_are_those_of_the_optimizer_by_layer():
    module, loss = module_and_loss()
    loss.backward()
    gradients = [p.grad_sample for p in module.parameters()]
    limits = [0.1 * (i + 1) for i in range(len(gradients))]
    pairs = zip(gradients, limits, strict=True)
    mean = [clip_per_example(own, limit, reduce="mean")[0] for own, limit in pairs]
    expected = clipped_by_opacus(opacus.optimizers.DPPerLayerOptimizer, limits)
    torch.testing.assert_close(mean, expected, **CLOSE)
    same, _ = clip_per_example(gradients, LIMIT, per_layer=True, reduce="mean")
    expected = clipped_by_opacus(opacus.optimizers.DPPerLayerOptimizer, [LIMIT] * len(gradients))
    torch.testing.assert_close(same, expected, **CLOSE)
