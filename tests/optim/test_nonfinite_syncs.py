"""Steps that wait for no device to say whether they are finite, and those that do wait."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from helpers.cases import no_sync
from helpers.training import RULES, RULES_OF_EVERY_TYPE, give_grads, new_params
from tritonclip import ClippedOptimizer


class Told(Optimizer):
    """Takes `found_inf` as torch's fused optimizers do, and keeps what it was told."""

    _step_supports_amp_scaling = True
    found_inf: Tensor

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"fused": True})
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
    ("make", "policy"),
    [
        pytest.param(lambda params: SGD(params), "skip", id="skip plain"),
        pytest.param(Told, "error", id="error"),
    ],
)
def test_policies_that_are_documented_to_wait_do(make, policy):
    """And so would be seen above."""
    optimizer = ClippedOptimizer(make(on_meta()), 1.0, nonfinite=policy)
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["propagate", "zero", "skip"])
def test_fused_step_on_a_gpu_does_not_sync(cuda_backend, rule, policy):
    params = new_params(device="cuda")
    optimizer = ClippedOptimizer(AdamW(params, fused=True), rule, nonfinite=policy)
    give_grads(params, 1)
    optimizer.step()
    give_grads(params, 2, bad=math.nan)
    with no_sync():
        optimizer.step()
