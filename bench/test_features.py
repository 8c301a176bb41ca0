"""Features beside what a user would write without them, on the CPU.

A feature is a function that makes the compared calls for a gradient list; it is registered with the
names of their providers and with its lists. Results are compared with float64 first.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import tritonclip
from bench import timing
from bench.accuracy import Gradients
from bench.comparison import CPU, AllSamples, Comparison, Effort, ratio
from bench.providers import sgd_of
from bench.samples import Timed
from bench.test_host import recorder
from bench.workloads import WORKLOADS, named

pytestmark = pytest.mark.filterwarnings("default")


class Calls(NamedTuple):
    """Calls that do the same with one gradient list, in the order of a feature's providers."""

    calls: Sequence[Callable[[], Any] | Timed | None]  # None where a provider is not installed.
    truth: Sequence[Tensor] = ()  # In float64; empty if nothing can be compared.
    tolerance: float = 1e-5  # Largest difference, relative to the largest element.
    changed: Sequence[Tensor] = ()  # The tensors that calls write; empty if they return results.
    prepare: Callable[[], Any] | None = None  # Runs before each call, outside the clock.


class Feature(NamedTuple):
    """The function of a feature, its cases and its providers; ours is "tritonclip"."""

    make: Callable[..., Calls]
    cases: Mapping[str, Sequence[str]]  # The arguments of `make`, by name of the case.
    providers: Sequence[str]

    def checked(self, case: str) -> tuple[dict[str, Timed], dict[str, str]]:
        """The calls by provider, and the faults of those whose results are wrong."""
        made, calls, faults = self.make(*self.cases[case]), dict[str, Timed](), dict[str, str]()
        for name, call in zip(self.providers, made.calls, strict=True):
            if call is not None:
                calls[name] = call if isinstance(call, Timed) else Timed(call, made.prepare)
                output = calls[name].prepared()()
                error = difference(made.changed or output, made.truth)
                if not error <= made.tolerance:
                    faults[name] = f"off by {error:.2g}"
        return calls, faults


FEATURES: dict[str, Feature] = {}
THREE = ("small_10", "mlp8", "resnet50")


def feature(name: str, providers: Sequence[str], *arguments: Iterable[str]) -> Callable[..., Any]:
    """Registers a function, which is measured with all combinations of the arguments."""

    def register(make: Callable[..., Calls]) -> Callable[..., Calls]:
        cases = {", ".join(named("workload", one) for one in c): c for c in product(*arguments)}
        FEATURES[name] = Feature(make, cases, providers)
        return make

    return register


def listed(name: str, dtype: str = "float32") -> Gradients:
    return Gradients(WORKLOADS[name], dtype, CPU)


def clipped(gradients: Gradients, limit: float) -> list[Tensor]:
    """The gradients, clipped by global norm in float64."""
    return [grad.double() * min(1.0, limit / gradients.norm) for grad in gradients.fresh]


@feature("clip_tensors_", ("tritonclip", "by hand", "as .grad"), THREE)
def clip_tensors(workload: str) -> Calls:
    gradients = listed(workload)
    limit, tensors = gradients.limit("norm", True), gradients.grads

    def by_hand() -> None:
        norm = torch.nn.utils.get_total_norm(tensors)
        torch._foreach_mul_(tensors, (limit / (norm + 1e-6)).clamp(max=1.0))

    def as_grad() -> None:
        parameters = [torch.empty_like(tensor) for tensor in tensors]
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.grad = tensor
        clip_grad_norm_(parameters, limit)

    calls = partial(tritonclip.clip_tensors_, tensors, limit), by_hand, as_grad
    return Calls(calls, clipped(gradients, limit), 1e-2, tensors, gradients.refill)


BY_HAND = ("tritonclip", "loop", "foreach")


@feature("norms_by_name", BY_HAND, THREE)
def norms_by_name(workload: str) -> Calls:
    """The norm of each gradient, as numbers by name."""
    gradients = listed(workload)
    pairs = [(str(i), parameter) for i, parameter in enumerate(gradients.parameters)]

    def loop() -> list[Tensor]:
        norms = {name: p.grad.norm().item() for name, p in pairs}  # type: ignore[union-attr]
        return [torch.tensor(list(norms.values()))]

    def foreach() -> list[Tensor]:
        norms = torch.stack(torch._foreach_norm(gradients.grads)).tolist()
        return [torch.tensor(list(dict(zip(dict(pairs), norms, strict=True)).values()))]

    def ours() -> list[Tensor]:
        return [torch.stack([*tritonclip.norms_by_name(pairs).values()])]

    truth = [torch.tensor(gradients.norms, dtype=torch.float64)]
    return Calls((ours, loop, foreach), truth, 1e-2)


RECORDED = ("tritonclip", "tritonclip, no recorder", "loop", "foreach")


@feature("record(each=True)", RECORDED, THREE)
def record_each(workload: str) -> Calls:
    """A step that keeps the norm of each gradient as a number, and one that keeps none.

    Nothing is clipped. A recorder also writes its rows to a file, every 100 steps.
    """
    gradients = listed(workload)
    parameters = gradients.parameters
    sgd, kept = sgd_of(parameters), deque[list[float]](maxlen=100)

    def loop() -> list[Tensor]:
        kept.append([grad.norm().item() for grad in gradients.grads])
        norm = clip_grad_norm_(parameters, 1e9)
        sgd.step()
        return [norm]

    def foreach() -> list[Tensor]:
        norms = torch.stack(torch._foreach_norm(gradients.grads))
        norm = torch.linalg.vector_norm(norms)
        torch.nn.utils.clip_grads_with_norm_(parameters, 1e9, norm)
        kept.append(norms.tolist())
        sgd.step()
        return [norm]

    def recorded(recorder: Any) -> Callable[[], list[Tensor]]:
        optimizer = tritonclip.ClippedOptimizer(sgd_of(parameters), 1e9, recorder=recorder)
        return lambda: [optimizer.step() or optimizer.stats.last_norm]

    recorders = recorder(each=True), None
    truth = [torch.tensor(gradients.norm, dtype=torch.float64)]
    return Calls((*map(recorded, recorders), loop, foreach), truth, 1e-2)


def _opacus(gradients: list[Tensor]) -> Timed:
    """The clipping of Opacus' own optimizer."""
    optimizers = importlib.import_module("opacus.optimizers")
    parameters: list[Any] = [torch.nn.Parameter(x[0].clone()) for x in gradients]
    sgd = torch.optim.SGD(parameters, lr=0.1)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0}
    optimizer = optimizers.DPOptimizer(sgd, expected_batch_size=len(gradients[0]), **options)

    def prepare() -> None:
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.summed_grad, parameter.grad_sample = None, own.view_as(own)

    def call() -> list[Tensor]:
        optimizer.clip_and_accumulate()
        return [parameter.summed_grad for parameter in parameters]

    return Timed(call, prepare)


def _optax(gradients: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Optax compiled, with gradients that are already JAX arrays."""
    jax, optax = importlib.import_module("jax"), importlib.import_module("optax")
    compiled = jax.jit(lambda arrays: optax.per_example_global_norm_clip(arrays, 1.0)[0])
    arrays = [jax.numpy.array(jax.dlpack.from_dlpack(x), copy=True) for x in gradients]

    def call() -> list[Tensor]:
        return list(map(torch.utils.dlpack.from_dlpack, jax.block_until_ready(compiled(arrays))))

    return call


OPTIONAL: dict[str, Callable[..., Any]] = {"opacus": _opacus, "optax": _optax}
EXAMPLES = ("1 examples", "16 examples", "256 examples")


@feature(
    "clip_per_example",
    ("tritonclip", "einsum", "vmap", *OPTIONAL),
    ("mlp4", "mlp8", "resnet20"),
    EXAMPLES,
)
def clip_per_example(name: str, examples: str) -> Calls:
    """The sum of the gradients of examples, a third of which are clipped by their norm."""
    shapes, n = WORKLOADS[name].shapes, int(examples.split()[0])
    sizes = torch.linspace(0.0, 1.5, n + 1)[1:] / sum(map(math.prod, shapes)) ** 0.5
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(n, *shape, generator=generator) * sizes.view(-1, *(1,) * len(shape))
        for shape in shapes
    ]

    def norms_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=dtype)
        return norms

    def by_einsum() -> list[Tensor]:
        norms = torch.stack([norms_of(x) for x in gradients], 1).norm(dim=1)
        weights = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        return [torch.einsum("i,i...", weights, x) for x in gradients]

    def clip(gradients: list[Tensor]) -> list[Tensor]:
        norm = torch.stack([x.norm() for x in gradients]).norm()
        return [x * (1.0 / (norm + 1e-6)).clamp(max=1.0) for x in gradients]

    def ours() -> list[Tensor]:
        return tritonclip.functional.clip_per_example(gradients, 1.0)[0]

    def by_vmap() -> list[Tensor]:
        return [x.sum(0) for x in torch.vmap(clip)(gradients)]

    others = [make(gradients) if find_spec(name) else None for name, make in OPTIONAL.items()]
    norms = torch.stack([norms_of(x, torch.float64) for x in gradients]).norm(dim=0)
    weights = (1 / norms).clamp(max=1.0)
    # One example is in float64 at a time.
    truth = [
        sum((w * own.double() for w, own in zip(weights, x, strict=True)), torch.zeros(()))
        for x in gradients
    ]
    return Calls((ours, by_einsum, by_vmap, *others), truth)


CASES = [
    pytest.param(
        *(call, workload, one),
        id=f"{call}-{workload}-{one}".replace(" ", "_"),
        marks=pytest.mark.skipif(
            one in OPTIONAL and not find_spec(one), reason=f"{one} is not installed"
        ),
    )
    for call, known in FEATURES.items()
    for workload, one in product(known.cases, known.providers)
]


@pytest.fixture(scope="module")
def comparison(effort: Effort, call: str, workload: str) -> Comparison:
    calls, faults = FEATURES[call].checked(workload)

    def figures(name: str, samples: AllSamples) -> dict[str, Any]:
        others = [one for one in samples if not one.startswith("tritonclip")]
        found = ratio(name, samples, others) if name == "tritonclip" else {}
        if name != "optax":
            # PyTorch does not know the memory of JAX.
            found["extra_mb"] = timing.extra_bytes(calls[name].prepared()) / 2**20
        return found

    return Comparison(calls, effort, figures, faults)


def difference(results: Any, truth: Sequence[Tensor]) -> float:
    """The largest difference from the truth, relative to the largest element of the tensor.

    The difference itself where a tensor is 0, and NaN if there is a NaN.
    """
    pairs = zip(results, truth, strict=True) if truth else ()
    errors = [(a.double() - b).abs().max() / (b.abs().max() or 1.0) for a, b in pairs]
    return float(torch.stack(errors).max()) if errors else 0.0


@pytest.mark.parametrize(("call", "workload", "provider"), CASES, scope="module")
def test_feature(benchmark: Any, comparison: Comparison, provider: str) -> None:
    comparison.hand_over(benchmark, provider)
