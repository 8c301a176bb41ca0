"""Figures that only a GPU shows, the most useful ones first; `make gpu` measures them.

Host time is from a call to its return: warm time is the mean over a burst of calls, cold time that
of one call after the caches of the processor were swept. Wall time lasts until the GPU is done.
Times on the GPU alone are between two events. Rows with `bytes` have a rate; compare it with the
bandwidth of `test_copy`.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from bench import timing
from bench.accuracy import EPS, Gradients
from bench.comparison import Effort, hand_over
from bench.providers import NAMED, sgd_of
from bench.samples import Samples, Timed, paired, sample, spread
from bench.test_host import BY_TORCH, FEATURES, step_of
from bench.test_training import CLIPS, steps_of, take_turns
from bench.workloads import WORKLOADS, Workload
from tritonclip.backends.interface import Clip, Of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false"
    ),
]
CUDA = torch.device("cuda")
# How often each kernel reads or writes all gradients.
VERBS = {"norm": 1, "scale": 2, "scale, each": 2, "clamp": 1}
# More than the host takes to queue a call.
HOST_US = 200.0
# Calls in a burst, and samples of each.
BURST, ROUNDS = 30, 21
# Bytes that are read before a cold call, more than the caches of a processor hold.
SWEPT = 2**27
# The bytes of one gradient, for which others have published times.
LARGEST = 3_070_000_000
# The number of examples in a training step.
BATCHES = {"PPO, 2 x 64": 64, "ResNet-20": 128, "ResNet-50": 32, "GPT-2 124M": 4}
# Parts of the first call of a process, each timed.
FIRST_CALL = {
    "import torch": "import torch",
    "import tritonclip": "import tritonclip",
    "start CUDA": """p = torch.ones(9, device="cuda", requires_grad=True)
p.grad = torch.ones_like(p)
torch.cuda.synchronize()""",
    "first call": "tritonclip.clip_([p], 1.0).item()",
    "second call": "tritonclip.clip_([p], 1.0).item()",
    "first call of another rule": """tritonclip.clip_([p], tritonclip.ClipByValue(1.0))
torch.cuda.synchronize()""",
}
TIME_PARTS = """import json, sys, time
seconds = {}
for name, code in json.loads(sys.argv[1]).items():
    start = time.perf_counter()
    exec(code)
    seconds[name] = time.perf_counter() - start
print(json.dumps(seconds))"""


@pytest.fixture
def row(benchmark: Any) -> Callable[..., None]:
    def add(walls: list[float], **figures: Any) -> None:
        benchmark.extra_info |= figures
        hand_over(benchmark, Samples(walls, [], 1))

    return add


@lru_cache(1)
def gradients_of(workload: Workload, dtype: str = "float32") -> Gradients:
    """Gradients on the GPU; successive tests share the last ones."""
    return Gradients(workload, dtype, CUDA)


def host_us(call: Callable[[], Any]) -> dict[str, float]:
    swept = torch.zeros(SWEPT // 4, device="cpu")
    for _ in range(5):
        call()
    warm = [sample(Timed(call), CUDA, BURST)[0] for _ in range(ROUNDS)]
    cold = [sample(Timed(call, swept.sum), CUDA) for _ in range(ROUNDS)]
    hosts, walls = zip(*cold, strict=True)
    named = {"warm_us": warm, "cold_us": hosts, "wall_us": walls}
    return {name: statistics.median(times) for name, times in named.items()}


def device_us(call: Callable[[], Any], prepare: Any = None) -> list[float]:
    return timing.device_us(Timed(call, prepare), CUDA, HOST_US)


def bound(grads: list[Tensor]) -> Any:
    backend = importlib.import_module("tritonclip.backends.triton")
    return backend.TritonLayout(grads).bind(grads, None)


def verb(kernel: str, gradients: Gradients) -> Callable[[], Any]:
    """A call that launches one kernel; scaling clips all gradients, and clamping clips none."""
    batch = bound(gradients.grads)
    of: Of = "each" if kernel == "scale, each" else "all"
    if kernel == "clamp":
        limit = gradients.limit("value", clipped=False)
        return partial(batch.clamp_, -limit, limit, 1.0)
    if kernel == "norm":
        return partial(batch.norm, 2.0, "all")
    limit = min(gradients.norms) / 2 if of == "each" else gradients.limit("norm", clipped=True)
    return partial(batch.scale_, batch.norm(2.0, of), Clip(2.0, EPS, limit, 1.0, of=of))


@pytest.mark.parametrize("provider", ["tritonclip", "torch"])
@pytest.mark.parametrize("rule", ["value", "norm"])
@pytest.mark.parametrize("workload", ["small_1", "small_10", "resnet50"])
def test_host_of_a_call(row: Any, workload: str, rule: str, provider: str) -> None:
    gradients = gradients_of(WORKLOADS[workload])
    limit = gradients.limit(rule, clipped=False)
    figures = host_us(NAMED[provider].make(gradients, rule, limit).call)
    row([figures["warm_us"]], **figures)


# Limits that clip nothing, except by unit, whose ratio is the usual one.
RULES = {
    "global norm": 1e9,
    "by norm": tritonclip.ClipByNorm(1e9),
    "unit norm": tritonclip.ClipByUnitNorm(),
}


@pytest.mark.parametrize("rule", [*RULES, "torch"])
@pytest.mark.parametrize("workload", ["resnet50", "gpt2_124m"])
def test_rule(row: Any, workload: str, rule: str) -> None:
    """A call by a rule; "torch" is torch's function by global norm."""
    gradients = gradients_of(WORKLOADS[workload])
    call = NAMED["torch"].make(gradients, "norm", 1e9).call
    if rule != "torch":
        call = partial(tritonclip.clip_, gradients.parameters, RULES[rule])
    for _ in range(3):
        call()
    figures = host_us(call)
    gradients.refill()
    row(device_us(call), launches=timing.launches(call, CUDA), **figures)
    gradients.refill()


@pytest.mark.parametrize("model", BATCHES)
def test_addresses_in_training(row: Any, model: str) -> None:
    """Counts the gradients that move from step to step."""
    (step,) = steps_of(model, BATCHES[model], {"tritonclip": tritonclip.clip_}, CUDA).values()
    moved, before = list[int](), list[int]()
    for _ in range(30):
        step()
        addresses = [p.grad.data_ptr() for p in step.model.parameters() if p.grad is not None]
        if before:
            moved.append(sum(map(operator.ne, addresses, before)))
        before = addresses
    row([1.0], steps=len(moved), moved=moved, steps_moved=sum(map(bool, moved)))


@pytest.mark.parametrize("model", ["PPO, 2 x 64", "ResNet-50", "GPT-2 124M"])
def test_share_of_a_training_step(row: Any, model: str) -> None:
    """Wall times of whole steps without a clip, with torch's and with ours, taken in turn."""
    made = steps_of(model, BATCHES[model], {"none": lambda *_: None, **CLIPS}, CUDA)
    found = take_turns(made, Effort(ROUNDS, 0.0), CUDA)
    bare, figures = found["none"].walls, dict[str, Any]()
    for name in CLIPS:
        walls = found[name].walls
        figures |= spread(f"{name} over none", paired(walls, bare))
        figures[f"{name}_us"] = statistics.median(walls)
    row(bare, **figures)


STEPS = {name: make for name, (make, _) in FEATURES.items()}
STEPS["by value"] = partial(step_of, clip=tritonclip.ClipByValue(1e9))
STEPS["the optimizer alone"] = lambda own: sgd_of(own).step


@pytest.mark.parametrize("feature", [BY_TORCH, *STEPS])
def test_step(row: Any, feature: str) -> None:
    """Launches and host time of a step of ClippedOptimizer, beside torch's and without a clip."""
    gradients = gradients_of(WORKLOADS["small_10"])
    if feature == BY_TORCH:
        step = NAMED["torch"].make(gradients, "step", 1e9).call
    else:
        step = STEPS[feature](gradients.parameters)
    figures = host_us(step)
    n = timing.launches(lambda: [step() for _ in range(64)], CUDA) / 64
    row([figures["warm_us"]], launches=n, **figures)


@pytest.mark.parametrize("process", ["cold", "with binaries on disk"])
def test_first_call(row: Any, process: str, tmp_path: Path) -> None:
    """Host time of the first call of a process and of what comes before it, in parts."""
    command = [sys.executable, "-c", TIME_PARTS, json.dumps(FIRST_CALL)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    for _ in range(1 if process == "cold" else 2):
        output = subprocess.check_output(command, env=environment, timeout=60)
    seconds = json.loads(output)
    row([seconds["first call"] * 1e6], parts_s=seconds)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", VERBS)
def test_kernel(row: Any, call: str, dtype: str) -> None:
    gradients = gradients_of(WORKLOADS["gpt2_124m"], dtype)
    times = device_us(verb(call, gradients), gradients.refill)
    n_bytes = VERBS[call] * gradients.n_bytes
    row(times, bytes=n_bytes, gb_per_s=n_bytes / (statistics.median(times) * 1e3))


def test_copy(row: Any) -> None:
    """The rate at which torch copies 1 GiB, for comparison with the rates of kernels."""
    source, target = torch.empty(2, 2**30, dtype=torch.uint8, device=CUDA)
    times = device_us(partial(target.copy_, source))
    row(times, bytes=2**31, gb_per_s=2**31 / (statistics.median(times) * 1e3))


@pytest.mark.parametrize("step", ["unclipped", "clipped"])
def test_largest(row: Any, step: str) -> None:
    """One bfloat16 gradient of 3.07 GB."""
    grad = torch.empty(LARGEST // 2, dtype=torch.bfloat16, device=CUDA)
    limit, passes = (1.0, 3) if step == "clipped" else (math.inf, 1)
    times = device_us(partial(bound([grad]).clip_, 2.0, EPS, limit, 1.0), partial(grad.fill_, 1e-3))
    row(times, bytes=passes * LARGEST, gb_per_s=passes * LARGEST / (min(times) * 1e3))
