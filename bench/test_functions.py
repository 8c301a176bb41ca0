"""Single functions under pytest-benchmark: run `python -m pytest bench`.

They show one function and its spread, beside its twin of torch. Ratios come from the interleaved
samples of `python -m bench speed`: times taken minutes apart cannot be divided. Every function
is checked against float64 before it is timed, and gradients are refilled before every round,
outside the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import utils

import tritonclip
from bench.accuracy import OURS, Gradients
from bench.providers import LENIENT
from bench.workloads import WORKLOADS, Workload
from tritonclip import ClipByGlobalNorm, ClipByValue

SMALL = Workload("small", "100 of 1,000", ((1000,),) * 100)
MEDIUM = WORKLOADS["resnet50"]
ROUNDS = {"small": 200, "resnet50": 20}
NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false"
)


@dataclass(frozen=True)
class Function:
    """A function, the rule that checks its result, and its call."""

    job: str
    rule: str
    tolerance: float
    call: Callable[[Gradients, float], Any]
    writes: bool = True


FUNCTIONS = {
    "clip_": Function(
        "clip by global norm",
        "norm",
        OURS,
        lambda g, limit: tritonclip.clip_(g.parameters, ClipByGlobalNorm(limit)),
    ),
    "clip_grad_norm_": Function(
        "clip by global norm",
        "norm",
        OURS,
        lambda g, limit: tritonclip.clip_grad_norm_(g.parameters, limit),
    ),
    "torch_clip_grad_norm_": Function(
        "clip by global norm",
        "norm",
        LENIENT,
        lambda g, limit: utils.clip_grad_norm_(g.parameters, limit),
    ),
    "clip_by_value": Function(
        "clip by value",
        "value",
        OURS,
        lambda g, limit: tritonclip.clip_(g.parameters, ClipByValue(limit)),
    ),
    "clip_grad_value_": Function(
        "clip by value",
        "value",
        OURS,
        lambda g, limit: tritonclip.clip_grad_value_(g.parameters, limit),
    ),
    "torch_clip_grad_value_": Function(
        "clip by value",
        "value",
        LENIENT,
        lambda g, limit: utils.clip_grad_value_(g.parameters, limit),
    ),
    "get_total_norm": Function(
        "norm only", "norm", OURS, lambda g, limit: tritonclip.get_total_norm(g.grads), writes=False
    ),
    "torch_get_total_norm": Function(
        "norm only", "norm", LENIENT, lambda g, limit: utils.get_total_norm(g.grads), writes=False
    ),
}


@cache
def gradients_of(workload: Workload, device: str) -> Gradients:
    """Gradients that all functions share, filled by each."""
    return Gradients(workload, "float32", torch.device(device))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
@pytest.mark.parametrize("workload", [SMALL, MEDIUM], ids=lambda one: one.name)
def test_function(benchmark, workload, device, clipped, function):
    if clipped and not function.writes:
        pytest.skip("a norm is measured in the same way whether anything is clipped or not")
    gradients = gradients_of(workload, device)
    limit = gradients.limit(function.rule, clipped)
    gradients.refill()
    output = function.call(gradients, limit)
    if output is not None:
        assert gradients.norm_error(function.rule, [float(output)]) <= function.tolerance
    gradients.check(
        gradients.grads, function.rule, limit if function.writes else None, function.tolerance
    )

    def call() -> None:
        function.call(gradients, limit)
        if device == "cuda":
            torch.cuda.synchronize()

    step = "clipped" if clipped else "unclipped"
    benchmark.group = f"{function.job}, {workload.title}, {step}, {device}"
    benchmark.pedantic(call, setup=gradients.refill, rounds=ROUNDS[workload.name], warmup_rounds=2)
