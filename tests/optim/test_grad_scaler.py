"""A wrapper under a GradScaler, torch's and ours: unscaled once, clipped unscaled, steps judged.

The truth is a loop without any scaler: gradients as they are without a loss scale, clipped by hand
in float64, the bare optimizer stepped where they are finite, the scale kept by hand. Overflows skip
the step and lower the scale. Some calls are refused for a wrapper, or after a step that raised.
"""

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import tritonclip
from helpers.cases import assert_bits, assert_norm, copies, grad_of
from helpers.loss_scale import (
    SCALE,
    UNSCALED_BEFORE,
    assert_same_run,
    backward,
    grads_at,
    hand_step,
    scaled_step,
    spoiled,
    weight_under,
)
from helpers.serving import decided_on_device
from helpers.training import (
    INNERS,
    PLAIN_AND_FUSED,
    POLICIES,
    SCALERS,
    new_params,
    unchanged,
    wrapped,
)
from tritonclip import ClipByGlobalNorm, ClipByValue, ClippedOptimizer
from tritonclip.backends.torch import TorchBatch

SCALED = torch.tensor([3072.0, 4096.0])


def assert_moved(weight: Tensor) -> None:
    """By one step on [3, 4], clipped to 1."""
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_scaler_run_is_right_for_momentum_that_starts_late(scaler):
    """A group whose first gradients come, and overflow, after the first step of the others."""
    params, twins = new_params(), new_params()

    def sgd(given: list[Tensor]) -> Optimizer:
        groups = [{"params": given[:2]}, {"params": given[2:]}]
        return SGD(groups, lr=0.1, momentum=0.9, fused=True)

    optimizer, bare = ClippedOptimizer(sgd(params), 1.0), sgd(twins)
    for step in range(4):
        grads = grads_at(step)
        some = slice(0, 2) if step == 0 else slice(None)
        given = spoiled(grads) if step == 1 else grads
        scaled_step(scaler, optimizer, params[some], given[some])
        if step != 1:
            hand_step(bare, twins[some], grads[some], ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)


def test_scaler_serves_a_bare_optimizer_beside_a_wrapper(scaler):
    params, twins = new_params(), new_params()
    bare = AdamW(params, lr=0.1)
    for step in range(3):
        scaled_step(scaler, bare, params, spoiled(grads_at(1)) if step == 1 else grads_at(step))
    expected = AdamW(twins, lr=0.1)
    for step in (0, 2):
        hand_step(expected, twins, grads_at(step), ClipByValue(1e9))
    assert_bits(params, copies(twins))


def test_scaler_that_is_disabled_leaves_clipping_as_it_is(scaler_type):
    params, twins = new_params(), new_params()
    optimizer = ClippedOptimizer(AdamW(params, lr=0.1), 1.0)
    scaler = scaler_type("cpu", enabled=False)
    bare = AdamW(twins, lr=0.1)
    for step in range(3):
        scaled_step(scaler, optimizer, params, grads_at(step), unscale=True)
        hand_step(bare, twins, grads_at(step), ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)
    assert int(optimizer.stats.steps) == 3


@UNSCALED_BEFORE
def test_scaler_unscales_and_clips_sparse_gradients(scaler, unscale):
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = ClippedOptimizer(SGD(embedding.parameters(), lr=1.0), 1.0)
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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weight, _: setattr(weight, "grad", weight.grad * 0.1), [-0.3, -0.4]),
        (lambda weight, _: weight.grad.mul_(0.1), [-0.3, -0.4]),
        (
            lambda _, optimizer: setattr(optimizer, "clip", ClipByGlobalNorm(2.0, eps=0.0)),
            [-1.2, -1.6],
        ),
    ],
    ids=["replaced", "in-place", "rule"],
)
def test_scaler_heeds_what_a_step_hook_changes(scaler_type, change, expected):
    weight, optimizer, scaler = weight_under(scaler_type)

    def hook(*_: object) -> None:
        change(weight, optimizer)

    optimizer.register_step_pre_hook(hook)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_without_a_scaler_may_follow_one_with_it(scaler_type, fused):
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    scaler.step(optimizer)
    weight.grad = SCALED / 1024
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.2, -1.6]))


def test_step_takes_scale_and_overflow_of_a_scaler_in_other_code():
    """As of a package with a scaler of its own, which sets both and deletes both."""
    weight, optimizer, _ = weight_under(torch.amp.GradScaler, fused=True)
    for overflow, expected in ((1.0, [0.0, 0.0]), (0.0, [-0.6, -0.8])):
        weight.grad = SCALED.clone()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(overflow)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        torch.testing.assert_close(weight.detach(), torch.tensor(expected))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
def test_scaler_refuses_a_loss_scale_that_a_hook_adds(fused, unscaled):
    """Gradients that are unscaled already would be divided twice."""
    weight, optimizer, scaler = weight_under(tritonclip.GradScaler, fused=fused)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "grad_scale": 2.0}))
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="grad_scale was given to a step of a GradScaler"):
        scaler.step(optimizer)
    assert not weight.any()


def test_a_shallow_copy_shares_what_a_scaler_hands_over():
    weight, optimizer, _ = weight_under(torch.amp.GradScaler, fused=True)
    twin, weight.grad = copy.copy(optimizer), SCALED.clone()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    twin.step()
    assert_moved(weight)
    assert float(twin.stats.last_norm) == 5.0
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    del optimizer.found_inf
    assert not hasattr(twin, "grad_scale")


# On a device nobody knows whether a kernel that was asked to write did.
DECIDED_ON_HOST = PLAIN_AND_FUSED[:2]
WRITES = ("clamp_", "scale_")


def counted_step(
    monkeypatch: pytest.MonkeyPatch, scaler: torch.amp.GradScaler, optimizer: Optimizer
) -> Counter[str]:
    """How often a step measured norms, asked for a write, wrote, and ran torch's own pass."""
    calls: Counter[str] = Counter()
    # Verbs that run, which may scale by the function that torch's scaler unscales with.
    running: list[str] = []

    def count_verb(name: str) -> None:
        verb = getattr(TorchBatch, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls["measured" if name == "norm" else "asked"] += 1
            running.append(name)
            try:
                return verb(*args, **kwargs)
            finally:
                running.pop()

        monkeypatch.setattr(TorchBatch, name, counted)

    def count_pass(name: str, *, is_torchs: bool) -> None:
        operator = getattr(torch, name)

        def counted(*args: Any) -> None:
            calls["torchs" if is_torchs and not running else "written"] += 1
            operator(*args)

        monkeypatch.setattr(torch, name, counted)

    for name in ("norm", *WRITES):
        count_verb(name)
    count_pass("_amp_foreach_non_finite_check_and_unscale_", is_torchs=True)
    count_pass("_foreach_mul_", is_torchs=False)
    scaler.step(optimizer)
    return calls


@pytest.mark.usefixtures("operators")
def test_scaler_reads_and_writes_gradients_once(monkeypatch, scaler_type, make, rule):
    """By our scaler: one measuring pass, one writing pass, no pass of torch's own, which looks at
    the gradients before the wrapper measures them.
    """
    params, optimizer = wrapped(make, rule)
    scaler = scaler_type("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(2))
    calls = counted_step(monkeypatch, scaler, optimizer)
    of_torch = scaler_type is not tritonclip.GradScaler
    # A clamp needs no norm once torch has looked.
    measured = not (of_torch and isinstance(rule, ClipByValue))
    assert (calls["measured"], calls["torchs"]) == (measured, of_torch)
    assert of_torch or calls["asked"] == 1


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("make", DECIDED_ON_HOST)
@pytest.mark.parametrize(
    ("scale", "size", "unscale", "written"),
    [
        pytest.param(SCALE, 1.0, False, 1, id="scaled clipped"),
        pytest.param(SCALE, 1e-3, False, 1, id="scaled below"),
        pytest.param(1.0, 1.0, False, 1, id="unscaled clipped"),
        pytest.param(1.0, 1e-3, False, 0, id="unscaled below"),
        # torch's pass happened in unscale_; the step measures once more, and does not unscale.
        pytest.param(SCALE, 1e-3, True, 0, id="after unscale_"),
    ],
)
def test_scaler_writes_gradients_only_where_needed(
    monkeypatch, make, scale, size, unscale, written
):
    params, optimizer = wrapped(make)
    scaler = tritonclip.GradScaler("cpu", init_scale=scale)
    backward(scaler, params, [size * grad for grad in grads_at(2)])
    if unscale:
        scaler.unscale_(optimizer)
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls["measured"], calls["written"], calls["torchs"]) == (1, written, 0)


@pytest.mark.usefixtures("operators")
def test_scaler_overflow_writes_no_gradient(monkeypatch):
    """With an inner optimizer that is told on the host."""
    params, optimizer = wrapped(lambda p: AdamW(p, foreach=False))
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, spoiled(grads_at(2)))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls["measured"], calls["asked"], calls["torchs"]) == (1, 0, 0)


def test_error_is_raised_for_what_came_after_the_scaler_looked(scaler, make):
    """It found no overflow, so that NaN is an error of the program."""
    params, optimizer = wrapped(make, 1.0, nonfinite="error")
    backward(scaler, params, grads_at(0))
    scaler.unscale_(optimizer)
    grad_of(params[1]).fill_(torch.nan)
    error = pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[1\]")
    with error, unchanged(params, optimizer):
        scaler.step(optimizer)


@pytest.mark.parametrize("make", INNERS)
def test_scaler_run_is_right_after_overflows_from_the_start(scaler, make):
    """torch's fused SGD takes its momentum for filled after a first step that did not happen."""
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), 1.0), make(twins)
    for _ in range(2):
        scaled_step(scaler, optimizer, params, spoiled(grads_at(0)))
    assert_bits(params, copies(twins))
    for step in range(4):
        scaled_step(scaler, optimizer, params, grads_at(step))
        hand_step(bare, twins, grads_at(step), ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)


def test_scaler_judges_two_optimizers_apart(scaler, make):
    """One overflows and stays; the other steps, and is not skipped; the scale backs off once."""
    first, second, twins = new_params(), new_params(), new_params()
    one, other = ClippedOptimizer(make(first), 1.0), ClippedOptimizer(make(second), 1.0)
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


def steps_called(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, params: list[Tensor], unscale: bool
) -> list[str]:
    """The step hooks that run in four steps, the third of which overflows."""
    log: list[str] = []
    number = 0
    optimizer.register_step_pre_hook(lambda *_: log.append(f"before {number}"))
    optimizer.register_step_post_hook(lambda *_: log.append(f"after {number}"))
    for number in range(4):
        grads = spoiled(grads_at(0)) if number == 2 else grads_at(number)
        scaled_step(scaler, optimizer, params, grads, unscale=unscale)
    return log


@pytest.mark.covering(2)
@UNSCALED_BEFORE
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", INNERS)
def test_scaler_overflow_calls_step_as_torch_does(scaler, make, policy, unscale):
    """Not at all, so that an average of weights does not count it, unless the device decides."""
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), 1.0, nonfinite=policy), make(twins)
    ours = steps_called(scaler, optimizer, params, unscale)
    torchs = steps_called(torch.amp.GradScaler("cpu", init_scale=SCALE), bare, twins, unscale)
    assert ours == torchs
    assert ("after 2" in ours) == bool(bare.param_groups[0].get("fused"))
    assert int(optimizer.stats.steps) == 3


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"skip_above": 100.0}], ids=str)
def test_scaler_calls_no_step_that_the_wrapper_skips(options):
    params, optimizer = wrapped(SGD, 1.0, **options)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    log: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: log.append("before"))
    optimizer.register_step_post_hook(lambda *_: log.append("after"))
    backward(scaler, params, grads_at(0))
    scaler.unscale_(optimizer)
    # The scaler has looked.
    grad_of(params[1]).fill_(torch.nan if "nonfinite" in options else 1e4)
    with unchanged(params, optimizer):
        scaler.step(optimizer)
    scaler.update()
    assert (log, int(optimizer.stats.skipped_steps)) == ([], 1)
    scaled_step(scaler, optimizer, params, grads_at(0))
    assert (log, int(optimizer.stats.steps)) == (["before", "after"], 1)


@pytest.mark.parametrize(
    "options", [*({"nonfinite": policy} for policy in POLICIES), {"skip_above": 1e9}], ids=str
)
def test_scaler_and_wrapper_read_one_flag_of_the_device(monkeypatch, options):
    """An error is raised after a second one. A read is a wait on a GPU."""
    params, optimizer = wrapped(SGD, 1.0, **options)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(0))
    seen = []

    def read(flag: Tensor) -> bool:
        seen.append(flag)
        return bool(flag.item())

    monkeypatch.setattr(Tensor, "__bool__", read)
    with decided_on_device():
        scaler.step(optimizer)
    monkeypatch.undo()
    assert len(seen) == (2 if "error" in options.get("nonfinite", "") else 1)


@UNSCALED_BEFORE
def test_scaler_refuses_calls_in_another_order(scaler, make, unscale):
    params, optimizer = wrapped(make)
    backward(scaler, params, grads_at(1))
    if unscale:
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    error = pytest.raises(RuntimeError, match=r"step\(\) has already been called since")
    with error, unchanged(params, optimizer):
        scaler.step(optimizer)


def test_scaler_without_gradients_asserts_as_torch(scaler, make):
    """In `step` or, for an optimizer that takes the scale itself, in `update`."""
    _, optimizer = wrapped(make)
    with pytest.raises(AssertionError, match=r"No inf checks were recorded"):
        scaled_step(scaler, optimizer, [torch.ones((), requires_grad=True)], [torch.ones(())])


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_refuses_a_closure(scaler_type, fused):
    """By name as torch; torch's scaler hands one by position on."""
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 1.0)
    if scaler_type is tritonclip.GradScaler:
        with pytest.raises(RuntimeError, match=r"closure computes gradients after .*: call back"):
            scaler.step(optimizer, lambda: torch.tensor(1.0))
    assert_bits([weight, grad_of(weight)], [torch.zeros(2), SCALED])


@pytest.mark.parametrize("unscaled", [False, True], ids=["direct", "unscale_"])
@pytest.mark.parametrize(
    ("scaler_type", "fused"),
    [(torch.amp.GradScaler, True), (tritonclip.GradScaler, True), (tritonclip.GradScaler, False)],
    ids=["torch-fused", "tritonclip-fused", "tritonclip-plain"],
)
def test_scaler_refuses_a_second_loss_scale(scaler_type, fused, unscaled):
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"a loss scale; expected one of the two"):
        scaler.step(optimizer, grad_scale=8.0)
    scaler.step(optimizer)
    assert_moved(weight)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler_type", [*SCALERS, None])
def test_loss_scale_that_was_set_by_hand_is_refused(scaler_type, fused):
    """With the argument to write; it does not stay."""
    weight, optimizer, scaler = weight_under(scaler_type or torch.amp.GradScaler, fused=fused)
    step = optimizer.step if scaler_type is None else partial(scaler.step, optimizer)
    optimizer.grad_scale = 8.0
    with pytest.raises(RuntimeError, match=r"expected .* optimizer\.step\(grad_scale=scale\)"):
        step()
    assert_bits([weight, grad_of(weight)], [torch.zeros(2), SCALED])
    with pytest.raises(AttributeError, match="no loss scale is set"):
        _ = optimizer.grad_scale
    optimizer.step(grad_scale=1024.0)
    assert_moved(weight)


@pytest.mark.parametrize("how", ["position", "name"])
def test_scaler_that_is_disabled_hands_a_closure_on(scaler_type, how):
    weight, optimizer, _ = weight_under(scaler_type)

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
    assert_moved(weight)


# With the same gradients as a wrapper.
KIN = {"wrapped": lambda wrapper: wrapper.optimizer, "copy": copy.copy}


@pytest.mark.parametrize("kin", KIN.values(), ids=KIN)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_scaler_divides_once_where_the_wrapped_optimizer_or_a_copy_was_unscaled(
    scaler_type, fused, kin
):
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    other = kin(optimizer)
    for _ in range(2):
        scaler.unscale_(other)
        assert_bits(weight.grad, torch.tensor([3.0, 4.0]))
        scaler.step(optimizer)
        assert_moved(weight)
        assert float(optimizer.stats.last_norm) == 5.0
        scaler.update()
        weight.data.zero_()
        weight.grad = scaler.get_scale() * torch.tensor([3.0, 4.0])
    weight.grad[0] = torch.inf
    scaler.unscale_(other)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert not weight.any()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_scaler_refuses_a_step_after_one_of_the_wrapped_optimizer(scaler_type, fused):
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    scaler.step(optimizer.optimizer)
    with pytest.raises(RuntimeError, match=r"step.* already been called"), unchanged([weight]):
        scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("kin", KIN.values(), ids=KIN)
@pytest.mark.parametrize("wrapper_first", [True, False])
def test_scaler_refuses_to_divide_the_gradients_of_a_wrapper_twice(
    scaler_type, fused, wrapper_first, kin
):
    """Ours in the second call of `unscale_`, torch's, which knows ids only, in the step."""
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    both = [kin(optimizer), optimizer]

    def step() -> None:
        for one in reversed(both) if wrapper_first else both:
            scaler.unscale_(one)
        scaler.step(optimizer)

    with pytest.raises(RuntimeError, match=r"unscale_.* already been called"), unchanged([weight]):
        step()


def test_scaler_refuses_a_step_of_the_wrapped_optimizer_after_one_of_the_wrapper(scaler_type):
    weight, optimizer, scaler = weight_under(scaler_type)
    scaler.unscale_(optimizer.optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step.* already been called"), unchanged([weight]):
        scaler.step(optimizer.optimizer)


def test_our_scaler_has_one_state_for_a_wrapper_and_the_wrapped_optimizer():
    weight, optimizer, scaler = weight_under(tritonclip.GradScaler)
    scaler.unscale_(optimizer)
    for other in (optimizer, optimizer.optimizer):
        with pytest.raises(RuntimeError, match=r"unscale_.* already been called"):
            scaler.unscale_(other)
    scaler.step(optimizer.optimizer)
    torch.testing.assert_close(weight.detach(), -torch.tensor([3.0, 4.0]))
    with pytest.raises(RuntimeError, match=r"step.* already been called"):
        scaler.step(optimizer)


@pytest.mark.parametrize("again", [True, False], ids=["with scaler", "without scaler"])
@pytest.mark.parametrize("mode", [{"foreach": False}, {"fused": True}], ids=["plain", "fused"])
def test_scaler_is_right_after_a_step_that_raised(scaler, mode, again):
    """What a scaler leaves at the optimizer for one step must not scale or skip the next one."""
    params, twins = new_params(), new_params()
    optimizer = ClippedOptimizer(SGD(params, lr=0.1, **mode), 1.0)
    backward(scaler, params, grads_at(1))
    interrupt(partial(scaler.step, optimizer), optimizer)
    scaler.update()
    following = scaler if again else torch.amp.GradScaler("cpu", enabled=False)
    scaled_step(following, optimizer, params, grads_at(2))
    hand_step(SGD(twins, lr=0.1), twins, grads_at(2), ClipByGlobalNorm(1.0))
    assert_same_run(params, twins)


def interrupt(step, optimizer):
    """Takes a step that ends in the pre-hooks of an optimizer, the wrapper or the wrapped one."""

    def fail(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step()


NEW_GRADIENTS: dict[str, Any] = {
    "zero_grad of the wrapper": lambda optimizer, _: optimizer.zero_grad(),
    "zero_grad in place": lambda optimizer, _: optimizer.zero_grad(set_to_none=False),
    "zero_grad of the model": lambda _, weight: torch.nn.ParameterList([weight]).zero_grad(),
    "a new tensor": lambda _, weight: setattr(weight, "grad", torch.zeros(2)),
}


@pytest.mark.parametrize("renew", NEW_GRADIENTS.values(), ids=NEW_GRADIENTS)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_gradients_that_a_failed_step_divided_are_refused_until_there_are_new_ones(
    scaler_type, fused, renew
):
    """Torch's scaler divides those of an optimizer that is not fused, and remembers it."""
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    interrupt(partial(scaler.step, optimizer), optimizer.optimizer)
    if scaler_type is tritonclip.GradScaler or fused:
        for step in (partial(scaler.step, optimizer), optimizer.step):
            error = pytest.raises(RuntimeError, match=r"divided .* by the loss scale; .* zero_grad")
            with error, unchanged([weight], grads=True):
                step()
        renew(optimizer, weight)
        scaler.scale((weight * torch.tensor([30.0, 40.0])).sum()).backward()
    scaler.step(optimizer)
    assert_moved(weight)


def test_gradients_that_a_failed_step_divided_are_refused_beside_new_ones():
    weight, optimizer, scaler = weight_under(tritonclip.GradScaler)
    other = torch.nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    optimizer.add_param_group({"params": [other]})
    interrupt(partial(scaler.step, optimizer), optimizer.optimizer)
    weight.grad = SCALED.clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"divided .* by the loss scale; .* zero_grad"):
            scaler.step(optimizer)
    other.grad = None
    scaler.step(optimizer)
    assert_moved(weight)


def test_step_under_a_loss_scale_after_one_that_raised():
    """Nothing is refused where the failed step had not divided yet, nor after it updated."""
    weight, optimizer, _ = weight_under(torch.amp.GradScaler)
    step = partial(optimizer.step, grad_scale=1024.0)
    interrupt(step, optimizer)
    step()
    assert_moved(weight)
    interrupt(step, optimizer.optimizer)
    with pytest.raises(RuntimeError, match="call zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
