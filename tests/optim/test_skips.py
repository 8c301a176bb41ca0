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
from helpers.cases import NoHostRead, assert_bits, copies, grad_of, parameters
from helpers.loss_scale import scaled_step
from helpers.serving import decided_on_device
from helpers.training import (
    INNERS,
    PLAIN_AND_FUSED,
    RULES,
    closure_of,
    give_grads,
    sgd,
    state_of,
    step_on,
    unchanged,
    wrapped,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer, Outlier
from tritonclip.backends import choose
from tritonclip.optim import watches
from tritonclip.optim.watches import DELAY_STEPS, SkipWatch


@pytest.mark.parametrize("rule", [*RULES, pytest.param(ClipByGlobalNorm(1.0, math.inf), id="inf")])
def test_skip_above_leaves_everything_as_it_was(make, rule):
    """The 2-norm of all is compared, whatever the rule measures: 6.6 and 664 here."""
    params, optimizer = wrapped(make, rule, skip_above=20.0)
    step_on(params, optimizer)
    with unchanged(params, optimizer):
        step_on(params, optimizer, size=100.0)
    summary = optimizer.stats.summary()
    assert (summary["steps"], summary["skipped_steps"]) == (1, 1)


@pytest.mark.parametrize("own", [ClipByNorm(1.0), ClipByValue(0.5)], ids=["by-norm", "by-value"])
@pytest.mark.parametrize(("above", "skipped"), [(4.9, 1), (5.1, 0)])
def test_skip_above_compares_the_norm_of_all_groups(own, above, skipped):
    params = parameters([torch.tensor([3.0]), torch.tensor([4.0])])
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "clip": own}]
    optimizer = ClippedOptimizer(sgd(groups), 1.0, skip_above=above)
    optimizer.step()
    assert optimizer.stats.summary()["skipped_steps"] == skipped
    assert bool(params[0].any()) == bool(params[1].any()) == (not skipped)


@pytest.mark.parametrize("first", ["without a gradient", "not clipped"])
def test_skip_above_compares_the_groups_behind_one_that_does_not_count(first):
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    rules: list[Any] = [None if first == "not clipped" else 1.0, 1.0, 2.0]
    groups = [{"params": [p], "clip": rule} for p, rule in zip(params, rules, strict=True)]
    optimizer = ClippedOptimizer(sgd(groups), 1.0)
    for skipped, above in enumerate((5.1, 4.9)):
        if first == "not clipped":
            params[0].grad = torch.tensor([100.0])
        params[1].grad, params[2].grad = torch.tensor([3.0]), torch.tensor([4.0])
        optimizer.skip_above = above
        optimizer.step()
        assert optimizer.stats.summary()["skipped_steps"] == skipped


@pytest.mark.parametrize(("norm_type", "above", "skipped"), [(math.inf, 4.5, 1), (1.0, 6.0, 0)])
def test_skip_above_compares_the_two_norm_whatever_the_rule_measures(norm_type, above, skipped):
    """The 2-norm is 5 here, the largest element 4, and the sum 7."""
    params, rule = parameters([torch.tensor([3.0, 4.0])]), ClipByGlobalNorm(1.0, norm_type)
    optimizer = ClippedOptimizer(sgd(params), rule, skip_above=above)
    optimizer.step()
    assert optimizer.stats.summary()["skipped_steps"] == skipped


def test_skip_above_takes_no_gradient_for_no_outlier():
    _, optimizer = wrapped(sgd, skip_above=1.0)
    optimizer.step()
    summary = optimizer.stats.summary()
    assert (summary["steps"], summary["skipped_steps"]) == (1, 0)


@pytest.mark.parametrize("make", INNERS)
def test_outliers_between_steps_leave_no_trace(make):
    params, optimizer = wrapped(make, 1.0, skip_above=20.0)
    twins, other = wrapped(make, 1.0)
    for number in range(6):
        step_on(params, optimizer, number, size=100.0)
        for own, its in ((params, optimizer), (twins, other)):
            step_on(own, its, number)
    assert_bits(params, copies(twins))
    assert_bits(state_of(optimizer, params), state_of(other, twins))


def test_inf_is_skipped_before_it_is_an_error(make):
    """Whoever decides, the host or a fused optimizer; NaN is above no bound."""
    params, optimizer = wrapped(make, nonfinite="error", skip_above=1e30)
    with unchanged(params):
        step_on(params, optimizer, bad=math.inf)
    assert int(optimizer.stats.skipped_steps) == 1
    give_grads(params, bad=math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.step()


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


def test_unclipped_gradients_do_not_count():
    params, optimizer = wrapped(sgd, skip_above=20.0)
    params[1].need_clip = False  # type: ignore[attr-defined]
    give_grads(params)
    grad_of(params[1]).mul_(1e6)
    optimizer.step()
    assert int(optimizer.stats.steps) == 1


def test_outlier_skips_spikes_once_half_a_window_is_filled(make):
    params, optimizer = wrapped(make, skip_above=Outlier(4.0, 16))
    skipped = []
    for step in range(40):
        # The window forgets the first spike after 16 steps; the second it remembers at the third.
        step_on(params, optimizer, size=100.0 if step in (2, 25, 26) else 1.0 + 0.1 * (step % 3))
        if int(optimizer.stats.consecutive_skips):
            skipped.append(step)
    assert skipped == [25]


def test_outlier_accepts_a_new_level():
    params, optimizer = wrapped(sgd, skip_above=Outlier(4.0, 16))
    for size in [1.0, 1.1] * 10 + [50.0, 51.0] * 10:
        step_on(params, optimizer, size=size)
    assert int(optimizer.stats.consecutive_skips) == 0
    assert 1 <= int(optimizer.stats.skipped_steps) < 10


def test_skip_above_compares_unscaled_norms(scaler_type, make):
    params, optimizer = wrapped(make, skip_above=20.0)
    scale = scaler_type("cpu", init_scale=1024.0)
    for size in (1.0, 100.0):
        scaled_step(scale, optimizer, params, give_grads(params, size=size))
        assert scale.get_scale() == 1024.0
    assert optimizer.stats.summary()["steps"] == 1
    assert optimizer.stats.summary()["skipped_steps"] == 1


def test_skip_above_looks_at_a_closure_first():
    params, optimizer = wrapped(sgd, skip_above=20.0)
    distance = torch.stack([((param - 1) ** 2).sum() for param in params]).sum()
    with unchanged(params, optimizer):
        loss = optimizer.step(closure_of(params, optimizer, [100.0]))
    assert loss == distance
    assert int(optimizer.stats.skipped_steps) == 1


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


@pytest.mark.parametrize("how", ["nonfinite", "skip_above"])
def test_too_many_skips_in_a_row_raise(how, make):
    options: dict[str, Any] = {"nonfinite": "skip"} if how == "nonfinite" else {"skip_above": 20.0}
    params, optimizer = wrapped(make, max_consecutive_skips=3, **options)
    for size in (math.inf, math.inf, 1.0, math.inf, math.inf):
        step_on(params, optimizer, size=size)
    error = pytest.raises(RuntimeError, match="3 steps in a row were skipped")
    with error, unchanged(params, optimizer):
        step_on(params, optimizer, size=math.inf)
    # It goes on where the user does.
    for size in (1.0, math.inf):
        step_on(params, optimizer, size=size)
    assert int(optimizer.stats.steps) == 2


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


@pytest.mark.parametrize("fresh", [True, False], ids=["loaded", "same"])
def test_consecutive_skips_are_saved(fresh):
    params, optimizer = wrapped(sgd, nonfinite="skip", max_consecutive_skips=4)
    give_grads(params, bad=math.nan)
    for _ in range(3):
        optimizer.step()
    if fresh:
        saved = optimizer.state_dict()
        params, optimizer = wrapped(sgd, nonfinite="skip", max_consecutive_skips=4)
        optimizer.load_state_dict(saved)
        give_grads(params, bad=math.nan)
    with pytest.raises(RuntimeError, match="4 steps in a row"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"skip_above": -1.0}, ValueError, "skip_above must be 0 or more"),
        ({"skip_above": math.nan}, ValueError, "skip_above"),
        ({"skip_above": "6 sigma"}, TypeError, "skip_above must be a number .* an Outlier"),
        ({"skip_above": ClipByNorm(1.0)}, TypeError, "skip_above must be a number"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips must be 1 or more"),
        ({"max_consecutive_skips": 1.5}, TypeError, "max_consecutive_skips must be an integer"),
        ({"max_consecutive_skips": 2}, ValueError, "expected nonfinite='skip' or skip_above"),
    ],
)
def test_wrapper_refuses(options, error, message):
    with pytest.raises(error, match=message):
        wrapped(sgd, **options)


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
    with pytest.raises(ValueError, match="skip_above"):
        optimizer.skip_above = -1.0


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
    optimizer._log.watch = Late(2)
    saved = optimizer.state_dict()
    with decided_on_device():
        step_on(params, optimizer, bad=math.nan)
        optimizer.step()
        optimizer.load_state_dict(saved)
        step_on(params, optimizer)
    assert int(optimizer.stats.consecutive_skips) == 0


def test_skips_that_the_host_has_decided_raise_at_once():
    params, optimizer = wrapped(PLAIN_AND_FUSED[0].values[0], nonfinite="skip")
    optimizer._log.watch = Late(2)
    step_on(params, optimizer, bad=math.nan)
    with pytest.raises(RuntimeError, match="2 steps in a row"):
        optimizer.step()
