"""An error that nobody waits for: steps are left out on the device until the host knows of it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

import tritonclip
from helpers.cases import NoHostRead, assert_bits, copies, grad_of, no_sync
from helpers.serving import decided_on_device
from helpers.training import (
    INNERS,
    RULES_OF_EVERY_TYPE,
    give_grads,
    interrupted_step,
    new_params,
    sgd,
    state_of,
    step_on,
    unchanged,
)
from tritonclip import (
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByUnitNorm,
    ClippedOptimizer,
    FlatGradients,
    Outlier,
)
from tritonclip.backends import choose
from tritonclip.optim import watches
from tritonclip.optim.watches import DELAY_STEPS

NAMES = ("alpha", "beta", "gamma")
BY_ID = {inner.id: inner for inner in INNERS}
FUSED = BY_ID["AdamW-deferred"].values[0]
ON_DEVICE = [BY_ID["AdamW-deferred"], BY_ID["momentum-deferred"]]
ON_HOST = [BY_ID[name] for name in ("SGD-plain", "AdamW-plain", "AdamW-fused")]


def wrapped(make: Any, rule: Any = 1.0, device: Any = "cpu", **options: Any) -> Any:
    """Named parameters, and an optimizer of theirs that raises later."""
    params = new_params(device=device)
    inner = make(zip(NAMES, params, strict=True))
    return params, ClippedOptimizer(inner, rule, nonfinite="async_error", **options)


@pytest.fixture
def late() -> Iterator[Any]:
    """Parameters and a fused optimizer, whose steps the device decides."""
    with decided_on_device():
        yield wrapped(FUSED)


def own_state(optimizer: ClippedOptimizer) -> list[Tensor]:
    """Statistics, calls, and the states of rules, as a checkpoint has them."""
    own = optimizer.state_dict()["tritonclip"]
    states = [state["values"] for state in own.pop("memory", {}).values()]
    return [*own.values(), *(torch.tensor(values) for values in states if values is not None)]


def count_before_error(step: Callable[[int], Any], message: str) -> int:
    """Takes steps until one raises; returns how many did not."""
    for n in range(3 * DELAY_STEPS):
        try:
            step(n)
        except RuntimeError as error:
            if not re.search(message, str(error)):
                raise
            return n
    pytest.fail("no step raised")


def steps_until_error(params: Any, optimizer: Any, message: str) -> int:
    """As `count_before_error`, of steps with finite gradients."""
    return count_before_error(lambda n: step_on(params, optimizer, 50 + n), message)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES_OF_EVERY_TYPE)
@pytest.mark.parametrize("make", ON_HOST)
@pytest.mark.covering(2)
def test_async_error_on_a_cpu_raises_at_once(make, rule, value):
    params, optimizer = wrapped(make, rule)
    step_on(params, optimizer, 1)
    give_grads(params, 2, bad=value)
    message = r"beta.*: alpha before them, gamma after them"
    with pytest.raises(RuntimeError, match=message), unchanged(params, optimizer, grads=True):
        optimizer.step()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "rule",
    [
        *RULES_OF_EVERY_TYPE,
        pytest.param(ClipByUnitNorm(0.1), id="unit"),
        pytest.param(ClipByQuantile(0.5, 4), id="quantile"),
        pytest.param(ClipByOwnHistory(warmup=2), id="history"),
    ],
)
@pytest.mark.parametrize("make", ON_DEVICE)
@pytest.mark.covering(2)
def test_async_error_of_a_device_leaves_everything_as_before_the_step(make, rule, value):
    """Eight finite steps after it are left out too; then training goes on where it was."""
    params, optimizer = wrapped(make, rule, skip_above=Outlier(100.0, 4))
    twins, other = wrapped(make, rule, skip_above=Outlier(100.0, 4))
    for seed in range(3):
        for own, its in ((params, optimizer), (twins, other)):
            step_on(own, its, seed)
    before, state, own = copies(params), state_of(optimizer, params), own_state(optimizer)
    grad_of(params[1]).view(-1)[-1] = value
    if not math.isnan(value):
        # It would be an outlier, which is skipped.
        optimizer.skip_above = None
    optimizer.step()
    message = "Step 3, counted from 0, has non-finite gradients: beta; .*: alpha before them, gamm"
    assert steps_until_error(params, optimizer, message) == DELAY_STEPS - 1
    assert_bits(params, before)
    assert_bits(state_of(optimizer, params), state)
    if math.isnan(value):
        assert_bits(own_state(optimizer), own)
    for seed in range(3, 6):
        for own, its in ((params, optimizer), (twins, other)):
            step_on(own, its, seed)
    assert_bits(params, copies(twins))


def test_async_error_names_gradients_of_any_size(backend, rule):
    """By partial norms of any backend: of no element, of one chunk, and of more."""
    sizes = (0, 1, 16384, 16385, 5, 40000)
    params = [torch.nn.Parameter(torch.zeros(n, device=backend.device)) for n in sizes]
    named = zip("abcdef", params, strict=True)
    with decided_on_device():
        optimizer = ClippedOptimizer(AdamW(named, fused=True), rule, nonfinite="async_error")
        for bad in (False, True, False):
            for param in params:
                param.grad = torch.full_like(param, 1e-3)
            if bad:
                grad_of(params[3])[-1] = math.nan
                grad_of(params[5])[20000] = math.inf
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"Step 1, .*: d, f; the nearest.*: c before them\."):
            optimizer.synchronize()
    assert all(torch.isfinite(param).all() for param in params)


@pytest.mark.parametrize("make", [BY_ID["AdamW-plain"], BY_ID["SGD-plain"]])
def test_async_error_waits_for_a_device_where_the_optimizer_is_not_told(make):
    with decided_on_device():
        params, optimizer = wrapped(make)
        give_grads(params, bad=math.nan)
        error = pytest.raises(RuntimeError, match=r"beta.*alpha before")
        with error, unchanged(params, optimizer):
            optimizer.step()


def test_async_error_that_is_held_comes_before_a_step_that_waits():
    """SGD with momentum cannot be told of a parameter without a buffer."""
    params, optimizer = wrapped(BY_ID["momentum-deferred"].values[0])
    with decided_on_device():
        give_grads(params[:2])
        optimizer.step()
        give_grads(params[:2], bad=math.nan)
        optimizer.step()
        give_grads(params)
        error = pytest.raises(RuntimeError, match=r"Step 1, .*: beta")
        with error, unchanged(params, optimizer):
            optimizer.step()


def test_async_error_waits_for_no_device_where_the_optimizer_is_fused(rule, monkeypatch):
    monkeypatch.setattr(choose, "host_decides", lambda device: False)
    params, optimizer = wrapped(FUSED, rule)
    monkeypatch.setattr(optimizer.optimizer, "step", lambda: None)
    with tritonclip.use_backend("torch"):
        # The first step rounds bounds on the host.
        step_on(params, optimizer, 0)
        with NoHostRead():
            for step in range(1, DELAY_STEPS):
                step_on(params, optimizer, step, bad=math.nan if step == 2 else None)


def test_async_error_keeps_no_gradient_alive(late):
    params, optimizer = late
    give_grads(params)
    grads = [ref(param.grad) for param in params]
    optimizer.step()
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None] * 3


def test_async_error_is_no_overflow_of_a_scaler(late, scaler_type):
    params, optimizer = late
    scale = scaler_type("cpu", init_scale=2.0)
    for seed in range(2 * DELAY_STEPS):
        scale.scale(torch.ones(()))
        give_grads(params, seed, bad=math.inf if seed == 1 else None)
        scale.step(optimizer)
        scale.update()
    optimizer.synchronize()
    assert scale.get_scale() == 1.0
    assert optimizer.stats.summary()["steps"] == 2 * DELAY_STEPS - 1


def test_async_error_is_no_step_that_is_skipped_as_an_outlier():
    """inf is above every bound, NaN above none."""
    with decided_on_device():
        params, optimizer = wrapped(FUSED, skip_above=1e30)
        step_on(params, optimizer, bad=math.inf)
        optimizer.synchronize()
        # A step that is left out until the error is raised is no skip either.
        for value in (math.nan, math.inf):
            step_on(params, optimizer, bad=value)
        with pytest.raises(RuntimeError, match="Step 1, "):
            optimizer.synchronize()
    assert int(optimizer.stats.skipped_steps) == 1


def test_async_error_of_an_interrupted_step_that_is_repeated_counts_once(late, monkeypatch):
    params, optimizer = late
    give_grads(params, bad=math.nan)
    interrupted_step(monkeypatch, optimizer)
    optimizer.step()
    step_on(params, optimizer)
    message = r"Step 0, .* The updates of this step and of the step after it were left out"
    with pytest.raises(RuntimeError, match=message):
        optimizer.synchronize()


def test_async_error_says_that_a_norm_does_not_fit():
    with decided_on_device():
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer = ClippedOptimizer(AdamW([param], fused=True), 1.0, nonfinite="async_error")
        param.grad = torch.full((4,), 3e38)
        optimizer.step()
        with pytest.raises(RuntimeError, match="every gradient is finite, but their norm does not"):
            optimizer.synchronize()


@pytest.mark.parametrize("how", ["deep copy", "state_dict"])
def test_checkpoint_before_an_async_error_has_the_state_before_the_step(how):
    with decided_on_device():
        params, optimizer = wrapped(FUSED, ClipByQuantile(0.5, 4))
        for seed in range(2):
            step_on(params, optimizer, seed)
        before, state, own = copies(params), state_of(optimizer, params), own_state(optimizer)
        step_on(params, optimizer, bad=math.nan)
        step_on(params, optimizer, 3)
        if how == "deep copy":
            twins, twin = copy.deepcopy((params, optimizer))
        else:
            twins, twin = wrapped(FUSED, ClipByQuantile(0.5, 4))
            twin.load_state_dict(optimizer.state_dict())
        assert_bits(params, before)
        assert_bits(state_of(twin, twins), state)
        assert_bits(own_state(twin), own)
        step_on(twins, twin, 4)
        twin.synchronize()
        # The run that was saved still raises.
        assert steps_until_error(params, optimizer, "Step 2, ") == DELAY_STEPS - 2


def test_loading_a_checkpoint_forgets_an_async_error(late):
    params, optimizer = late
    step_on(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    step_on(params, optimizer, bad=math.nan)
    optimizer.load_state_dict(saved)
    step_on(params, optimizer)
    optimizer.synchronize()
    assert int(optimizer.stats.steps) == 2


def test_another_policy_raises_an_async_error_first(late):
    params, optimizer = late
    step_on(params, optimizer, bad=math.nan)
    with pytest.raises(RuntimeError, match="Step 0, "):
        optimizer.nonfinite = "propagate"
    assert optimizer.nonfinite == "async_error"
    optimizer.nonfinite = "propagate"


@pytest.mark.parametrize("make", [ON_DEVICE[0], BY_ID["AdamW-fused"], BY_ID["SGD-plain"]])
def test_async_error_of_a_closure(make):
    """Later where a fused optimizer is told, else at once, as "error"."""
    params, optimizer = wrapped(make)
    evaluations = count()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((param.square().sum() for param in params), torch.zeros(()))
        loss.backward()
        grad_of(params[2]).fill_(1.0 if next(evaluations) else math.nan)
        return loss

    before = copies(params)
    n = count_before_error(lambda _: optimizer.step(closure), "gamma.*beta before")
    assert n == (DELAY_STEPS if make.on_device else 0)
    assert_bits(params, before)


def test_async_error_names_the_nearest_across_groups():
    """In the order of the parameters, whichever rule holds for them, clipped or not."""
    with decided_on_device():
        params = new_params(((2,),) * 5)
        groups: list[dict[str, Any]] = [
            {"params": params[:2]},
            {"params": params[2:3], "clip": ClipByNorm(1.0)},
            {"params": params[3:4], "clip": None},
            {"params": params[4:]},
        ]
        optimizer = ClippedOptimizer(AdamW(groups, fused=True), 1.0, nonfinite="async_error")
        give_grads(params, bad=math.nan, at=3)
        # Without a gradient, it is not next to them.
        params[2].grad = None
        optimizer.step()
        place = r"param_groups\[{}\]\['params'\]\[{}\]"
        first, before, after = place.format(2, 0), place.format(0, 1), place.format(3, 0)
        with pytest.raises(RuntimeError, match=f"{first}; .*: {before} before.*, {after} after"):
            optimizer.synchronize()


def test_async_error_names_gradients_of_buffers():
    with decided_on_device():
        first = torch.nn.Linear(2, 3)
        model = torch.nn.Sequential(first, torch.nn.Linear(3, 1))
        flat = FlatGradients(model)
        inner = AdamW(model.named_parameters(), fused=True)
        optimizer = ClippedOptimizer(inner, 1.0, nonfinite="async_error", flat=flat)
        model(torch.ones(4, 2)).sum().backward()
        grad_of(first.bias).fill_(math.nan)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"0\.bias; .*: 0\.weight before.*1\.weight after"):
            optimizer.synchronize()


def test_async_error_beside_a_recorder_of_each_norm(backend, rule, tmp_path):
    """Which takes the norms from the same reading."""
    with decided_on_device(), tritonclip.record(tmp_path / "run.csv", each=True) as recorder:
        params, optimizer = wrapped(FUSED, rule, backend.device, recorder=recorder)
        for bad in (None, math.nan):
            step_on(params, optimizer, bad=bad)
        with pytest.raises(RuntimeError, match=r"Step 1, .*: beta; .*: alpha before"):
            optimizer.synchronize()


def test_async_error_says_nothing_of_finite_ones_where_there_are_none():
    params, optimizer = wrapped(sgd)
    for param in params:
        param.grad = torch.full_like(param, math.nan)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert "nearest" not in str(caught.value)


def test_async_error_of_finite_steps_changes_nothing(late):
    params, optimizer = late
    twins = new_params()
    plain = ClippedOptimizer(FUSED(twins), 1.0)
    for seed in range(2 * DELAY_STEPS):
        for own, its in ((params, optimizer), (twins, plain)):
            step_on(own, its, seed)
    optimizer.synchronize()
    assert_bits(params, copies(twins))
    assert optimizer.stats.summary() == plain.stats.summary()


def test_async_error_of_a_gpu_does_not_sync(cuda_backend, rule):
    params, optimizer = wrapped(lambda p: AdamW(p, fused=True), rule, "cuda")
    step_on(params, optimizer, 1)
    give_grads(params, 2, bad=math.nan)
    with unchanged(params, optimizer):
        with no_sync():
            optimizer.step()
        n = steps_until_error(params, optimizer, "Step 1, .*: beta.*alpha before")
    assert n == DELAY_STEPS - 1


def test_async_error_refuses_a_step_that_is_captured(late, monkeypatch):
    """And has changed nothing."""
    params, optimizer = late
    give_grads(params)
    monkeypatch.setattr(watches, "is_captured", lambda device: True)
    error = pytest.raises(RuntimeError, match="while a graph is captured")
    with error, unchanged(params, optimizer, grads=True):
        optimizer.step()


def test_async_error_refuses_a_cuda_graph(cuda_backend):
    params, optimizer = wrapped(lambda p: AdamW(p, fused=True, capturable=True), 1.0, "cuda")
    step_on(params, optimizer)
    message = "while a graph is captured"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_async_error_with_an_optimizer_of_a_gpu_that_is_not_told(cuda_backend):
    params, optimizer = wrapped(lambda p: SGD(p, lr=0.1), 1.0, "cuda")
    give_grads(params, bad=math.nan)
    with pytest.raises(RuntimeError, match=r"beta.*alpha before"):
        optimizer.step()


def test_async_error_shows_global_norms_that_chunks_give(backend):
    """The norm is put together from more partial norms than without the policy."""
    norms = []
    for policy in ("propagate", "async_error"):
        with decided_on_device():
            param = torch.nn.Parameter(torch.zeros(40001, device=backend.device))
            optimizer = ClippedOptimizer(AdamW([param], fused=True), 1.0, nonfinite=policy)
            param.grad = torch.linspace(-1, 1, 40001, device=backend.device)
            optimizer.step()
            norms.append(optimizer.stats.last_norm)
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


def test_async_error_is_raised_where_the_recorder_of_its_step_failed(late, monkeypatch):
    params, optimizer = late
    step_on(params, optimizer, 0)
    give_grads(params, 1, bad=math.nan)
    with unchanged(params, optimizer):
        interrupted_step(monkeypatch, optimizer, optimizer.stats, "record_")
        step_on(params, optimizer, 2)
        with pytest.raises(RuntimeError, match=r"^Step 1, counted from 0"):
            optimizer.synchronize()


def test_async_error_counts_the_steps_after_it_alone(late):
    params, optimizer = late
    for bad in (None, None, math.nan, None):
        step_on(params, optimizer, bad=bad)
    with pytest.raises(RuntimeError, match=r"Step 2, .* of this step and of the step after it"):
        optimizer.synchronize()
