"""A wrapper under a GradScaler, torch's and ours: unscaled once, clipped unscaled, steps judged.

The truth is a loop without any scaler: gradients as they are without a loss scale, clipped by hand
in float64, the bare optimizer stepped where they are finite, the scale kept by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import reference
import torch
from cases import assert_bits, assert_norm, bounds_of, copies, grad_of, normal
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from training import (
    INNERS,
    PLAIN_AND_FUSED,
    POLICIES,
    RULES,
    SCALERS,
    SHAPES,
    new_params,
    state_of,
    wrapped,
)

import tritonclip
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClippedOptimizer,
    FlatGradients,
)
from tritonclip.backends.cpu_backend import CpuLayout

STEPS = 12
OVERFLOWS = (3, 8)
SCALE, INTERVAL = 1024.0, 2

UNSCALED_BEFORE = pytest.mark.parametrize("unscale", [False, True], ids=["direct", "unscale_"])


def grads_at(step: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    """The gradients of a step without a loss scale: norms from 0.5 to 10, so most are clipped."""
    size = (0.1, 1.0, 2.0)[step % 3]
    return [size * normal(shape, seed=10 * step + at) for at, shape in enumerate(shapes)]


def spoiled(grads: list[Tensor], value: float = torch.inf) -> list[Tensor]:
    """The gradients with one element that is not finite."""
    grads = copies(grads)
    grads[1].view(-1)[2] = value
    return grads


def backward(scaler: torch.amp.GradScaler, params: Sequence[Tensor], grads: list[Tensor]) -> None:
    """Leaves the gradients, times the loss scale, at the parameters."""
    for param in params:
        param.grad = None
    loss = sum((p * g.to(p.device)).sum() for p, g in zip(params, grads, strict=True))
    assert isinstance(loss, Tensor)
    scaler.scale(loss).backward()


def scaled_step(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, params: Sequence[Tensor], grads: Any
) -> None:
    backward(scaler, params, grads)
    scaler.step(optimizer)
    scaler.update()


def hand_clip(rule: Any, grads: list[Tensor]) -> list[Tensor]:
    """What a rule makes of gradients, in float64 and rounded once."""
    wide = [g.double() for g in grads]
    if isinstance(rule, ClipByValue):
        return [g.clamp(*bounds_of(rule)).float() for g in wide]
    limit: float = rule.max_norm
    if isinstance(rule, ClipByNorm):
        return [(g * min(1.0, limit / (reference.norm(g) + 1e-6))).float() for g in wide]
    coefficient = min(1.0, limit / (reference.total_norm(wide) + 1e-6))
    return [(g * coefficient).float() for g in wide]


def hand_step(
    optimizer: Optimizer, params: Sequence[Tensor], grads: list[Tensor], rule: Any
) -> None:
    """One step of a bare optimizer on gradients that were clipped by hand."""
    for param, grad in zip(params, hand_clip(rule, grads), strict=True):
        param.grad = grad
    optimizer.step()


def assert_same_run(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Coefficients of both sides differ by the few ulp of a float32 norm and quotient, and every
    element of an update by as much: 12 updates of 0.1 are right to 12 * 0.1 * 4 * 2**-23 = 6e-7.
    """
    for ours, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-6)


@UNSCALED_BEFORE
@pytest.mark.parametrize("make", INNERS)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_run_equals_a_loop_without_scaler(scaler_type, make, unscale):
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), 1.0), make(twins)
    scaler = scaler_type("cpu", init_scale=SCALE, growth_interval=INTERVAL)
    scale, finite, norm = SCALE, 0, torch.nan
    for step in range(STEPS):
        overflows = step in OVERFLOWS
        grads = spoiled(grads_at(step)) if overflows else grads_at(step)
        backward(scaler, params, grads)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

        if overflows:
            scale, finite = scale / 2, 0
        else:
            hand_step(bare, twins, grads, ClipByGlobalNorm(1.0))
            norm, finite = reference.total_norm(grads), finite + 1
            if finite == INTERVAL:
                scale, finite = scale * 2, 0
        assert_same_run(params, twins)
        assert scaler.get_scale() == scale
        assert_norm(optimizer.stats.last_norm, norm)
    assert int(optimizer.stats.steps) == STEPS - len(OVERFLOWS)
    assert int(optimizer.stats.skipped_steps) == 0
    assert int(optimizer.stats.clipped_steps) == sum(
        reference.total_norm(grads_at(step)) > 1 for step in range(STEPS) if step not in OVERFLOWS
    )


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_keeps_the_scales_of_torch(scaler_type, make):
    """Scale and growth tracker, step by step, beside torch's scaler on a bare optimizer."""
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), 1.0), make(twins)
    options: dict[str, Any] = {"init_scale": 512.0, "growth_interval": 3, "growth_factor": 4.0}
    ours, torchs = scaler_type("cpu", **options), torch.amp.GradScaler("cpu", **options)
    for step in range(STEPS):
        grads = spoiled(grads_at(step), torch.nan) if step in OVERFLOWS else grads_at(step)
        scaled_step(ours, optimizer, params, grads)
        scaled_step(torchs, bare, twins, grads)
        assert ours.state_dict() == torchs.state_dict()


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 1.0, 2.0**-10])
@UNSCALED_BEFORE
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_leaves_gradients_unscaled_and_clipped_once(scaler_type, make, unscale, scale):
    params, optimizer = wrapped(make)
    scaler = scaler_type("cpu", init_scale=scale)
    backward(scaler, params, grads_at(2))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    # At 3.0 scaling, unscaling and clipping round once each.
    for param, grad in zip(params, hand_clip(ClipByGlobalNorm(1.0), grads_at(2)), strict=True):
        torch.testing.assert_close(grad_of(param), grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_unscales_below_the_limit_too(scaler_type, rule):
    """Bit for bit: the scale is a power of two, and a coefficient of 1 changes nothing."""
    params = new_params()
    scaler = scaler_type("cpu", init_scale=SCALE)
    small = [1e-3 * grad for grad in grads_at(2)]
    scaled_step(scaler, ClippedOptimizer(SGD(params, lr=1.0), rule), params, small)
    assert_bits([grad_of(param) for param in params], small)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_run_is_right_for_every_rule(scaler_type, make, rule):
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), rule), make(twins)
    scaler = scaler_type("cpu", init_scale=SCALE, growth_interval=INTERVAL)
    for step in range(STEPS):
        overflows = step in OVERFLOWS
        scaled_step(
            scaler, optimizer, params, spoiled(grads_at(step)) if overflows else grads_at(step)
        )
        if not overflows:
            hand_step(bare, twins, grads_at(step), rule)
        assert_same_run(params, twins)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_scaler_overflow_changes_and_counts_nothing(scaler_type, policy, make, rule, value):
    """Under every policy: an overflow is the scaler's to handle, neither an error nor a skip."""
    params, optimizer = wrapped(make, rule, nonfinite=policy)
    scaler = scaler_type("cpu", init_scale=SCALE)
    scaled_step(scaler, optimizer, params, grads_at(2))
    before, state = copies(params), state_of(optimizer, params)
    stats = optimizer.stats.state_dict()
    scaled_step(scaler, optimizer, params, spoiled(grads_at(1), value))
    assert_bits(params, before)
    assert_bits(state_of(optimizer, params), state)
    assert_bits(optimizer.stats.state_dict().values(), stats.values())
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_error_is_raised_for_what_came_after_the_scaler_looked(scaler_type, make):
    """It found no overflow, so that NaN is an error of the program."""
    params, optimizer = wrapped(make, 1.0, nonfinite="error")
    scaler = scaler_type("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(0))
    scaler.unscale_(optimizer)
    grad_of(params[1]).fill_(torch.nan)
    before = copies(params)
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[1\]"):
        scaler.step(optimizer)
    assert_bits(params, before)


@pytest.mark.parametrize("norm_type", [0.0, -torch.inf, torch.inf, 1.0, 2.0], ids="p={}".format)
@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_scaler_sees_an_overflow_under_every_norm_type(scaler_type, norm_type, value):
    """The norms of order 0 and -inf do not show an inf by themselves."""
    params = new_params()
    optimizer = ClippedOptimizer(SGD(params, lr=1.0), ClipByGlobalNorm(1.0, norm_type))
    scaler = scaler_type("cpu", init_scale=SCALE)
    before = copies(params)
    scaled_step(scaler, optimizer, params, spoiled(grads_at(1), value))
    assert_bits(params, before)
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("make", INNERS)
def test_scaler_run_is_right_after_overflows_from_the_start(scaler_type, make):
    """torch's fused SGD takes its momentum for filled after a first step that did not happen."""
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), 1.0), make(twins)
    scaler = scaler_type("cpu", init_scale=SCALE)
    for _ in range(2):
        scaled_step(scaler, optimizer, params, spoiled(grads_at(0)))
    assert_bits(params, copies(twins))
    for step in range(4):
        scaled_step(scaler, optimizer, params, grads_at(step))
        hand_step(bare, twins, grads_at(step), ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_run_is_right_for_momentum_that_starts_late(scaler_type):
    """A group whose first gradients come, and overflow, after the first step of the others."""
    params, twins = new_params(), new_params()

    def sgd(given: list[Tensor]) -> Optimizer:
        groups = [{"params": given[:2]}, {"params": given[2:]}]
        return SGD(groups, lr=0.1, momentum=0.9, fused=True)

    optimizer, bare = ClippedOptimizer(sgd(params), 1.0), sgd(twins)
    scaler = scaler_type("cpu", init_scale=SCALE)
    for step in range(4):
        grads = grads_at(step)
        some = slice(0, 2) if step == 0 else slice(None)
        given = spoiled(grads) if step == 1 else grads
        scaled_step(scaler, optimizer, params[some], given[some])
        if step != 1:
            hand_step(bare, twins[some], grads[some], ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_unscales_what_no_rule_holds_for(scaler_type, make):
    """need_clip=False and clip=None: divided by the loss scale, bit for bit, and not clipped."""
    params = new_params(((3,), (4,), (5,), (6,)))
    setattr(params[1], "need_clip", False)  # noqa: B010
    optimizer = ClippedOptimizer(
        make(
            [
                {"params": params[:2]},
                {"params": [params[2]], "clip": None},
                {"params": [params[3]], "clip": ClipByNorm(0.25)},
            ]
        ),
        1.0,
    )
    grads = [5 * normal(param.numel(), seed=at) for at, param in enumerate(params)]
    scaled_step(scaler_type("cpu", init_scale=SCALE), optimizer, params, grads)
    assert_bits([grad_of(params[1]), grad_of(params[2])], [grads[1], grads[2]])
    for at, limit in ((0, 1.0), (3, 0.25)):
        (expected,) = hand_clip(ClipByGlobalNorm(limit), [grads[at]])
        torch.testing.assert_close(grad_of(params[at]), expected, rtol=1e-6, atol=0)
    assert_norm(optimizer.stats.last_norm, reference.norm(grads[0]))
    assert_norm(optimizer.stats.group_norms[2], reference.norm(grads[3]))


@pytest.mark.parametrize("at", [0, 1, 2, 3], ids=["common", "need_clip", "clip=None", "own rule"])
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_sees_an_overflow_in_any_group(scaler_type, make, at):
    params = new_params(((3,), (4,), (5,), (6,)))
    setattr(params[1], "need_clip", False)  # noqa: B010
    groups: list[dict[str, Any]] = [
        {"params": params[:2]},
        {"params": [params[2]], "clip": None},
        {"params": [params[3]], "clip": 2.0},
    ]
    optimizer = ClippedOptimizer(make(groups), 1.0)
    scaler = scaler_type("cpu", init_scale=SCALE)
    grads = [normal(param.numel(), seed=i) for i, param in enumerate(params)]
    grads[at][-1] = torch.inf
    before = copies(params)
    scaled_step(scaler, optimizer, params, grads)
    assert_bits(params, before)
    assert scaler.get_scale() == SCALE / 2
    assert optimizer.stats.group_norms.get(2, torch.tensor(torch.nan)).isnan()


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_judges_two_optimizers_apart(scaler_type, make):
    """One overflows and stays; the other steps, and is not skipped; the scale backs off once."""
    first, second, twins = new_params(), new_params(), new_params()
    one, other = ClippedOptimizer(make(first), 1.0), ClippedOptimizer(make(second), 1.0)
    scaler = scaler_type("cpu", init_scale=SCALE)
    before = copies(first)
    backward(scaler, first, spoiled(grads_at(1)))
    backward(scaler, second, grads_at(1))
    scaler.step(one)
    scaler.step(other)
    scaler.update()
    hand_step(make(twins), twins, grads_at(1), ClipByGlobalNorm(1.0))
    assert_bits(first, before)
    assert_same_run(second, twins)
    assert (int(one.stats.steps), int(other.stats.steps)) == (0, 1)
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_serves_a_bare_optimizer_beside_a_wrapper(scaler_type):
    params, twins = new_params(), new_params()
    scaler = scaler_type("cpu", init_scale=SCALE)
    bare = AdamW(params, lr=0.1)
    for step in range(3):
        scaled_step(scaler, bare, params, spoiled(grads_at(1)) if step == 1 else grads_at(step))
    expected = AdamW(twins, lr=0.1)
    for step in (0, 2):
        hand_step(expected, twins, grads_at(step), ClipByValue(1e9))
    assert_bits(params, copies(twins))


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_that_is_disabled_leaves_clipping_as_it_is(scaler_type):
    params, twins = new_params(), new_params()
    optimizer = ClippedOptimizer(AdamW(params, lr=0.1), 1.0)
    scaler = scaler_type("cpu", enabled=False)
    bare = AdamW(twins, lr=0.1)
    for step in range(3):
        backward(scaler, params, grads_at(step))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        hand_step(bare, twins, grads_at(step), ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)
    assert int(optimizer.stats.steps) == 3


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_refuses_a_second_step_before_update(scaler_type, make):
    params, optimizer = wrapped(make)
    scaler = scaler_type("cpu")
    backward(scaler, params, grads_at(1))
    scaler.step(optimizer)
    before = copies(params)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since"):
        scaler.step(optimizer)
    assert_bits(params, before)


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_scaler_refuses_an_optimizer_that_is_wrapped(method):
    params = new_params()
    inner = SGD(params, lr=1.0)
    wrapper = ClippedOptimizer(inner, 1.0)
    scaler = tritonclip.GradScaler("cpu")
    backward(scaler, params, grads_at(1))
    before = copies([*params, *map(grad_of, params)])
    with pytest.raises(ValueError, match=r"this SGD is wrapped .*; pass the wrapper"):
        getattr(scaler, method)(inner)
    assert_bits([*params, *map(grad_of, params)], before)
    getattr(scaler, method)(wrapper)


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_refuses_to_unscale_twice(scaler_type, make):
    params, optimizer = wrapped(make)
    scaler = scaler_type("cpu")
    backward(scaler, params, grads_at(1))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_without_gradients_asserts_as_torch(scaler_type, make):
    """In `step` or, for an optimizer that takes the scale itself, in `update`."""
    params = new_params()
    scaler = scaler_type("cpu")
    scaler.scale(torch.ones(()))
    optimizer = ClippedOptimizer(make(params), 1.0)

    def step_and_update() -> None:
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(AssertionError, match=r"No inf checks were recorded"):
        step_and_update()


@pytest.mark.parametrize("again", [True, False], ids=["with scaler", "without scaler"])
@pytest.mark.parametrize("mode", [{"foreach": False}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_is_right_after_a_step_that_raised(scaler_type, mode, again):
    """What a scaler leaves at the optimizer for one step must not scale or skip the next one."""
    params, twins = new_params(), new_params()
    optimizer = ClippedOptimizer(SGD(params, lr=0.1, **mode), 1.0)
    scaler = scaler_type("cpu", init_scale=SCALE)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    backward(scaler, params, grads_at(1))
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    handle.remove()
    scaler.update()
    following = scaler if again else torch.amp.GradScaler("cpu", enabled=False)
    scaled_step(following, optimizer, params, grads_at(2))
    hand_step(SGD(twins, lr=0.1), twins, grads_at(2), ClipByGlobalNorm(1.0))
    assert_same_run(params, twins)


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_refuses_a_closure_as_torch(scaler_type):
    params = new_params()
    optimizer = ClippedOptimizer(SGD(params), 1.0)
    scaler = scaler_type("cpu")
    backward(scaler, params, grads_at(1))
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 1.0)


def test_scaler_checkpoint_moves_between_ours_and_torchs():
    ours = tritonclip.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    params = new_params()
    scaled_step(ours, ClippedOptimizer(SGD(params, lr=0.1), 1.0), params, grads_at(1))
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(ours.state_dict())
    again = tritonclip.GradScaler("cpu")
    again.load_state_dict(torchs.state_dict())
    assert again.state_dict() == ours.state_dict()
    # The loaded growth tracker counts on.
    scaled_step(again, ClippedOptimizer(SGD(params, lr=0.1), 1.0), params, grads_at(2))
    assert again.get_scale() == 128.0


@UNSCALED_BEFORE
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_unscales_and_clips_sparse_gradients(scaler_type, unscale):
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = ClippedOptimizer(SGD(embedding.parameters(), lr=1.0), 1.0)
    scaler = scaler_type("cpu", init_scale=SCALE)
    before = embedding.weight.detach().clone()
    # Row 1 is met twice, so its gradient is 2 in both columns: the norm is (2*2*2 + 2)**0.5.
    scaler.scale(embedding(torch.tensor([1, 1, 4])).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    expected = before.clone()
    expected[1] -= 2 / 10**0.5
    expected[4] -= 1 / 10**0.5
    # Coefficients add the eps of 1e-6 to a norm of 3.2, and float32 rounds.
    torch.testing.assert_close(embedding.weight.detach(), expected, rtol=0, atol=1e-6)
    assert_norm(optimizer.stats.last_norm, 10**0.5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_scaler_runs_through_the_kernels(backend, make, rule):
    """Scaled, clipped and unclipped steps, and an overflow that leaves earlier results alone."""
    shapes = ((3,), (2049,))
    params, twins = new_params(shapes, backend.device), new_params(shapes)
    optimizer, bare = ClippedOptimizer(make(params), rule), make(twins)
    scaler = tritonclip.GradScaler(backend.device.type, init_scale=SCALE)
    kept = []
    for step in range(4):
        grads = grads_at(step, shapes)
        scaled_step(scaler, optimizer, params, spoiled(grads) if step == 2 else grads)
        if step != 2:
            hand_step(bare, twins, grads, rule)
            kept.append((optimizer.stats.last_norm, optimizer.stats.last_norm.clone()))
        assert_same_run([param.detach().cpu() for param in params], [t.detach() for t in twins])
    assert int(optimizer.stats.steps) == 3
    assert_bits((norm for norm, _ in kept), (norm for _, norm in kept))


class Calls:
    """How often a backend's verbs ran: norms measured, writes asked for, gradients written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured = self.asked = self.written = self.torchs = 0
        # Within a verb, which may scale by the function that torch's scaler unscales with.
        self.in_verb = False
        check = torch._amp_foreach_non_finite_check_and_unscale_
        bind, multiply = CpuLayout.bind, torch._foreach_mul_

        def counting_bind(layout: Any, *args: Any) -> Any:
            return _Counting(bind(layout, *args), self)

        def check_and_unscale(*args: Any) -> None:
            self.written += self.in_verb
            self.torchs += not self.in_verb
            check(*args)

        def foreach_mul_(*args: Any) -> None:
            self.written += 1
            multiply(*args)

        monkeypatch.setattr(CpuLayout, "bind", counting_bind)
        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", check_and_unscale)
        monkeypatch.setattr(torch, "_foreach_mul_", foreach_mul_)


class _Counting:
    def __init__(self, batch: Any, calls: Calls) -> None:
        self._batch, self._calls = batch, calls

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._batch, name)
        if not callable(verb):
            return verb

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls.measured += name == "norm"
            self._calls.asked += name in ("clamp_", "scale_", "scale_each_")
            self._calls.in_verb = True
            try:
                return verb(*args, **kwargs)
            finally:
                self._calls.in_verb = False

        return counted


def counted_step(
    monkeypatch: pytest.MonkeyPatch, scaler: torch.amp.GradScaler, optimizer: Optimizer
) -> Calls:
    """Steps, and tells what ran in the step."""
    calls = Calls(monkeypatch)
    scaler.step(optimizer)
    return calls


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_scaler_reads_and_writes_gradients_once(monkeypatch, make, rule):
    """By our scaler: one measuring pass, one writing pass, no pass of torch's own."""
    params, optimizer = wrapped(make, rule)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(2))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.asked, calls.torchs) == (1, 1, 0)


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize(
    ("scale", "size", "written"),
    [(SCALE, 1.0, 1), (SCALE, 1e-3, 1), (1.0, 1.0, 1), (1.0, 1e-3, 0)],
    ids=["scaled clipped", "scaled below", "unscaled clipped", "unscaled below"],
)
def test_scaler_writes_gradients_only_where_needed(monkeypatch, make, scale, size, written):
    params, optimizer = wrapped(make)
    scaler = tritonclip.GradScaler("cpu", init_scale=scale)
    backward(scaler, params, [size * grad for grad in grads_at(2)])
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.written, calls.torchs) == (1, written, 0)


def test_scaler_overflow_writes_no_gradient(monkeypatch):
    """With an inner optimizer that is told on the host."""
    params = new_params()
    optimizer = ClippedOptimizer(AdamW(params, foreach=False), 1.0)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, spoiled(grads_at(2)))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.asked, calls.torchs) == (1, 0, 0)


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_scaler_reads_once_after_unscale(monkeypatch, make):
    """torch's pass happened in unscale_; the step measures once more, and does not unscale."""
    params, optimizer = wrapped(make)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, [1e-3 * grad for grad in grads_at(2)])
    scaler.unscale_(optimizer)
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.written, calls.torchs) == (1, 0, 0)


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_scaler_of_torch_reads_in_a_pass_of_its_own(monkeypatch, make):
    """What ours saves: torch's scaler looks at the gradients before the wrapper measures them."""
    params, optimizer = wrapped(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(2))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.torchs) == (1, 1)


def two(scaler_type, **options):
    """A weight with gradient [3, 4] under a scale of 1,024, its wrapper and the scaler."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = ClippedOptimizer(SGD([weight], lr=1.0, **options), ClipByGlobalNorm(1.0, eps=0.0))
    scaler = scaler_type("cpu", init_scale=1024.0)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    return weight, optimizer, scaler


def _shrink(optimizer, *_):
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = weight.grad * 0.1


def _shrink_in_place(optimizer, *_):
    optimizer.param_groups[0]["params"][0].grad.mul_(0.1)


def _allow_more(optimizer, *_):
    optimizer.clip = ClipByGlobalNorm(2.0, eps=0.0)


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize(
    ("hook", "expected"),
    [(_shrink, [-0.3, -0.4]), (_shrink_in_place, [-0.3, -0.4]), (_allow_more, [-1.2, -1.6])],
    ids=["replaced", "in-place", "rule"],
)
def test_scaler_heeds_what_a_step_hook_changes(scaler_type, hook, expected):
    weight, optimizer, scaler = two(scaler_type)
    optimizer.register_step_pre_hook(hook)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_refuses_a_closure_by_position(fused):
    weight, optimizer, scaler = two(tritonclip.GradScaler, fused=fused)
    with pytest.raises(RuntimeError, match=r"closure computes gradients after .*: call backward"):
        scaler.step(optimizer, lambda: torch.tensor(1.0))
    assert weight.tolist() == [0.0, 0.0]
    assert grad_of(weight).tolist() == [3072.0, 4096.0]


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("how", ["position", "name"])
def test_scaler_that_is_disabled_hands_a_closure_on(scaler_type, how):
    weight, optimizer, _ = two(scaler_type)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (weight * torch.tensor([30.0, 40.0])).sum() + 7
        loss.backward()
        return loss

    scaler = scaler_type("cpu", enabled=False)
    given = {"closure": closure} if how == "name" else {}
    loss = scaler.step(optimizer, *(() if given else (closure,)), **given)
    assert loss is not None
    assert float(torch.as_tensor(loss).detach()) == 7
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def interrupt_a_step(scaler, optimizer):
    """Begins a step that ends before the parameters are updated."""

    def fail(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = optimizer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_does_not_unscale_again_after_a_step_that_raised(scaler_type, fused):
    weight, optimizer, scaler = two(scaler_type, fused=fused)
    interrupt_a_step(scaler, optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("fused", [False, True])
def test_unscale_after_a_step_that_raised_is_refused(scaler_type, fused):
    """The step has divided and clipped, and another one goes on."""
    weight, optimizer, scaler = two(scaler_type, fused=fused)
    interrupt_a_step(scaler, optimizer)
    # A scaler that has unscaled refuses by itself until then.
    scaler.update()
    before = grad_of(weight).clone()
    with pytest.raises(RuntimeError, match=r"divided .* another step"):
        scaler.unscale_(optimizer)
    assert torch.equal(grad_of(weight), before)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
def test_unscale_of_new_gradients_after_a_step_that_raised_is_right(scaler_type, flat):
    weight, optimizer, scaler = two(scaler_type, fused=True)
    optimizer.flat = FlatGradients([weight]) if flat else None

    interrupt_a_step(scaler, optimizer)
    weight.grad = None if not flat else grad_of(weight).zero_()
    scaler.scale((weight * torch.tensor([30.0, 40.0])).sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(grad_of(weight), torch.tensor([30.0, 40.0]))
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_multiplies_with_a_scale_that_was_set_before(scaler_type):
    weight, optimizer, scaler = two(scaler_type, fused=True)
    optimizer.grad_scale = torch.tensor(10.0)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.3, -0.4]))
