"""What only a GPU shows, beside the plan "gpu" of `test_clip`: `make gpu` runs both.

Times are those of the GPU alone, but for the host's where a test says so. In rows of `bytes`, a
copy of as many stands beside the bandwidth.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tritonclip
from bench import timing
from bench.accuracy import EPS, Gradients
from bench.comparison import hand_over
from bench.workloads import WORKLOADS
from tritonclip.backends.interface import Clip
from tritonclip.samples import Samples, Timed, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false"
    ),
]
CUDA = torch.device("cuda")
# Kernels, and how often each reads or writes all gradients.
VERBS = {"norm": 1, "scale": 2, "scale, each": 2, "clamp": 1}
# More than the host takes to queue a call.
HOST_US = 200.0
# One gradient, of which times of others were published.
LARGEST = 3_070_000_000
COLD = """import time, torch, tritonclip
p = torch.ones(9, device="cuda", requires_grad=True)
p.grad = torch.ones_like(p)
torch.cuda.synchronize()
start = time.perf_counter()
tritonclip.clip_([p], 1.0).item()
print(time.perf_counter() - start)"""


def gradients_of(workload: str, dtype: str = "float32") -> Gradients:
    """Gradients on the GPU."""
    return Gradients(WORKLOADS[workload], dtype, CUDA)


def bound(grads: list[torch.Tensor]) -> Any:
    """The Triton backend's layout of gradients."""
    backend = importlib.import_module("tritonclip.backends.triton")
    return backend.TritonLayout(grads).bind(grads, None)


def verb(kernel: str, gradients: Gradients) -> Callable[[], Any]:
    """A call that launches one kernel on gradients, which all are clipped."""
    batch, per_gradient = bound(gradients.grads), kernel == "scale, each"
    if kernel == "clamp":
        limit = gradients.limit("value", clipped=False)
        return partial(batch.clamp_, -limit, limit, 1.0)
    if kernel == "norm":
        return partial(batch.norm, 2.0, per_gradient=False)
    norms = batch.norm(2.0, per_gradient=per_gradient)
    limit = min(gradients.norms) / 2 if per_gradient else gradients.limit("norm", clipped=True)
    scale = batch.scale_each_ if per_gradient else batch.scale_
    return partial(scale, norms, Clip(2.0, EPS, limit, 1.0))


def on_gpu(benchmark: Any, call: Callable[[], Any], prepare: Any = None, n_bytes: int = 0) -> float:
    """Hands over a call's times on the GPU; with GB/s beside a copy where it moves `n_bytes`."""
    times = timing.device_us(Timed(call, prepare), CUDA, HOST_US)
    median = sorted(times)[len(times) // 2]
    if n_bytes:
        found = {"bytes": n_bytes, "gb_per_s": n_bytes / (median * 1e3)}
        benchmark.extra_info |= found | {"copy_gb_per_s": timing.copy_gb_per_s(CUDA)}
    hand_over(benchmark, Samples(times, [], 1))
    return median


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workload", ["gpt2_124m", "tiny_10000"])
@pytest.mark.parametrize("call", VERBS)
def test_kernel(benchmark: Any, call: str, workload: str, dtype: str) -> None:
    """One launch of a kernel."""
    gradients = gradients_of(workload, dtype)
    n_bytes = VERBS[call] * gradients.n_bytes
    on_gpu(benchmark, verb(call, gradients), gradients.refill, n_bytes)


def test_scale_with_nothing_to_write(benchmark: Any) -> None:
    """Every program sums all partial norms."""
    batch = bound(gradients_of("gpt2_124m").grads)
    norms = batch.norm(2.0, per_gradient=False)
    on_gpu(benchmark, partial(batch.scale_, norms, Clip(2.0, EPS, math.inf, 1.0)))


@pytest.mark.parametrize("call", ["norm", "scale", "norm and scale"])
def test_gradients_in_l2(benchmark: Any, call: str) -> None:
    """ResNet-50: together, scale finds in L2 gradients that norm has read."""
    gradients = gradients_of("resnet50")
    calls = [verb(name, gradients) for name in call.split(" and ")]
    on_gpu(benchmark, lambda: [one() for one in calls], gradients.refill)


def test_clamp_from_cache(benchmark: Any) -> None:
    """GPT-2; all from cache, the second read leaves two passes."""
    gradients = gradients_of("gpt2_124m")
    rule = tritonclip.ClipByValue(gradients.limit("value", clipped=True))
    clip = partial(tritonclip.clip_, gradients.parameters, rule)
    on_gpu(benchmark, clip, gradients.refill, 2 * gradients.n_bytes)


@pytest.mark.parametrize("step", ["unclipped", "clipped"])
def test_largest(benchmark: Any, step: str) -> None:
    """One bfloat16 gradient of 3.07 GB."""
    grad = torch.empty(LARGEST // 2, dtype=torch.bfloat16, device=CUDA)
    limit, passes = (1.0, 3) if step == "clipped" else (math.inf, 1)
    clip = partial(bound([grad]).clip_, 2.0, EPS, limit, 1.0)
    on_gpu(benchmark, clip, partial(grad.fill_, 1e-3), passes * LARGEST)


def test_new_addresses(benchmark: Any) -> None:
    """Host time of a call on ResNet-50 where every gradient lies elsewhere than before."""
    gradients, times = gradients_of("resnet50"), []
    for _ in range(50):
        # While the old gradients are alive, the new ones lie elsewhere.
        kept = gradients.parameters
        gradients.allocate()
        clip = partial(tritonclip.clip_, gradients.parameters, 1.0)
        times.append(sample(Timed(clip), CUDA)[0])
        del kept
    hand_over(benchmark, Samples(times[1:], [], 1))


@pytest.mark.parametrize("processes", [8, 1])
def test_first_call(benchmark: Any, processes: int, tmp_path: Any) -> None:
    """Host time of the first call, which compiles, in so many processes at once."""
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    given["env"] = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", COLD], **given) for _ in range(processes)]
    times = [float(one.communicate(timeout=60)[0]) * 1e6 for one in started]
    hand_over(benchmark, Samples(times, [], 1))
