"""The state of an adaptive rule on a device: advanced by one launch as by operators.

`advance` is compared with the papers in tests/rules; here each backend is compared with `advance`,
from one state and one norm to the next.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tritonclip
from helpers import histories
from helpers.cases import (
    CHUNK,
    INTERPRETED,
    assert_bits,
    grad_of,
    no_sync,
    normal,
    parameters,
    same_parameters,
    unchanged,
)
from helpers.graphs import captured
from helpers.histories import ADAPTIVE, of_norm
from helpers.interrupts import InterruptAtBytecode
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByZScore,
    ClippedOptimizer,
    ClipState,
    Outlier,
)

# float64, in which a kernel adds up in another order and may fuse products with sums.
CLOSE: dict[str, Any] = {"rtol": 1e-13, "atol": 0.0, "equal_nan": True}
# Norms of a window that a program reads at a time.
BLOCK = 1024
STEPS = 12 if INTERPRETED else 60
RULES: list[Any] = [
    pytest.param(ClipByQuantile(0.9, 50), id="quantile"),
    pytest.param(ClipByQuantile(0.5, 7, 0.8), id="median-bounded"),
    pytest.param(ClipByQuantile(0.7, 5, norm_type=3.0), id="quantile-p3"),
    pytest.param(ClipByZScore(warmup=4), id="zscore"),
    pytest.param(ClipByZScore(2.0, 0.9, 2, 1.0, norm_type=math.inf), id="zscore-bounded-inf"),
    pytest.param(ClipByOwnHistory(warmup=3), id="own-history"),
    pytest.param(ClipByOwnHistory(1.2, 0.9, 2, math.inf), id="own-history-unbounded"),
]


def values_of(state: ClipState) -> Any:
    values = state.state_dict()["values"]
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def advanced(rule: Any, values: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Limits and state by operators, for norms as they were returned."""
    limit, after = rule.advance(values, norms.double())
    return limit.expand(norms.shape), after


def copy_of(state: ClipState) -> ClipState:
    copied = ClipState()
    copied.load_state_dict(state.state_dict())
    return copied


def clip_and_compare(rule: Any, state: ClipState, grads: Sequence[Tensor], **options: Any) -> None:
    """One call, with the state of before; on any list that fits it."""
    n, values = len(grads), values_of(state)
    if values is None:
        values = torch.tensor(rule.start(), dtype=torch.float64, device=grads[0].device)
        values = values.expand(n, -1) if rule.per_gradient else values
    values = values.to(grads[0].device)
    weights = same_parameters([grad.clone() for grad in grads])
    norms = tritonclip.clip_(weights, rule, state=state, **options)
    limits, after = advanced(rule, values, norms)
    torch.testing.assert_close(values_of(state), after.cpu(), **CLOSE)

    if not rule.per_gradient:
        # A number as the limit is rounded as the rule's is.
        expected = [grad.clone() for grad in grads]
        limit = ClipByGlobalNorm(limits.item(), rule.norm_type, eps=0.0)
        tritonclip.clip_(parameters(expected), limit, **options)
    else:
        by = (limits / norms.double()).clamp(max=1.0) / float(options.get("grad_scale", 1.0))
        by = torch.where(by.isnan() & norms.isfinite().to(by.device), 1.0, by)
        pairs = zip(grads, by.tolist(), strict=True)
        expected = [(grad.double() * factor).to(grad.dtype) for grad, factor in pairs]
    for weight, own in zip(weights, expected, strict=True):
        # Limits may differ by a rounding, and so may each element.
        eps = max(torch.finfo(own.dtype).eps, 1e-13)
        torch.testing.assert_close(grad_of(weight), own, rtol=4 * eps, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
def test_a_device_advances_as_operators(backend, rule):
    """Over norms with NaN, inf and zeros."""
    state, n = ClipState(), 3 if rule.per_gradient else 2
    series = [histories.norms(60, seed=seed, bad=False)[:STEPS] for seed in range(n)]
    series[0][3:6] = math.nan, math.inf, 0.0
    series[1][5] = 0.0
    for norms in zip(*series, strict=True):
        grads = [of_norm(norm, dtype=torch.float32).to(backend.device) for norm in norms]
        clip_and_compare(rule, state, grads)
    assert state.steps == STEPS


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("rule", ADAPTIVE)
@pytest.mark.parametrize("option", ["scaled", "scaled-on-device", "zero"])
def test_mixed_dtypes_advance_as_one(backend, rule, option):
    options: Any = {
        "scaled": {"grad_scale": 8.0},
        "scaled-on-device": {"grad_scale": torch.tensor(8.0, device=backend.device)},
        "zero": {"nonfinite": "zero"},
    }[option]
    dtypes, state = (torch.float32, torch.bfloat16, torch.float64, torch.float16), ClipState()
    for step in range(4):
        grads = [normal(40, dtype, backend.device, seed=step) * (1 + step) for dtype in dtypes]
        clip_and_compare(rule, state, grads, **options)


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_max_norm_may_be_a_function_of_the_step(backend, rule):
    numbers = {name: getattr(rule, name) for name in rule.__match_args__}
    scheduled = type(rule)(**numbers | {"max_norm": lambda step: 0.5 / (1 + step)})
    state = ClipState()
    for step in range(3):
        (weight,) = same_parameters([of_norm(9.0).to(backend.device)])
        tritonclip.clip_(weight, scheduled, state=state)
        assert float(grad_of(weight).norm()) == pytest.approx(0.5 / (1 + step), rel=1e-12)


WINDOWS = [1, 2, 5, 128, 1000, BLOCK, BLOCK + 1, 2 * BLOCK + 3]


def filled(window: int, n: int, kind: str) -> Tensor:
    """A state that has seen n norms."""
    norms = {
        "spread": normal(window, torch.float64, seed=window).exp(),
        "equal": torch.full((window,), 0.75, dtype=torch.float64),
        "two": torch.arange(window, dtype=torch.float64) % 2 + 1,
        "geometric": 1 + 2.0 ** -(torch.arange(window, dtype=torch.float64) % 53),
        "extreme": torch.logspace(-300, 300, window, dtype=torch.float64).flip(0),
        "tiny": torch.arange(1, window + 1, dtype=torch.float64) * 5e-324,
    }[kind]
    norms[n:] = math.nan
    return torch.cat([norms, torch.tensor([n], dtype=torch.float64)])


def loaded(values: Tensor, rule: Any, device: torch.device) -> ClipState:
    state = ClipState()
    kind = f"{type(rule).__name__} with {len(values)} numbers"
    known = {"kind": kind, "steps": 0, "parameters": None, "values": values.to(device)}
    state.load_state_dict(known)
    return state


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["spread", "equal", "two", "geometric", "extreme", "tiny"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_quantile_of_any_window(backend, window, kind):
    for quantile, n in ((0.3, window // 2), (0.9, window), (0.01, 3 * window + 1)):
        rule, values = ClipByQuantile(quantile, window), filled(window, n, kind)
        state = loaded(values, rule, backend.device)
        norm = values.nanmedian().reshape(1) if n else torch.tensor([2.0], dtype=torch.float64)
        norm = norm if norm > 1e-30 else torch.ones_like(norm)
        grad = norm.to(backend.device, copy=True)
        tritonclip.clip_(same_parameters([grad]), rule, state=state)
        limit, after = rule.advance(values, norm[0])
        torch.testing.assert_close(values_of(state).cpu(), after, **CLOSE)
        # The least number that is not 0 has no digits to round to.
        expected = torch.minimum(limit, norm)
        torch.testing.assert_close(grad.cpu(), expected, **CLOSE | {"atol": 5e-324})


def test_the_norm_that_is_the_limit_clips_nothing(backend):
    """Both kernels must find the same norm, to the bit."""
    rule, state = ClipByQuantile(0.5, window=1), ClipState()
    for step in range(6):
        sizes = (7, 3 * CHUNK + 5, 300)
        grads = [normal(n, torch.float32, backend.device, seed=step + n) for n in sizes]
        with unchanged(grads):
            tritonclip.clip_(same_parameters(grads), rule, state=state)


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_resumed_device_has_the_same_bits(backend, rule):
    """From a copy of the state at each step."""
    state = ClipState()
    for norm in histories.norms(60, seed=5)[:STEPS]:
        resumed = copy_of(state)
        grads = [of_norm(norm).to(backend.device), of_norm(1.0, 3).to(backend.device)]
        again = [grad.clone() for grad in grads]
        tritonclip.clip_(same_parameters(grads), rule, state=state)
        tritonclip.clip_(same_parameters(again), rule, state=resumed)
        assert_bits([*again, values_of(resumed)], [*grads, values_of(state)])


def test_rows_of_absent_gradients_stay(backend):
    rule, state = ClipByOwnHistory(warmup=2, max_norm=math.inf), ClipState()
    weights = parameters([of_norm(size).to(backend.device) for size in (1.0, 8.0, 64.0)])
    reference = histories.own_history(1.05, 0.98, 2, math.inf)
    for step in range(8):
        places = [i for i in range(3) if i != step % 4]
        norms = [(1.0 + step) * 8.0**i for i in places]
        for weight in weights:
            weight.grad = None
        for place, norm in zip(places, norms, strict=True):
            weights[place].grad = of_norm(norm).to(backend.device)
        before = values_of(state)
        tritonclip.clip_(weights, rule, state=state)
        for place, norm, limit in zip(places, norms, reference(norms, places), strict=True):
            found = float(grad_of(weights[place]).norm())
            assert found == pytest.approx(min(norm, limit), rel=1e-12)
        if step and step % 4 < 3:
            assert torch.equal(values_of(state)[step % 4], before[step % 4])


@pytest.mark.parametrize("n", [1, 40])
def test_own_history_of_many_gradients(backend, n, monkeypatch):
    """More than a program reads at a time."""
    if INTERPRETED:
        # So many gradients would take minutes.
        module = importlib.import_module("tritonclip.kernels.adaptive")
        monkeypatch.setattr(module, "BLOCK", 16)
    else:
        n *= 30
    rule, state = ClipByOwnHistory(warmup=1), ClipState()
    for step in range(2):
        sizes = [1.0 + (7 * i + 11 * step) % 13 for i in range(n)]
        clip_and_compare(rule, state, [torch.tensor([s], device=backend.device) for s in sizes])


def test_values_that_do_not_lie_in_order_are_loaded(backend):
    rule, state = ClipByOwnHistory(warmup=1), ClipState()
    weights = parameters([of_norm(size).to(backend.device) for size in (1.0, 2.0, 4.0)])
    tritonclip.clip_(weights, rule, state=state)
    saved, other = state.state_dict(), ClipState()
    other.load_state_dict({**saved, "values": values_of(state).T.contiguous().T})
    for one in (state, other):
        for weight in weights:
            weight.grad = of_norm(8.0).to(backend.device)
        tritonclip.clip_(weights, rule, state=one)
    assert_bits([values_of(other)], [values_of(state)])


class Still(torch.optim.Optimizer):
    """Updates nothing."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_step_that_a_fused_optimizer_skips_leaves_the_state(backend, rule):
    """Clipped before the device decides."""
    weights = parameters([of_norm(2.0).to(backend.device), of_norm(1.0).to(backend.device)])
    bare = torch.optim.SGD(weights, 0.1, fused=True)
    optimizer = ClippedOptimizer(bare, rule, nonfinite="skip", skip_above=5.0)
    saved = []
    for norm in (1.0, 2.0, 9.0, math.inf, 3.0):
        weights[0].grad = of_norm(norm).to(backend.device)
        weights[1].grad = of_norm(1.0).to(backend.device)
        optimizer.step()
        values = optimizer.state_dict()["tritonclip"]["memory"]["rule"]["values"]
        saved.append(torch.tensor(values, dtype=torch.float64))
    assert_bits([saved[2], saved[3]], [saved[1], saved[1]])
    assert not torch.equal(saved[4].nan_to_num(), saved[3].nan_to_num())
    assert int(optimizer.stats.skipped_steps) == 2


@pytest.mark.parametrize("window", [4, 5, 20 if INTERPRETED else 128])
def test_outliers_are_judged_as_by_operators(backend, window):
    above = Outlier(2.0, window)
    (weight,) = parameters([of_norm(1.0).to(backend.device)])
    optimizer = ClippedOptimizer(Still([weight]), 1e9, skip_above=above)
    state = torch.tensor(above.start(), dtype=torch.float64)
    skipped = 0
    for norm in [*[0.1, 0.2] * (window // 4 + 1), 0.1, 9.0, math.nan, 0.2, 9.0]:
        weight.grad = of_norm(norm).to(backend.device)
        found = tritonclip.get_total_norm([weight.grad]).double().cpu()
        limit, state = above.advance(state, found)
        skipped += bool(found > limit)
        optimizer.step()
        values = optimizer.state_dict()["tritonclip"]["memory"]["outliers"]["values"]
        torch.testing.assert_close(values, state.tolist(), **CLOSE)
        assert int(optimizer.stats.skipped_steps) == skipped
    assert skipped


class Functions(TorchFunctionMode):
    """Counts functions of torch that make or change tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and function.__name__ not in ("__get__", "detach"):
            self.called.append(function.__name__)
        return result


# Of a quantile of each gradient, operators advance the state.
WITH_KERNEL = [one for one in ADAPTIVE if one.id != "own-quantile"]


@pytest.mark.plain_empty
@pytest.mark.parametrize("rule", WITH_KERNEL)
def test_a_launch_takes_the_place_of_all_operators(backend, rule, monkeypatch):
    """Beside those of a fixed limit: memory for limit and state, and for norms by gradient."""
    if backend.name != "triton":
        pytest.skip("the torch backend launches no kernels of ours")
    fixed = ClipByNorm(1e9) if rule.per_gradient else ClipByGlobalNorm(1e9)
    weights = parameters([of_norm(size).to(backend.device) for size in (1.0, 2.0)])
    called = []
    for one in (fixed, rule):
        state = ClipState()
        tritonclip.clip_(weights, one, state=state)
        with monkeypatch.context() as patch, Functions() as functions:
            module = importlib.import_module("tritonclip.kernels.launch")
            patch.setattr(module, "launch", lambda *args, **constants: None)
            tritonclip.clip_(weights, one, state=state)
        called.append(functions.called)
    # Memory for the limit, for the state after, which is then copied into the state, and for the
    # launch that finds the norm of each gradient. The limit is checked and handed over as it is.
    names = ["empty", "empty", "empty", "contiguous"] if rule.per_gradient else ["empty", "reshape"]
    names += ["to", "empty_like", "copy_"]
    assert Counter(called[1]) - Counter(called[0]) == Counter(names)


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_clip_advances_the_memory_of_the_state(backend, rule):
    """The replays of a CUDA graph go on from it."""
    if backend.host_decides:
        pytest.skip("on a host a state is replaced")
    state = ClipState()
    weights = parameters([of_norm(1.0).to(backend.device), of_norm(2.0).to(backend.device)])
    tritonclip.clip_(weights, rule, state=state)
    values: Any = state._values
    before: Tensor = values.clone()
    tritonclip.clip_(weights, rule, state=state)
    after: Any = state._values
    assert after is values
    assert not torch.equal(values.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_clip_interrupted_leaves_a_state_of_before_or_after(backend, rule):
    if backend.host_decides:
        pytest.skip("tests/engine/test_interrupts.py has the host")
    grads = [of_norm(3.0).to(backend.device), of_norm(1.0).to(backend.device)]
    saved, n, left = ClipState(), 1, []
    tritonclip.clip_(same_parameters([grad.clone() for grad in grads]), rule, state=saved)
    before, ended = values_of(saved), False
    while not ended:
        state = copy_of(saved)
        weights = same_parameters([grad.clone() for grad in grads])
        interrupt = InterruptAtBytecode(n, "/tritonclip/rules/", "/tritonclip/backends/")
        with suppress(KeyboardInterrupt), interrupt:
            tritonclip.clip_(weights, rule, state=state)
        left.append(values_of(state))
        ended = interrupt.n_seen < n
        n += 61
    for values in left:
        assert any(torch.equal(values.nan_to_num(), o.nan_to_num()) for o in (before, left[-1]))
    assert not torch.equal(before.nan_to_num(), left[-1].nan_to_num())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rule", ADAPTIVE)
def test_graph_replays_advance_the_state(cuda_backend, rule):
    """As eager calls from the same state do, to the bit; no call waits."""
    grads = [of_norm(1.0).cuda(), of_norm(1.0, 3, torch.float32).cuda()]
    params, state = parameters(grads), ClipState()
    graph, _ = captured(lambda: tritonclip.clip_(params, rule, state=state))
    twin = copy_of(state)
    copied = [grad.clone() for grad in grads]
    own = parameters(copied)
    for norm in histories.norms(60, seed=5):
        values = [of_norm(norm).cuda(), of_norm(1.0, 3, torch.float32).cuda()]
        for grad, copy, value in zip(grads, copied, values, strict=True):
            grad.copy_(value)
            copy.copy_(value)
        with no_sync():
            graph.replay()
            tritonclip.clip_(own, rule, state=twin)
        assert_bits(grads, copied)
        assert_bits([values_of(state)], [values_of(twin)])
