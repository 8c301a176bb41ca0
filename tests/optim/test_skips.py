"""Steps that are skipped: because of outliers among norms and losses, and how many in a row."""

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
from helpers.loss_scale import scaled_step
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


class Fixed(Outlier):
    """A user's test: norms above 2 are outliers."""

    def advance(self, state, norm):
        return torch.full_like(norm, 2.0), state


@pytest.mark.parametrize("deferred", [False, True], ids=["host", "deferred"])
def test_a_test_of_outliers_of_the_users_own_is_asked(deferred):
    params = parameters([torch.tensor([1.0])])
    optimizer = ClippedOptimizer(sgd(params), 1.0, nonfinite="skip", skip_above=Fixed())
    with decided_on_device() if deferred else nullcontext():
        for norm in (1.0, 3.0, 2.0, math.nan):
            params[0].grad = torch.tensor([norm])
            optimizer.step()
    assert int(optimizer.stats.skipped_steps) == 2


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


@pytest.mark.parametrize("above", [None, 100.0])
def test_loss_may_be_set_where_nothing_reads_it(above):
    params, optimizer = wrapped(sgd, skip_above=above)
    assert not step_with(params, optimizer, torch.tensor(9.0))
    assert optimizer.loss is None


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
    optimizer.skip_above = Outlier(4.0)
    assert optimizer.loss == 3.0
    optimizer.skip_above = 100.0
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


def test_loss_under_a_scaler(scaler_type, make):
    """It is not scaled. A step that overflows remembers none."""
    params, optimizer = filled(make)
    scale = scaler_type("cpu", init_scale=1024.0)
    for loss, bad, newest in ((9.0, None, 9.0), (1.0, math.inf, 9.0), (1.5, None, 1.5)):
        optimizer.loss = loss
        scaled_step(scale, optimizer, params, give_grads(params, bad=bad))
        assert int(optimizer.stats.skipped_steps) == 1
        assert float(losses_of(optimizer)[0]) == newest
