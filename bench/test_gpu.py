"""Questions that only a GPU answers, in the order of their value: `make gpu` asks them.

Host time is from the call to its return: warm, the mean of a burst of calls, and cold, of one call
after the caches of the processor were swept. Wall time is until the GPU is done. Times on the GPU
alone are between two events. In rows of `bytes`, a copy of as many stands beside the bandwidth.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonclip
from bench import timing
from bench.accuracy import EPS, Gradients
from bench.comparison import hand_over
from bench.test_training import CLIPS, dense, gpt2, resnet20
from bench.workloads import WORKLOADS
from helpers.absent_gpu import kernel_module, replaced_launch
from tritonclip.backends.interface import Clip
from tritonclip.samples import Samples, Timed, paired, sample, spread

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
# Calls in a burst, and samples of each.
BURST, ROUNDS = 30, 21
# Read before a cold call: more bytes than the caches of a processor hold.
SWEPT = 2**27
# One gradient, of which times of others were published.
LARGEST = 3_070_000_000
# Chunks of gradients, so that a list read backwards is read chunk by chunk.
CHUNK = 16384
# Rows are written here as they come: a run that is cut off leaves those that it has.
ROWS = Path(os.environ.get("GPU_ROWS", "gpu.jsonl"))
COLD = """import json, time
start = time.perf_counter()
def lap():
    global start
    before, start = start, time.perf_counter()
    return start - before
import torch
parts = {"import torch": lap()}
import tritonclip
parts["import tritonclip"] = lap()
p = torch.ones(9, device="cuda", requires_grad=True)
p.grad = torch.ones_like(p)
torch.cuda.synchronize()
parts["start CUDA"] = lap()
import triton
parts["import triton"] = lap()
try:
    from triton.runtime.cache import triton_key
except ImportError:
    from triton.compiler.compiler import triton_key
triton_key()
parts["hash Triton"] = lap()
tritonclip.clip_([p], 1.0).item()
parts["first call"] = lap()
tritonclip.clip_([p], 1.0).item()
parts["second call"] = lap()
tritonclip.clip_([p], tritonclip.ClipByValue(1.0))
torch.cuda.synchronize()
parts["first call of another rule"] = lap()
print(json.dumps(parts))"""


@pytest.fixture
def row(benchmark: Any, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Hands over samples and figures of a test, and writes them down at once."""

    def add(walls: list[float], **figures: Any) -> None:
        benchmark.extra_info |= figures
        hand_over(benchmark, Samples(walls, [], 1))
        median = statistics.median(walls)
        line = {"test": request.node.name, "us": median, **figures}
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return add


@lru_cache(1)
def gradients_of(workload: str, dtype: str = "float32") -> Gradients:
    """Gradients on the GPU; those of the last test, which many tests share."""
    return Gradients(WORKLOADS[workload], dtype, CUDA)


def host_us(call: Callable[[], Any]) -> dict[str, float]:
    """Host time of a call, warm and cold, and wall time."""
    swept = torch.zeros(SWEPT // 4, device="cpu")
    for _ in range(5):
        call()
    warm = [sample(Timed(call), CUDA, BURST)[0] for _ in range(ROUNDS)]
    cold = [sample(Timed(call, swept.sum), CUDA) for _ in range(ROUNDS)]
    hosts, walls = zip(*cold, strict=True)
    named = {"warm_us": warm, "cold_us": hosts, "wall_us": walls}
    return {name: statistics.median(times) for name, times in named.items()}


def device_us(call: Callable[[], Any], prepare: Any = None) -> list[float]:
    """Times of a call on the GPU alone."""
    return timing.device_us(Timed(call, prepare), CUDA, HOST_US)


def bound(grads: list[Tensor]) -> Any:
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


def launches_of(gradients: Gradients) -> dict[str, Callable[[], Any]]:
    """One launch of the kernel that clamps: by the library, by Triton's launcher, and in C."""
    module, seen = kernel_module("launch"), list[tuple[Any, ...]]()

    def keep(*given: Any, **constants: Any) -> Any:
        runner = module_launch(*given, **constants)
        seen.append((given, constants, runner))
        return runner

    module_launch = module.launch
    with replaced_launch(keep):
        verb("clamp", gradients)()
    given, constants, runner = seen[0]
    kernel, device, programs, _, tensors = given
    compiled, stream = runner.compiled, module.current_stream(device)
    rest = [constants[name] for name in kernel.arg_names[len(tensors) :]]
    integers = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
    parts = compiled.function, compiled.packed_metadata, None, None, None
    start = runner.start(programs, len(tensors))
    by_triton = partial(compiled.run, programs, 1, 1, stream, *parts)
    return {
        "library": partial(module.launch, *given, **constants),
        "Triton, tensors": partial(by_triton, *tensors, *rest),
        "Triton, integers": partial(by_triton, *integers, *rest),
        "C, tensors": partial(start, stream, *tensors),
        "C, integers": partial(start, stream, *integers),
    }


HOW = ("library", "Triton, tensors", "Triton, integers", "C, tensors", "C, integers")


@pytest.mark.parametrize("how", HOW)
def test_host_of_a_launch(row: Any, how: str) -> None:
    """Host time of one launch."""
    call = launches_of(gradients_of("small_10"))[how]
    figures = host_us(call)
    row([figures["warm_us"]], started=call() is not False, **figures)


def clips_of(gradients: Gradients, rule: str) -> dict[str, Callable[[], Any]]:
    """Ours and torch's call on the same gradients, of which none is clipped."""
    given, limit = gradients.parameters, gradients.limit(rule, clipped=False)
    own: Any = tritonclip.ClipByValue(limit) if rule == "value" else limit
    torchs: Any = torch.nn.utils.clip_grad_norm_
    if rule == "value":
        torchs = torch.nn.utils.clip_grad_value_
    return {
        "tritonclip": partial(tritonclip.clip_, given, own),
        "torch": partial(torchs, given, limit),
    }


@pytest.mark.parametrize("provider", ["tritonclip", "torch"])
@pytest.mark.parametrize("rule", ["value", "norm"])
@pytest.mark.parametrize("workload", ["small_1", "small_10", "resnet50"])
def test_host_of_a_call(row: Any, workload: str, rule: str, provider: str) -> None:
    """Host time of a call."""
    figures = host_us(clips_of(gradients_of(workload), rule)[provider])
    row([figures["warm_us"]], **figures)


RULES: dict[str, Callable[[float], Any]] = {
    "global norm": lambda norm: norm,
    "by norm": tritonclip.ClipByNorm,
    "unit norm": lambda norm: tritonclip.ClipByUnitNorm(),
    "z-score": lambda norm: tritonclip.ClipByZScore(),
    "quantile": lambda norm: tritonclip.ClipByQuantile(),
    "own history": lambda norm: tritonclip.ClipByOwnHistory(),
    "torch": lambda norm: norm,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workload", ["resnet50", "gpt2_124m"])
def test_rule(row: Any, workload: str, rule: str) -> None:
    """A call by a rule; "torch" is its function by global norm."""
    gradients = gradients_of(workload)
    made = RULES[rule](gradients.norm * 10)
    state: dict[str, Any] = {}
    if rule in ("z-score", "quantile", "own history"):
        state = {"state": tritonclip.ClipState()}
    call: Callable[[], Any] = partial(tritonclip.clip_, gradients.parameters, made, **state)
    if rule == "torch":
        call = partial(torch.nn.utils.clip_grad_norm_, gradients.parameters, made)
    # Beyond the warm-up of the rules that have one.
    for _ in range(110 if state else 3):
        call()
    figures = host_us(call)
    gradients.refill()
    row(device_us(call), launches=timing.launches(call, CUDA), **figures)
    gradients.refill()


@pytest.mark.parametrize("stream", ["warm-up's", "torch's"])
@pytest.mark.parametrize("provider", ["tritonclip", "torch"])
@pytest.mark.parametrize("rule", ["value", "norm"])
@pytest.mark.parametrize("workload", ["small_1", "small_10", "resnet50"])
def test_graph(row: Any, workload: str, rule: str, provider: str, stream: str) -> None:
    """Replays of a CUDA graph, captured on the stream of the warm-up or on torch's own."""
    call = clips_of(gradients_of(workload), rule)[provider]
    graph = timing.captured(Timed(call), same_stream=stream == "warm-up's")
    replays, alone = device_us(graph.replay), device_us(call)
    row(replays, over_us=statistics.median(replays) - statistics.median(alone))


@pytest.mark.parametrize("call", ["norm", "backwards", "forwards", "torch"])
@pytest.mark.parametrize("megabytes", [5, 10, 20, 30, 40, 50, 70])
def test_list_about_as_large_as_l2(row: Any, megabytes: int, call: str) -> None:
    """Norm alone, or norm and scale, which walks back, or forwards as for the list turned round."""
    n = megabytes * 2**20 // (4 * CHUNK)
    fresh = [torch.full((CHUNK,), 1e-3, device=CUDA) for _ in range(n)]
    parameters = [torch.empty_like(x, requires_grad=True) for x in fresh]
    for parameter, x in zip(parameters, fresh, strict=True):
        parameter.grad = x.clone()
    grads = [p.grad for p in parameters if p.grad is not None]
    limit = 0.5e-3 * math.sqrt(n * CHUNK)
    batch, turned = bound(grads), bound(grads[::-1])
    norm, clip = partial(batch.norm, 2.0, per_gradient=False), Clip(2.0, EPS, limit, 1.0)
    calls: dict[str, Callable[[], Any]] = {
        "norm": norm,
        "backwards": lambda: batch.scale_(norm(), clip),
        "forwards": lambda: turned.scale_(norm(), clip),
        "torch": partial(torch.nn.utils.clip_grad_norm_, parameters, limit),
    }
    times = device_us(calls[call], partial(torch._foreach_copy_, grads, fresh))
    n_bytes = (1 if call == "norm" else 3) * 4 * n * CHUNK
    row(times, bytes=n_bytes, gb_per_s=n_bytes / (statistics.median(times) * 1e3))


class Bottleneck(nn.Module):
    """Convolutions of 1 by 1, 3 by 3 and 1 by 1 beside their input (He et al. 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = (inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)
        layers: list[nn.Module] = []
        for given, made, size, step in sizes:
            layers += [nn.Conv2d(given, made, size, step, size // 2, bias=False)]
            layers += [nn.BatchNorm2d(made), nn.ReLU()]
        self.inner = nn.Sequential(*layers[:-1])
        self.outer: nn.Module = nn.Identity()
        if inputs != 4 * width:
            outer = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.outer = nn.Sequential(outer, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the input to what the convolutions make of it."""
        return torch.relu(self.inner(x) + self.outer(x))


def resnet50() -> nn.Module:
    """ResNet-50 for ImageNet (He et al. 2016)."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    blocks, inputs = list[nn.Module](), 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for at in range(count):
            width = 64 << stage
            blocks.append(Bottleneck(inputs, width, 2 if stage and not at else 1))
            inputs = 4 * width
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *last)


# A model, its input, and how many classes and targets it has.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int, int]] = {
    "PPO, 2 x 64": (
        lambda: nn.Sequential(*dense(17, 64, 64, 6)),
        lambda: torch.randn(64, 17),
        6,
        64,
    ),
    "ResNet-20": (resnet20, lambda: torch.randn(128, 3, 32, 32), 10, 128),
    "ResNet-50": (resnet50, lambda: torch.randn(32, 3, 224, 224), 1000, 32),
    "GPT-2 124M": (gpt2, lambda: torch.randint(50257, (4, 256)), 50257, 4 * 256),
}


class Training:
    """A model's steps on the GPU, with a clip or without."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, clip: Any) -> None:
        self.model, self.inputs, self.targets, self.clip = model, inputs, targets, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=CUDA.type == "cuda")
        self.walls: list[float] = []
        self.moved: list[int] = []
        self._addresses: list[int] = []

    def __call__(self) -> None:
        """Takes a step."""
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.model(self.inputs), self.targets).backward()
        if self.clip is not None:
            self.clip(self.model.parameters(), 1.0)
        self.optimizer.step()

    def follow(self) -> None:
        """Notes how many gradients have moved since the last step."""
        addresses = [p.grad.data_ptr() for p in self.model.parameters() if p.grad is not None]
        pairs = zip(addresses, self._addresses, strict=False)
        self.moved.append(sum(new != old for new, old in pairs))
        self._addresses = addresses


def trainings(model: str, clips: dict[str, Any]) -> dict[str, Training]:
    """Training of equal models, with each clip."""
    torch.manual_seed(0)
    make, draw, n_classes, n_targets = MODELS[model]
    first, inputs = make().to(CUDA), draw().to(CUDA)
    targets = torch.randint(n_classes, (n_targets,)).to(CUDA)
    return {
        name: Training(copy.deepcopy(first), inputs, targets, clip) for name, clip in clips.items()
    }


@pytest.mark.parametrize("model", ["PPO, 2 x 64", "ResNet-20", "ResNet-50", "GPT-2 124M"])
def test_addresses_in_training(row: Any, model: str) -> None:
    """How many gradients move from step to step, with set_to_none=True."""
    (training,) = trainings(model, {"tritonclip": tritonclip.clip_}).values()
    for _ in range(30):
        training()
        training.follow()
    moved = training.moved[1:]
    row([1.0], steps=len(moved), moved=moved, steps_moved=sum(map(bool, moved)))


@pytest.mark.parametrize("model", ["PPO, 2 x 64", "ResNet-50", "GPT-2 124M"])
def test_share_of_a_training_step(row: Any, model: str) -> None:
    """Wall time of whole steps: without a clip, with torch's and with ours, taken in turn."""
    made = trainings(model, {"none": None, **CLIPS})
    for n in range(5 + ROUNDS):
        for training in made.values():
            wall = sample(Timed(training), CUDA)[1]
            if n >= 5:
                training.walls.append(wall)
    bare, figures = made["none"].walls, dict[str, Any]()
    for name in CLIPS:
        walls = made[name].walls
        figures |= spread(f"{name} over none", paired(walls, bare))
        figures[f"{name}_us"] = statistics.median(walls)
    row(bare, **figures)


def stepped(feature: str, stack: ExitStack, folder: Path) -> Callable[[], Any]:
    """A step of SGD on small gradients: bare, after torch's clip, or wrapped."""
    parameters = Gradients(WORKLOADS["small_10"], "float32", CUDA).parameters
    sgd = torch.optim.SGD(parameters, lr=1e-3)
    if feature == "bare":
        return sgd.step
    if feature == "torch by hand":
        return lambda: (torch.nn.utils.clip_grad_norm_(parameters, 1e9), sgd.step())
    clip, options = STEPS[feature]
    if feature == "recorder":
        options = {"recorder": stack.enter_context(tritonclip.record(folder / "run.csv"))}
    step: Callable[[], Any] = tritonclip.ClippedOptimizer(sgd, clip, **options).step
    return step


STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bare": (None, {}),
    "torch by hand": (None, {}),
    "fixed limit": (1e9, {}),
    "by value": (tritonclip.ClipByValue(1e9), {}),
    "ClipByQuantile": (tritonclip.ClipByQuantile(), {}),
    "skip": (1e9, {"nonfinite": "skip"}),
    "async_error": (1e9, {"nonfinite": "async_error"}),
    "recorder": (1e9, {}),
}


@pytest.mark.parametrize("feature", STEPS)
def test_step(row: Any, feature: str, tmp_path: Path) -> None:
    """Launches and host time of a step of ClippedOptimizer, beside the bare optimizer's."""
    with ExitStack() as stack:
        step = stepped(feature, stack, tmp_path)
        figures = host_us(step)
        # With the launch for every 64 steps.
        n = timing.launches(lambda: [step() for _ in range(64)], CUDA) / 64
        row([figures["warm_us"]], launches=n, **figures)


@pytest.mark.parametrize("processes", ["cold", "with binaries on disk", "8 at once, cold"])
def test_first_call(row: Any, processes: str, tmp_path_factory: Any) -> None:
    """Host time of the first call of a process, in parts."""
    folder = tmp_path_factory.mktemp("cache")
    if processes == "with binaries on disk":
        first_calls(folder, 1)
    parts = first_calls(folder, 8 if processes.startswith("8") else 1)
    medians = {name: statistics.median(one[name] for one in parts) for name in parts[0]}
    row([one["first call"] * 1e6 for one in parts], parts_s=medians)


def first_calls(folder: Path, n: int) -> list[dict[str, float]]:
    """Seconds of each part of the first call, in so many processes at once."""
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    given["env"] = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    code = COLD.replace('"cuda"', f'"{CUDA.type}"')
    started = [subprocess.Popen([sys.executable, "-c", code], **given) for _ in range(n)]
    return [json.loads(one.communicate(timeout=60)[0]) for one in started]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", VERBS)
def test_kernel(row: Any, call: str, dtype: str) -> None:
    """One launch of a kernel on GPT-2."""
    gradients = gradients_of("gpt2_124m", dtype)
    times = device_us(verb(call, gradients), gradients.refill)
    n_bytes = VERBS[call] * gradients.n_bytes
    rate = n_bytes / (statistics.median(times) * 1e3)
    row(times, bytes=n_bytes, gb_per_s=rate, copy_gb_per_s=timing.copy_gb_per_s(CUDA))


@pytest.mark.parametrize("step", ["unclipped", "clipped"])
def test_largest(row: Any, step: str) -> None:
    """One bfloat16 gradient of 3.07 GB."""
    grad = torch.empty(LARGEST // 2, dtype=torch.bfloat16, device=CUDA)
    limit, passes = (1.0, 3) if step == "clipped" else (math.inf, 1)
    times = device_us(partial(bound([grad]).clip_, 2.0, EPS, limit, 1.0), partial(grad.fill_, 1e-3))
    row(times, bytes=passes * LARGEST, gb_per_s=passes * LARGEST / (min(times) * 1e3))
