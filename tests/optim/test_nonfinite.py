"""What a wrapper does at a step that is not finite: propagate, error, zero, skip.

Also where a closure has a loss that is not finite, and which steps wait for a device to know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from helpers.cases import INTERPRETED, assert_bits, copies, grad_of, no_sync, normal
from helpers.training import (
    INNERS,
    RULES,
    RULES_OF_EVERY_TYPE,
    give_grads,
    grads_of,
    new_params,
    state_of,
    step_on,
    unchanged,
    wrapped,
)
from tritonclip import (
    ClipByUnitNorm,
    ClippedOptimizer,
)

VALUES = [math.nan, math.inf, -math.inf]


EVERY_RULE = [
    *RULES_OF_EVERY_TYPE,
    pytest.param(ClipByUnitNorm(0.1), id="unit"),
]


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("rule", EVERY_RULE)
def test_skip_leaves_everything_as_it_was(backend, make, rule, value):
    params, optimizer = wrapped(make, rule, backend.device, nonfinite="skip")
    step_on(params, optimizer, 1)
    with unchanged(params, optimizer):
        step_on(params, optimizer, 2, bad=value)
    counts = optimizer.stats.summary()
    assert (counts["steps"], counts["skipped_steps"]) == (1, 1)


def regression(make: Callable[..., Optimizer], policy: str, bad: set[int], steps: int) -> Any:
    """Trains a small model; returns parameters and optimizer. Batches at `bad` hold a NaN.

    Good batches come in the same order whatever is bad. The scheduler follows the steps taken.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    inner = make(model.parameters())
    optimizer = ClippedOptimizer(inner, 0.3, nonfinite=policy)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    good = 0
    for step in range(steps):
        x = normal((8, 4), seed=good)
        if step in bad:
            x = torch.full_like(x, math.nan)
        good += step not in bad
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        taken = int(optimizer.stats.steps)
        optimizer.step()
        if int(optimizer.stats.steps) > taken:
            scheduler.step()
    return list(model.parameters()), optimizer


@pytest.mark.parametrize("make", INNERS)
def test_skip_of_one_step_in_ten_trains_to_the_same_result(make):
    """From the first step on, which an optimizer meets without a state."""
    params, optimizer = regression(make, "skip", set(range(0, 40, 10)), 40)
    truth, other = regression(make, "propagate", set(), 36)
    assert_bits(params, copies(truth))
    assert_bits(state_of(optimizer, params), state_of(other, truth))
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] < 0.1
    assert optimizer.stats.summary() == {**other.stats.summary(), "skipped_steps": 4}


def test_zero_makes_the_step_one_with_zero_gradients(backend, make, rule):
    params, twins = new_params(device=backend.device), new_params(device=backend.device)
    optimizer, bare = ClippedOptimizer(make(params), rule, nonfinite="zero"), make(twins)
    step_on(params, optimizer, 1, bad=math.inf)
    for twin in twins:
        twin.grad = torch.zeros_like(twin)
    bare.step()
    assert not any(grad.any() for grad in grads_of(params))
    assert_bits(params, copies(twins))
    assert int(optimizer.stats.steps) == 1


@pytest.mark.parametrize("rule", [*RULES[:2], pytest.param(ClipByUnitNorm(1.0), id="by-unit")])
def test_zero_is_a_coefficient_of_zero(backend, rule):
    params = [torch.nn.Parameter(torch.zeros(2, device=backend.device)) for _ in range(2)]
    optimizer = ClippedOptimizer(torch.optim.SGD(params, lr=0.1), rule, nonfinite="zero")
    for size in (1.0, math.inf):
        for param in params:
            param.grad = torch.full_like(param, size)
        optimizer.step()
    assert optimizer.stats.last_coefficient.item() == 0.0


def test_zero_concerns_only_gradients_that_share_a_norm():
    params = new_params()
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": [params[2]], "clip": 1e9}]
    optimizer = ClippedOptimizer(SGD(groups, lr=0.1), 1.0, nonfinite="zero")
    *_, kept = step_on(params, optimizer, 1, bad=math.nan)
    first, second, third = grads_of(params)
    assert not first.any()
    assert not second.any()
    assert torch.equal(third, kept)


def test_propagate_lets_nan_through(make, rule):
    """By norm it reaches all that share the norm; by value it stays where it is."""
    params, optimizer = wrapped(make, rule)
    step_on(params, optimizer, 1, bad=math.nan)
    hit = [bool(param.isnan().all()) for param in params]
    assert params[1].view(-1)[-1].isnan()
    everywhere = {"ClipByGlobalNorm": [True] * 3, "ClipByNorm": [False, True, False]}
    assert hit == everywhere.get(type(rule).__name__, [False] * 3)
    assert int(optimizer.stats.steps) == 1


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("rule", EVERY_RULE)
@pytest.mark.covering(2)
def test_error_names_the_parameter_and_changes_nothing(make, rule, value):
    params = new_params()
    named = zip(("alpha", "beta", "gamma"), params, strict=True)
    optimizer = ClippedOptimizer(make(named), rule, nonfinite="error")
    step_on(params, optimizer, 1)
    stats = optimizer.stats.state_dict()
    give_grads(params, 2, bad=value)
    error = pytest.raises(RuntimeError, match=r"\bbeta\b")
    with error as caught, unchanged(params, optimizer, grads=True):
        optimizer.step()
    assert not re.search("alpha|gamma", str(caught.value))
    assert "Neither gradients nor parameters were changed" in str(caught.value)
    assert_bits(optimizer.stats.state_dict().values(), stats.values())


@pytest.mark.parametrize(
    ("own", "scale", "message"),
    [
        # Four elements of 3e38 have a norm of 6e38, and 3e38 / 0.5 is no float32.
        ({}, None, "their norm does not"),
        ({"clip": None}, torch.tensor(0.5), "divided by the loss scale the largest does not fit"),
    ],
    ids=["norm", "quotient"],
)
def test_error_says_that_a_number_does_not_fit(own, scale, message):
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = ClippedOptimizer(SGD([{"params": [param], **own}]), 1.0, nonfinite="error")
    param.grad = torch.full((4,), 3e38)
    with pytest.raises(RuntimeError, match=f"Every gradient is finite, but {message}"):
        optimizer.step(grad_scale=scale)
    assert torch.equal(param.grad, torch.full((4,), 3e38))
    assert not param.any()


def test_error_lets_finite_steps_be():
    params, twins = new_params(), new_params()
    strict = ClippedOptimizer(AdamW(params), 1.0, nonfinite="error")
    plain = ClippedOptimizer(AdamW(twins), 1.0)
    for seed in range(3):
        for own, its in ((params, strict), (twins, plain)):
            step_on(own, its, seed)
    assert_bits(params, copies(twins))


def _left_out(params: list[Tensor], how: str) -> list[dict[str, Any]]:
    """Groups in which no rule holds for the last parameter."""
    if how == "clip=None":
        return [{"params": params[:2]}, {"params": [params[2]], "clip": None}]
    setattr(params[2], "need_clip", False)  # noqa: B010
    return [{"params": params}]


LEFT_OUT = pytest.mark.parametrize("how", ["clip=None", "need_clip=False"])


@LEFT_OUT
def test_skip_looks_at_what_is_not_clipped(make, how):
    params = new_params()
    optimizer = ClippedOptimizer(make(_left_out(params, how)), 1.0, nonfinite="skip")
    with unchanged(params):
        step_on(params, optimizer, 1, bad=math.nan, at=2)
    assert int(optimizer.stats.skipped_steps) == 1


@LEFT_OUT
def test_error_looks_at_what_is_not_clipped(how):
    params = new_params()
    optimizer = ClippedOptimizer(SGD(_left_out(params, how)), 1.0, nonfinite="error")
    give_grads(params, 1, bad=math.nan, at=2)
    expected = (1, 0) if how == "clip=None" else (0, 2)
    place = r"param_groups\[{}\]\['params'\]\[{}\]".format(*expected)
    with pytest.raises(RuntimeError, match=place), unchanged(params, optimizer, grads=True):
        optimizer.step()


@LEFT_OUT
@pytest.mark.parametrize(
    ("policy", "scale"), [("propagate", None), ("zero", None), ("zero", 4.0)], ids=str
)
def test_other_policies_only_unscale_what_is_not_clipped(how, policy, scale):
    params = new_params()
    optimizer = ClippedOptimizer(SGD(_left_out(params, how)), 1.0, nonfinite=policy)
    grads = give_grads(params, 1, bad=math.nan, at=2)
    optimizer.step(grad_scale=scale)
    assert_bits([grad_of(params[2])], [grads[2] / (scale or 1.0)])
    assert torch.isfinite(params[0]).all()


def closure_for(params: list[Tensor], bad: set[int]) -> tuple[Callable[[], Tensor], list[float]]:
    """A closure of a sum of fourth powers, and the losses it gave; NaN at the calls in `bad`."""
    losses: list[float] = []

    def closure() -> Tensor:
        for param in params:
            param.grad = None
        loss = torch.stack([((param - 1) ** 4).sum() for param in params]).sum()
        if len(losses) in bad:
            loss = loss * math.nan
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    return closure, losses


@pytest.mark.parametrize("make", INNERS)
def test_skip_of_an_evaluation_leaves_everything_as_it_was(make):
    params, optimizer = wrapped(make, 1.0, nonfinite="skip")
    closure, losses = closure_for(params, set())
    optimizer.step(closure)
    assert losses
    closure, losses = closure_for(params, {0})
    with unchanged(params, optimizer):
        assert optimizer.step(closure).isnan()
    assert len(losses) == 1
    assert int(optimizer.stats.steps) == 1
    assert int(optimizer.stats.skipped_steps) == 1


def test_error_at_an_evaluation_changes_nothing():
    params, optimizer = wrapped(AdamW, 1.0, nonfinite="error")
    closure, _ = closure_for(params, {0})
    error = pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[0\]")
    with error, unchanged(params, optimizer):
        optimizer.step(closure)
    assert int(optimizer.stats.steps) == 0


class Twice(SGD):
    """Evaluates its closure twice in a step, moving the parameters in between."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        closure()
        super().step()
        return loss


def test_zero_holds_for_every_evaluation_of_a_closure():
    params, optimizer = wrapped(lambda p: Twice(p, lr=0.1), nonfinite="zero")
    optimizer.step(closure_for(params, {1})[0])
    assert all(bool(torch.isfinite(param).all()) for param in params)
    assert not any(grad.any() for grad in grads_of(params))


class Told(Optimizer):
    """Takes `found_inf` as torch's fused optimizers do, and keeps what it was told."""

    _step_supports_amp_scaling = True
    found_inf: Tensor

    def __init__(self, params: Any, fused: bool = True) -> None:
        super().__init__(params, {"fused": fused})
        self.told: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        self.told.append(self.found_inf)


def on_meta() -> list[Tensor]:
    """Parameters whose values nobody can read: whoever asks for one gets a RuntimeError."""
    sizes = (3, 5, 9000)
    params: list[Tensor] = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in sizes]
    for param in params:
        param.grad = torch.empty_like(param)
    return params


@pytest.mark.parametrize("args", [(), (lambda: 1.0,)], ids=["no closure", "closure"])
@pytest.mark.parametrize("rule", RULES_OF_EVERY_TYPE)
def test_skip_reads_nothing_back_where_the_inner_optimizer_takes_found_inf(rule, args):
    """The wrapper's share of the step; what torch's fused kernels do is torch's promise."""
    optimizer = ClippedOptimizer(inner := Told(on_meta()), rule, nonfinite="skip")
    for _ in range(2):
        optimizer.step(*args)
    (flag, _) = inner.told
    assert (flag.device.type, flag.dtype, flag.shape) == ("meta", torch.float32, ())


@pytest.mark.parametrize("rule", RULES_OF_EVERY_TYPE)
@pytest.mark.parametrize("policy", ["propagate", "zero", "skip"])
def test_overflow_of_a_scaler_is_not_read_back_either(rule, policy):
    """With the two attributes that a GradScaler sets for the length of a step."""
    optimizer = ClippedOptimizer(inner := Told(on_meta()), rule, nonfinite=policy)
    for name in ("grad_scale", "found_inf"):
        setattr(optimizer, name, torch.empty((), device="meta"))
    optimizer.step()
    assert inner.told[0].device.type == "meta"


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("rule", RULES_OF_EVERY_TYPE)
def test_other_policies_read_nothing_back_with_any_inner_optimizer(rule, policy):
    optimizer = ClippedOptimizer(SGD(on_meta(), momentum=0.9), rule, nonfinite=policy)
    for _ in range(2):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "policy"), [(SGD, "skip"), (partial(Told, fused=False), "skip"), (Told, "error")]
)
def test_policies_that_are_documented_to_wait_do(make, policy):
    """And so would be seen above."""
    optimizer = ClippedOptimizer(make(on_meta()), 1.0, nonfinite=policy)
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()


@pytest.mark.parametrize("policy", ["propagate", "zero", "skip"])
def test_fused_step_on_a_gpu_does_not_sync(cuda_backend, rule, policy):
    params = new_params(device="cuda")
    optimizer = ClippedOptimizer(AdamW(params, fused=True), rule, nonfinite=policy)
    step_on(params, optimizer, 1)
    give_grads(params, 2, bad=math.nan)
    with no_sync():
        optimizer.step()
