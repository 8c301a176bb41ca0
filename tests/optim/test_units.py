"""ClippedOptimizer with a rule by unit: steps, statistics, scalers, policies and copies."""

from typing import Any

import pytest
import torch

from helpers.cases import NoHostRead, copies
from helpers.units import assert_clipped, expected
from tritonclip import ClipByUnitNorm, ClippedOptimizer


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 6)).square().sum()
    return loss


def grads(model: torch.nn.Module) -> list[torch.Tensor]:
    return copies(p.grad for p in model.parameters() if p.grad is not None)


def evaluated(
    rule: ClipByUnitNorm, lr: float = 0.1
) -> tuple[torch.nn.Sequential, ClippedOptimizer, list[torch.Tensor]]:
    """A model after backward, its optimizer under a rule, and its gradients."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = ClippedOptimizer(inner, rule)
    loss_of(model).backward()
    return model, optimizer, grads(model)


def test_stats_have_the_least_coefficient_of_all_units():
    rule = ClipByUnitNorm(0.01)
    model, optimizer, before = evaluated(rule, 0.0)
    least = min(
        float((torch.from_numpy(expected(g, p, rule)) / g.double()).nan_to_num(nan=1.0).min())
        for g, p in zip(before, model.parameters(), strict=True)
    )
    optimizer.step()
    stats = optimizer.stats.summary()
    assert stats["coefficient"] == pytest.approx(least, rel=1e-5)
    assert stats["norm"] == pytest.approx(max(float(g.norm()) for g in before), rel=1e-6)
    assert (stats["clipped_steps"], stats["clipped_share"]) == (1, 1.0)


def test_a_step_within_all_limits_is_not_counted_as_clipped():
    _, optimizer, _ = evaluated(ClipByUnitNorm(1e6))
    optimizer.step()
    stats = optimizer.stats.summary()
    assert (stats["steps"], stats["clipped_steps"], stats["coefficient"]) == (1, 0, 1.0)


def test_parameter_groups_may_have_rules_by_unit():
    model = make_model()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "clip": ClipByUnitNorm(0.001)},
        {"params": model[2].parameters()},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1e9)
    loss_of(model).backward()
    before, weights = grads(model), copies(model.parameters())
    optimizer.step()
    after = grads(model)
    assert_clipped(after[0], expected(before[0], weights[0], ClipByUnitNorm(0.001)))
    assert torch.equal(after[2], before[2])
    assert optimizer.stats.group_coefficients[0] < 1
    assert optimizer.stats.last_coefficient == 1


def test_step_waits_for_no_device(backend):
    if backend.host_decides:
        pytest.skip("a CPU is not waited for")
    model = make_model().to(backend.device)
    optimizer = ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), ClipByUnitNorm(0.01))
    model(torch.ones(4, 6, device=backend.device)).square().sum().backward()
    optimizer.step()
    with NoHostRead():
        optimizer.step()
    assert optimizer.stats.summary()["clipped_steps"] == 2
