"""Steps that are skipped: because of outliers, and how many in a row."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import NoHostRead, parameters
from helpers.serving import decided_on_device
from helpers.training import PLAIN_AND_FUSED, give_grads, sgd, step_on, wrapped
from tritonclip import ClippedOptimizer, Outlier
from tritonclip.backends import choose
from tritonclip.optim import watches
from tritonclip.optim.watches import DELAY_STEPS, SkipWatch


@pytest.mark.parametrize(
    ("dtype", "above", "skipped"),
    [
        # 0.1 in float32 is more than 0.1, and equals the bound in its dtype.
        (torch.float32, 0.1, 0),
        (torch.float32, 0.1 - 1e-8, 1),
        (torch.float64, 0.1, 0),
        (torch.float64, 0.1 - 1e-12, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("deferred", [False, True], ids=["host", "deferred"])
def test_a_bound_is_compared_in_the_dtype_of_the_norm(dtype, above, skipped, deferred):
    params = parameters([torch.tensor([0.1], dtype=dtype)])
    optimizer = ClippedOptimizer(sgd(params), 1.0, skip_above=above)
    with decided_on_device() if deferred else nullcontext():
        optimizer.step()
    assert int(optimizer.stats.skipped_steps) == skipped


@pytest.mark.parametrize(
    ("above", "loss"), [(20.0, None), (Outlier(4.0, 8), None), (Outlier(4.0, 8), torch.tensor(1.0))]
)
def test_skip_above_waits_for_no_device_where_the_optimizer_is_fused(above, loss, monkeypatch):
    """As for tensors of a GPU; a CPU's optimizer itself reads its numbers."""
    monkeypatch.setattr(choose, "host_decides", lambda device: False)
    monkeypatch.setattr(SkipWatch, "_read", lambda self, n: 0)
    params, optimizer = wrapped(PLAIN_AND_FUSED[1].values[0], skip_above=above)
    monkeypatch.setattr(optimizer.optimizer, "step", lambda: None)
    with tritonclip.use_backend("torch"), NoHostRead():
        for step in range(12):
            give_grads(params, step)
            optimizer.loss = loss
            optimizer.step()


def test_a_step_that_the_device_skips_keeps_statistics_where_every_group_gained_a_rule():
    params, optimizer = wrapped(PLAIN_AND_FUSED[1].values[0], nonfinite="skip")
    with decided_on_device():
        give_grads(params, 1)
        optimizer.step()
        norm, limit = float(optimizer.stats.last_norm), float(optimizer.stats.last_limit)
        for group in optimizer.param_groups:
            group["clip"] = 0.5
        give_grads(params, 2, bad=math.nan)
        optimizer.step()
    assert int(optimizer.stats.skipped_steps) == 1
    assert (float(optimizer.stats.last_norm), float(optimizer.stats.last_limit)) == (norm, limit)


def test_a_hundred_skips_in_a_row_are_said_once():
    params, optimizer = wrapped(sgd, nonfinite="skip")
    give_grads(params, bad=math.nan)
    for _ in range(99):
        optimizer.step()
    with pytest.warns(RuntimeWarning, match="100 steps in a row were skipped"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("above", [20.0, Outlier(6.0)])
def test_repr_shows_skip_above_where_it_is_set(above):
    _, optimizer = wrapped(sgd)
    assert "skip_above" not in repr(optimizer)
    optimizer.skip_above = above
    assert f"skip_above={above}" in repr(optimizer)


def test_skip_above_may_be_replaced():
    params, optimizer = wrapped(sgd, skip_above=1e-3)
    step_on(params, optimizer)
    optimizer.skip_above = None
    optimizer.step()
    assert optimizer.stats.summary()["steps"] == 1


def test_max_consecutive_skips_may_be_replaced():
    params, optimizer = wrapped(sgd, nonfinite="skip")
    optimizer.max_consecutive_skips = 2
    step_on(params, optimizer, bad=math.nan)
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        optimizer.step()
    optimizer.nonfinite, optimizer.max_consecutive_skips = "propagate", None
    with pytest.raises(ValueError, match="no step is skipped: expected nonfinite='skip'"):
        optimizer.max_consecutive_skips = 2
    assert optimizer.max_consecutive_skips is None


def test_skips_in_a_row_of_a_gpu_are_read_when_they_have_arrived(cuda_backend):
    """No step waits for its own count; the error comes so many steps later."""
    options: dict[str, Any] = {"nonfinite": "skip", "max_consecutive_skips": 3}
    params, optimizer = wrapped(PLAIN_AND_FUSED[1].values[0], 1.0, cuda_backend.device, **options)
    give_grads(params, bad=math.nan)
    for _ in range(2 + DELAY_STEPS):
        optimizer.step()
    with pytest.raises(RuntimeError, match="3 steps in a row were skipped"):
        optimizer.step()


def test_skips_in_a_row_of_a_gpu_are_read_so_many_steps_later(monkeypatch):
    """At a step that is the same in every process, however fast its numbers arrive."""
    monkeypatch.setattr(watches, "sent", lambda number: lambda: number.value)
    monkeypatch.setattr(watches, "is_captured", lambda device: False)
    watch = SkipWatch(3)

    def on_gpu(n: int) -> Any:
        return SimpleNamespace(device=torch.device("cuda"), value=n)

    for n in range(1, 3 + DELAY_STEPS):
        watch.look(on_gpu(n), synced=False)
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        watch.look(on_gpu(3 + DELAY_STEPS), synced=False)
    for _ in range(DELAY_STEPS):
        watch.look(on_gpu(3), synced=False)


class _Mps(torch.Tensor):
    """Stands in for a count on an accelerator that is no GPU of CUDA."""

    device = torch.device("mps")


def test_skips_in_a_row_of_other_accelerators_are_read_so_many_steps_later():
    """Each is the count of its step, not of the step that reads it."""
    watch, in_a_row = SkipWatch(3), torch.zeros((), dtype=torch.int64).as_subclass(_Mps)
    for _ in range(2 + DELAY_STEPS):
        watch.look(in_a_row.add_(1), synced=False)
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        watch.look(in_a_row.add_(1), synced=False)


class Late(SkipWatch):
    """As on a GPU whose numbers arrive one look later."""

    _last = 0

    def _read(self, in_a_row: Tensor) -> int:
        n, self._last = self._last, int(in_a_row)
        return n

    def forget(self) -> None:
        self._last = 0


def test_skips_that_a_step_has_waited_for_raise_at_once():
    watch = Late(2)
    watch.look(torch.tensor(1), synced=True)
    with pytest.raises(RuntimeError, match="2 steps in a row"):
        watch.look(torch.tensor(2), synced=True)


def test_skips_that_arrive_late_are_forgotten_with_a_checkpoint():
    params, optimizer = wrapped(PLAIN_AND_FUSED[1].values[0], nonfinite="skip")
    optimizer._watch = Late(2)
    saved = optimizer.state_dict()
    with decided_on_device():
        step_on(params, optimizer, bad=math.nan)
        optimizer.step()
        optimizer.load_state_dict(saved)
        step_on(params, optimizer)
    assert int(optimizer.stats.consecutive_skips) == 0


def test_skips_that_the_host_has_decided_raise_at_once():
    params, optimizer = wrapped(PLAIN_AND_FUSED[0].values[0], nonfinite="skip")
    optimizer._watch = Late(2)
    step_on(params, optimizer, bad=math.nan)
    with pytest.raises(RuntimeError, match="2 steps in a row"):
        optimizer.step()
