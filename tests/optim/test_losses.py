"""Steps that are skipped because of their loss: `Outlier` beside the attribute `loss`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import histories
from helpers.cases import INTERPRETED
from helpers.loss_scale import scaled_step
from helpers.training import PLAIN_AND_FUSED, give_grads, sgd, wrapped
from tritonclip import ClippedOptimizer, Outlier

ABOVE = Outlier(4.0, 8)


def step_with(params: Any, optimizer: ClippedOptimizer, loss: Any, size: float = 1.0) -> bool:
    """Takes a step; returns whether it was skipped."""
    before = int(optimizer.stats.skipped_steps)
    give_grads(params, size=size)
    if loss is not None:
        optimizer.loss = loss
    optimizer.step()
    return int(optimizer.stats.skipped_steps) > before


def filled(make: Any = sgd, **options: Any) -> Any:
    """Parameters, and an optimizer that has judged enough losses and norms of about 1 and 6."""
    params, optimizer = wrapped(make, skip_above=ABOVE, **options)
    for at in range(8):
        assert not step_with(params, optimizer, 1.0 + 0.1 * (at % 3), 1.0 + 0.1 * (at % 2))
    return params, optimizer


@pytest.mark.parametrize(
    "loss",
    [
        9,
        9.0,
        torch.tensor(9.0, dtype=torch.bfloat16),
        torch.tensor(9.0, requires_grad=True),
        torch.tensor(9.0, requires_grad=True) * 1.0,
    ],
    ids=["int", "float", "bfloat16", "leaf", "graph"],
)
def test_loss_may_be_any_real_number(loss):
    params, optimizer = filled()
    optimizer.loss = loss
    assert not isinstance(optimizer.loss, Tensor) or not optimizer.loss.requires_grad
    assert step_with(params, optimizer, None)


def test_loss_is_of_one_step():
    params, optimizer = filled()
    assert step_with(params, optimizer, 9.0)
    assert optimizer.loss is None
    assert not step_with(params, optimizer, None)
    optimizer.loss = 9.0
    optimizer.loss = None
    assert not step_with(params, optimizer, None)


@pytest.mark.parametrize("above", [None, 5.0])
def test_loss_that_nothing_judges_is_refused(above):
    _, optimizer = wrapped(sgd, skip_above=above)
    with pytest.raises(ValueError, match=r"expected skip_above=Outlier\(\), .* or recorder=record"):
        optimizer.loss = 1.0
    assert optimizer.loss is None


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.zeros(2), r"got shape \(2,\)"),
        (torch.zeros(1), r"got shape \(1,\)"),
        (torch.tensor(1), "of torch.int64"),
        (torch.tensor(1j), "of torch.complex64"),
        (True, "got bool"),
        ("1.0", "got str"),
    ],
)
def test_loss_of_another_kind_is_refused(loss, message):
    _, optimizer = wrapped(sgd, skip_above=ABOVE)
    with pytest.raises(TypeError, match=message):
        optimizer.loss = loss


def test_loss_on_a_gpu(cuda_backend):
    params, optimizer = wrapped(PLAIN_AND_FUSED[1].values[0], device="cuda", skip_above=ABOVE)
    for at in range(8):
        step_with(params, optimizer, torch.tensor(-1.0 - 0.1 * (at % 3), device="cuda"))
    assert step_with(params, optimizer, torch.tensor(0.5, device="cuda"))


def test_a_loss_ends_with_its_step_or_with_the_test_of_losses():
    params, optimizer = filled()
    step_with(params, optimizer, 1.0, 1.0)
    assert optimizer.loss is None
    optimizer.loss = 3.0
    optimizer.skip_above = 100.0
    optimizer.skip_above = ABOVE
    assert optimizer.loss is None


def test_a_loss_is_that_of_the_moment_when_it_was_set():
    _, optimizer = wrapped(sgd, skip_above=ABOVE)
    running = torch.tensor(3.0)
    optimizer.loss = running
    running.zero_()
    assert float(optimizer.loss) == 3.0


def losses_of(optimizer: ClippedOptimizer) -> Tensor:
    """What a checkpoint has of losses, the newest first."""
    return torch.tensor(optimizer.state_dict()["tritonclip"]["memory"]["losses"]["values"])


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("level", [3.0, 0.0, -3.0], ids=["positive", "around 0", "negative"])
def test_losses_are_judged_as_by_the_reference(backend, make, level):
    params, optimizer = wrapped(make, 1.0, backend.device, skip_above=Outlier(2.0, 8))
    reference = histories.outlier(2.0, 8, math.isfinite)
    losses = level + np.random.default_rng(0).normal(size=30)
    losses[[3, 10, 20]] = math.nan, -math.inf, math.inf
    losses[[15, 28]] = level + 50.0
    for loss in losses:
        expected = bool(loss > reference(float(loss)))
        tensor = torch.tensor(loss, dtype=torch.float64, device=backend.device)
        assert step_with(params, optimizer, tensor) == expected
    assert int(optimizer.stats.skipped_steps) >= 3


def test_loss_under_a_scaler(scaler_type, make):
    """It is not scaled. A step that overflows remembers none."""
    params, optimizer = filled(make)
    scale = scaler_type("cpu", init_scale=1024.0)
    for loss, bad, newest in ((9.0, None, 9.0), (1.0, math.inf, 9.0), (1.5, None, 1.5)):
        optimizer.loss = loss
        scaled_step(scale, optimizer, params, give_grads(params, bad=bad))
        assert int(optimizer.stats.skipped_steps) == 1
        assert float(losses_of(optimizer)[0]) == newest
