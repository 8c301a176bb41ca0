"""What a wrapper does at a step that is not finite: propagate, error, zero, skip.

Also where a closure has a loss that is not finite, and which steps wait for a device to know.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from helpers.cases import assert_bits, no_sync
from helpers.training import (
    RULES_OF_EVERY_TYPE,
    give_grads,
    grads_of,
    new_params,
    step_on,
    unchanged,
    wrapped,
)
from tritonclip import ClipByNorm, ClipByValue, ClippedOptimizer


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES_OF_EVERY_TYPE)
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


def test_error_looks_at_what_needs_no_clip():
    params: list[Any] = new_params()
    params[2].need_clip = False
    optimizer = ClippedOptimizer(SGD(params), 1.0, nonfinite="error")
    give_grads(params, 1, bad=math.nan, at=2)
    error = pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[2\]")
    with error, unchanged(params, optimizer, grads=True):
        optimizer.step()


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


@pytest.mark.parametrize("rule", [1.0, ClipByValue(0.5)], ids=["norm", "value"])
@pytest.mark.parametrize("nonfinite", ["zero", "skip", "error"])
def test_policies_act_on_a_loss_scale_that_is_nan(rule, nonfinite):
    """A scaler hands it over in a tensor, which no step reads."""
    params = new_params()
    give_grads(params, 1)
    before = [param.detach().clone() for param in params]
    optimizer = ClippedOptimizer(AdamW(params, fused=True), rule, nonfinite=nonfinite)
    assert optimizer._step_supports_amp_scaling
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(math.nan), torch.tensor(0.0)
    if nonfinite == "error":
        with pytest.raises(RuntimeError, match=r"non-finite|finite, but"):
            optimizer.step()
    else:
        optimizer.step()
    if nonfinite == "zero":
        assert not any(grad.any() for grad in grads_of(params))
    else:
        assert_bits(params, before)


@pytest.mark.parametrize("rule", [1.0, ClipByNorm(1.0)], ids=["global", "each"])
@pytest.mark.parametrize("size", [4, 2**17])
def test_gradients_that_became_zero_have_a_coefficient_of_zero(device, rule, size):
    param = torch.nn.Parameter(torch.zeros(size, device=device))
    optimizer = ClippedOptimizer(SGD([param]), rule, nonfinite="zero")
    param.grad = torch.full_like(param, 0.1)
    param.grad[1] = math.nan
    optimizer.step()
    assert not param.grad.any()
    assert float(optimizer.stats.last_coefficient) == 0.0
