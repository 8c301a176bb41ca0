"""`python -m bench features`: features beside what a user would write without them, on the CPU.

A feature is a function that yields comparisons; FEATURES names it. Results are compared with
float64 first, then all providers are timed in turn, as in `pytest bench`.
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tritonclip
from bench import timing
from bench.accuracy import Gradients
from bench.providers import FOREIGN, sgd_of
from bench.results import Row
from bench.workloads import WORKLOADS
from tritonclip.optim.clipped_optimizer import StepNonfinite
from tritonclip.samples import Timed, interleaved, paired, spread

CPU = torch.device("cpu")
LEAST, SECONDS = 9, 0.6


class Comparison(NamedTuple):
    """One gradient list, and the calls that do the same with it; ours is "tritonclip"."""

    gradients: str  # The list, in words.
    providers: Mapping[str, Timed]  # Each call returns the tensors that are compared with `truth`.
    truth: Sequence[Tensor]  # In float64; empty where nothing can be compared.
    tolerance: float = 1e-5  # Largest difference, relative to the largest element.


def norms_by_name() -> Iterator[Comparison]:
    """The norm of each gradient, as numbers by name."""
    for workload in ("small_10", "mlp8", "resnet50"):
        gradients = Gradients(WORKLOADS[workload], "float32", CPU)
        named = [(str(i), parameter) for i, parameter in enumerate(gradients.parameters)]

        def ours(named=named) -> list[Tensor]:
            return [torch.stack([*tritonclip.norms_by_name(named).values()])]

        def loop(named=named) -> list[Tensor]:
            norms = {name: p.grad.norm().item() for name, p in named}
            return [torch.tensor(list(norms.values()))]

        def foreach(named=named) -> list[Tensor]:
            norms = torch.stack(torch._foreach_norm([p.grad for _, p in named])).tolist()
            return [torch.tensor(list(dict(zip(dict(named), norms, strict=True)).values()))]

        providers = {"tritonclip": Timed(ours), "loop": Timed(loop), "foreach": Timed(foreach)}
        truth = [torch.tensor(gradients.norms, dtype=torch.float64)]
        yield Comparison(WORKLOADS[workload].title, providers, truth, 1e-2)


def statistics_by_name() -> Iterator[Comparison]:
    """Norm, largest magnitude and share of zeros of each gradient, as numbers by name."""
    for workload, dtype in itertools.product(("small_10", "resnet50"), ("float32", "bfloat16")):
        gradients = Gradients(WORKLOADS[workload], dtype, CPU)
        named = [(str(i), parameter) for i, parameter in enumerate(gradients.parameters)]

        def ours(named=named) -> list[Tensor]:
            found = tritonclip.statistics_by_name(named).values()
            return [torch.stack(column) for column in zip(*found, strict=True)]

        def loop(named=named) -> list[Tensor]:
            grads = [p.grad for _, p in named]
            rows = [
                (g.norm().item(), g.abs().max().item(), 1 - g.count_nonzero().item() / g.numel())
                for g in grads
            ]
            return [torch.tensor(column) for column in zip(*rows, strict=True)]

        def foreach(named=named) -> list[Tensor]:
            grads = [p.grad for _, p in named]
            norms = torch.stack(torch._foreach_norm(grads)).tolist()
            largest = torch.stack([g.abs().max() for g in grads]).tolist()
            counts = torch.stack([g.count_nonzero() for g in grads]).tolist()
            zeros = [1 - n / g.numel() for n, g in zip(counts, grads, strict=True)]
            return [torch.tensor(column) for column in (norms, largest, zeros)]

        wide = [p.grad.double() for p in gradients.parameters if p.grad is not None]
        truth = [
            torch.stack([x.norm() for x in wide]),
            torch.stack([x.abs().max() for x in wide]),
            torch.stack([(x == 0).double().mean() for x in wide]),
        ]
        providers = {"tritonclip": Timed(ours), "loop": Timed(loop), "foreach": Timed(foreach)}
        yield Comparison(f"{WORKLOADS[workload].title}, {dtype}", providers, truth, 1e-2)


# The matrices of the two layers of examples/train_transformer.py, and of one of GPT-2's twelve.
_MATRICES = {
    "transformer of make demo": [(144, 48), (48, 48), (192, 48), (48, 192)] * 2,
    "GPT-2 124M, one layer": [(768, 768), (2304, 768), (3072, 768), (768, 3072)],
}


def _spectra(shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Matrices whose singular values fall from 4 to almost 0, as those of gradients do."""
    made = []
    for seed, (rows, columns) in enumerate(shapes):
        torch.manual_seed(seed)
        n = min(rows, columns)
        u, v = (torch.linalg.qr(torch.randn(size, n))[0] for size in (rows, columns))
        made.append((u * 4 / torch.arange(1, n + 1).sqrt()) @ v.mT)
    return made


def spectral_norm() -> Iterator[Comparison]:
    """Singular values over a limit brought to it, and no singular value over it."""
    for title, shapes in _MATRICES.items():
        grads = _spectra(shapes)

        def by_svd(grads=grads, limit=1.0) -> list[Tensor]:
            parts = [torch.linalg.svd(x, full_matrices=False) for x in grads]
            return [(u * s.clamp(max=limit)) @ v for u, s, v in parts]

        truth = by_svd([x.double() for x in grads])
        ours = partial(tritonclip.functional.clip_by_spectral_norm, grads, 1.0)
        soft = partial(tritonclip.functional.clip_by_spectral_norm, grads, 1.0, soft=True)
        clipped = {"tritonclip": Timed(ours), "svd": Timed(by_svd)}
        yield Comparison(f"{title}, clipped", clipped, truth, 1e-3)
        unclipped = {
            "tritonclip": Timed(partial(tritonclip.functional.clip_by_spectral_norm, grads, 4.1)),
            "svd": Timed(partial(by_svd, grads, 4.1)),
        }
        yield Comparison(f"{title}, unclipped", unclipped, [x.double() for x in grads], 1e-3)
        yield Comparison(f"{title}, softly", {"tritonclip": Timed(soft), "svd": Timed(by_svd)}, [])


def spectral_step() -> Iterator[Comparison]:
    """A step of AdamW with singular values clipped, beside the step alone: its share."""
    for title, shapes in _MATRICES.items():
        for limit, form in ((1.0, "clipped"), (4.1, "unclipped")):
            grads, rule = _spectra(shapes), tritonclip.ClipBySpectralNorm(limit)
            weights = [torch.nn.Parameter(torch.zeros_like(x)) for x in grads]
            plain = torch.optim.AdamW(weights, fused=True)
            wrapped = tritonclip.ClippedOptimizer(torch.optim.AdamW(weights, fused=True), rule)

            def refill(weights=weights, grads=grads) -> None:
                for weight, grad in zip(weights, grads, strict=True):
                    weight.grad = grad.clone()

            providers = {
                "tritonclip": Timed(wrapped.step, refill),
                "AdamW alone": Timed(plain.step, refill),
            }
            yield Comparison(f"{title}, {form}", providers, [])


def error_without_wait() -> Iterator[Comparison]:
    """A step of SGD that raises for NaN and inf; nothing is clipped."""
    for workload in ("small_10", "mlp8"):
        gradients = [Gradients(WORKLOADS[workload], "float32", CPU) for _ in range(4)]
        steps: dict[str, Timed] = {}
        policies: tuple[StepNonfinite, ...] = ("async_error", "error", "propagate")
        for own, policy in zip(gradients, policies, strict=False):
            optimizer = tritonclip.ClippedOptimizer(sgd_of(own.parameters), 1e9, nonfinite=policy)
            steps[policy] = Timed(stepping(optimizer.step, own.parameters))
        parameters = gradients[3].parameters
        sgd = sgd_of(parameters)

        def by_torch(parameters=parameters, sgd=sgd) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 1e9, error_if_nonfinite=True)
            sgd.step()

        providers = {
            "tritonclip": steps["async_error"],
            'nonfinite="error"': steps["error"],
            "no policy": steps["propagate"],
            "torch": Timed(stepping(by_torch, parameters)),
        }
        truth = [grad.double() for grad in grads_of(parameters)]
        yield Comparison(WORKLOADS[workload].title, providers, truth)


def loss_outliers() -> Iterator[Comparison]:
    """A step of SGD that is skipped where norm or loss is an outlier among the last 128."""
    for workload in ("small_10", "mlp8"):
        first, second = (Gradients(WORKLOADS[workload], "float32", CPU) for _ in range(2))
        optimizer = tritonclip.ClippedOptimizer(
            sgd_of(first.parameters), 1e9, skip_above=tritonclip.Outlier()
        )
        sgd, loss = sgd_of(second.parameters), torch.ones(())
        norms, losses = (deque([torch.ones(())] * 128, maxlen=129) for _ in range(2))

        def ours(optimizer=optimizer, loss=loss) -> None:
            optimizer.loss = loss
            optimizer.step()

        def by_lists(sgd=sgd, loss=loss, norms=norms, losses=losses, own=second) -> None:
            # As OLMo-core does it.
            norms.append(torch.nn.utils.clip_grad_norm_(own.parameters, 1e9))
            losses.append(loss)
            taken = True
            for history in (norms, losses):
                std, mean = torch.std_mean(torch.stack(list(history)[:-1]))
                taken = taken and bool(history[-1] - mean <= 6 * std + 1e-6 * mean)
            if taken:
                sgd.step()

        providers = {
            "tritonclip": Timed(stepping(ours, first.parameters)),
            "lists of tensors": Timed(stepping(by_lists, second.parameters)),
        }
        truth = [grad.double() for grad in grads_of(second.parameters)]
        yield Comparison(WORKLOADS[workload].title, providers, truth)


def own_quantile() -> Iterator[Comparison]:
    """Each gradient clipped to a quantile of its own last 100 norms."""
    for workload in ("small_10", "mlp8", "resnet50"):
        first, second = (Gradients(WORKLOADS[workload], "float32", CPU) for _ in range(2))
        rule, state = tritonclip.ClipByOwnQuantile(), tritonclip.ClipState()
        histories: list[deque[Tensor]] = [deque(maxlen=100) for _ in second.parameters]

        def ours(own=first.parameters, rule=rule, state=state) -> None:
            tritonclip.clip_(own, rule, state=state)

        def loop(own=second.parameters, histories=histories) -> None:
            for parameter, history in zip(own, histories, strict=True):
                norm = parameter.grad.norm()
                history.append(norm)
                limit = torch.quantile(torch.stack(list(history)), 0.9)
                if norm > limit * (1 + 1e-6):
                    parameter.grad.mul_(limit / norm)

        providers = {
            "tritonclip": Timed(stepping(ours, first.parameters)),
            "loop": Timed(stepping(loop, second.parameters)),
        }
        truth = [grad.double() for grad in grads_of(second.parameters)]
        yield Comparison(WORKLOADS[workload].title, providers, truth)


def stepping(
    step: Callable[[], object], parameters: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """The step, which returns the gradients as it left them."""

    def call() -> list[Tensor]:
        step()
        return grads_of(parameters)

    return call


def grads_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that are there."""
    return [p.grad for p in parameters if p.grad is not None]


def clip_tensors() -> Iterator[Comparison]:
    """Tensors that are no `.grad`, clipped in place."""
    for workload in ("small_10", "mlp8", "resnet50"):
        gradients = Gradients(WORKLOADS[workload], "float32", CPU)
        limit = gradients.limit("norm", True)
        tensors = gradients.grads

        def ours(tensors: list[Tensor] = tensors, limit: float = limit) -> list[Tensor]:
            tritonclip.clip_tensors_(tensors, limit)
            return tensors

        def by_hand(tensors: list[Tensor] = tensors, limit: float = limit) -> list[Tensor]:
            norm = torch.nn.utils.get_total_norm(tensors)
            torch._foreach_mul_(tensors, (limit / (norm + 1e-6)).clamp(max=1.0))
            return tensors

        def as_grad(tensors: list[Tensor] = tensors, limit: float = limit) -> list[Tensor]:
            parameters = [torch.empty_like(tensor) for tensor in tensors]
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.grad = tensor
            torch.nn.utils.clip_grad_norm_(parameters, limit)
            return tensors

        providers = {
            name: Timed(call, gradients.refill)
            for name, call in (("tritonclip", ours), ("by hand", by_hand), ("as .grad", as_grad))
        }
        truth = [grad.double() * min(1.0, limit / gradients.norm) for grad in gradients.fresh]
        yield Comparison(WORKLOADS[workload].title, providers, truth, 1e-2)


def accumulate() -> Iterator[Comparison]:
    """The gradient of a micro-batch, clipped, added to those before, and freed."""
    for workload in ("small_10", "mlp8", "resnet50"):
        for clips in (False, True):
            yield _micro_batch(workload, clips)


def _micro_batch(workload: str, clips: bool) -> Comparison:
    gradients = Gradients(WORKLOADS[workload], "float32", CPU)
    limit, parameters = gradients.limit("norm", clips), gradients.parameters
    grads = [grad.clone() for grad in gradients.fresh]
    sums = [torch.zeros_like(grad) for grad in gradients.fresh]

    def prepare() -> None:
        torch._foreach_copy_(grads, gradients.fresh)
        torch._foreach_zero_(sums)
        for parameter, own in zip(parameters, sums, strict=True):
            parameter.grad = own

    def backward() -> None:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad

    def ours() -> list[Tensor]:
        with tritonclip.accumulate_(parameters, limit):
            backward()
        return sums

    def by_hand(clip_: Callable[..., Tensor]) -> list[Tensor]:
        backward()
        clip_(parameters, limit)
        torch._foreach_add_(sums, gradients.grads)
        for parameter in parameters:
            parameter.grad = None
        return sums

    providers = {
        "tritonclip": Timed(ours, prepare),
        "torch": Timed(partial(by_hand, torch.nn.utils.clip_grad_norm_), prepare),
        "clip_ and add": Timed(partial(by_hand, tritonclip.clip_), prepare),
    }
    truth = [grad.double() * min(1.0, limit / gradients.norm) for grad in gradients.fresh]
    title = f"{WORKLOADS[workload].title}, {'clipped' if clips else 'unclipped'}"
    return Comparison(title, providers, truth, 1e-2)


def record_each() -> Iterator[Comparison]:
    """A step that keeps the norm of each gradient as a number, and one that keeps none.

    Nothing is clipped. A recorder also writes every hundredth step to its file.
    """

    def step_of(optimizer: tritonclip.ClippedOptimizer) -> Timed:
        def step() -> list[Tensor]:
            optimizer.step()
            return [optimizer.stats.last_norm]

        return Timed(step)

    for workload in ("small_10", "mlp8", "resnet50"):
        gradients = Gradients(WORKLOADS[workload], "float32", CPU)
        parameters, kept = gradients.parameters, deque[list[float]](maxlen=100)
        sgd = sgd_of(parameters)

        def loop(parameters=parameters, kept=kept, sgd=sgd) -> list[Tensor]:
            kept.append([p.grad.norm().item() for p in parameters])
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1e9)
            sgd.step()
            return [norm]

        def foreach(parameters=parameters, kept=kept, sgd=sgd) -> list[Tensor]:
            norms = torch.stack(torch._foreach_norm([p.grad for p in parameters]))
            norm = torch.linalg.vector_norm(norms)
            torch.nn.utils.clip_grads_with_norm_(parameters, 1e9, norm)
            kept.append(norms.tolist())
            sgd.step()
            return [norm]

        with (
            TemporaryDirectory() as folder,
            tritonclip.record(Path(folder, "run.csv"), each=True) as recorder,
            tritonclip.record(Path(folder, "all.csv"), each=True, statistics=True) as statistics,
        ):
            recorded, with_statistics = (
                tritonclip.ClippedOptimizer(sgd_of(parameters), 1e9, recorder=one)
                for one in (recorder, statistics)
            )
            providers = {
                "tritonclip": step_of(recorded),
                "tritonclip, statistics": step_of(with_statistics),
                "tritonclip, no recorder": step_of(
                    tritonclip.ClippedOptimizer(sgd_of(parameters), 1e9)
                ),
                "loop": Timed(loop),
                "foreach": Timed(foreach),
            }
            truth = [torch.tensor(gradients.norm, dtype=torch.float64)]
            yield Comparison(WORKLOADS[workload].title, providers, truth, 1e-2)


def clip_per_example() -> Iterator[Comparison]:
    """The sum of the gradients of examples, a third of which are clipped by their norm."""
    for name, n in itertools.product(("mlp4", "mlp8", "resnet20"), (1, 16, 256)):
        workload = WORKLOADS[name]
        n_elements = sum(map(math.prod, workload.shapes))
        sizes = torch.linspace(0.0, 1.5, n + 1)[1:] / n_elements**0.5
        generator = torch.Generator().manual_seed(0)
        gradients = [
            torch.randn(n, *shape, generator=generator) * sizes.view(-1, *(1,) * len(shape))
            for shape in workload.shapes
        ]
        providers = {
            "tritonclip": Timed(partial(_clip_per_example, gradients)),
            "einsum": Timed(partial(_clip_by_einsum, gradients)),
            "vmap": Timed(partial(_clip_by_vmap, gradients)),
        }
        if find_spec("opacus"):
            providers["opacus"] = _opacus(gradients)
        if find_spec("optax"):
            providers["optax"] = _optax(gradients)
        norms = torch.stack([_norms_of(x, torch.float64) for x in gradients]).norm(dim=0)
        weights = (1 / norms).clamp(max=1.0)
        truth = [_sum_of(x, weights) for x in gradients]
        yield Comparison(f"{workload.title}, {n} examples", providers, truth)


def _clip_per_example(gradients: list[Tensor]) -> list[Tensor]:
    return tritonclip.functional.clip_per_example(gradients, 1.0)[0]


def _norms_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=dtype)
    return norms


def _sum_of(x: Tensor, weights: Tensor) -> Tensor:
    """In float64, an example at a time."""
    return sum((w * own.double() for w, own in zip(weights, x, strict=True)), torch.zeros(()))


def _clip_by_einsum(gradients: list[Tensor]) -> list[Tensor]:
    norms = torch.stack([_norms_of(x) for x in gradients], 1).norm(dim=1)
    weights = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    return [torch.einsum("i,i...", weights, x) for x in gradients]


def _clip_by_vmap(gradients: list[Tensor]) -> list[Tensor]:
    def clip(gradients: list[Tensor]) -> list[Tensor]:
        norm = torch.stack([x.norm() for x in gradients]).norm()
        weight = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        return [x * weight for x in gradients]

    return [x.sum(0) for x in torch.vmap(clip)(gradients)]


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


def _optax(gradients: list[Tensor]) -> Timed:
    """Compiled, with gradients that JAX has already."""
    jax, optax = importlib.import_module("jax"), importlib.import_module("optax")
    compiled = jax.jit(lambda arrays: optax.per_example_global_norm_clip(arrays, 1.0)[0])
    arrays = [jax.numpy.array(jax.dlpack.from_dlpack(x), copy=True) for x in gradients]

    def call() -> list[Tensor]:
        return list(map(torch.utils.dlpack.from_dlpack, jax.block_until_ready(compiled(arrays))))

    return Timed(call)


FEATURES: dict[str, Callable[[], Iterator[Comparison]]] = {
    "accumulate_": accumulate,
    "clip_tensors_": clip_tensors,
    "norms_by_name": norms_by_name,
    "statistics_by_name": statistics_by_name,
    "spectral_norm": spectral_norm,
    "spectral_step": spectral_step,
    "error_without_wait": error_without_wait,
    "loss_outliers": loss_outliers,
    "own_quantile": own_quantile,
    "record(each=True)": record_each,
    "clip_per_example": clip_per_example,
}


def is_right(results: Sequence[Tensor], comparison: Comparison) -> bool:
    """Whether results are as near to the truth as they have to be."""
    pairs = zip(results, comparison.truth, strict=True) if comparison.truth else ()
    return all(
        float((result.double() - truth).abs().max()) <= comparison.tolerance * truth.abs().max()
        for result, truth in pairs
    )


def rows_of(feature: str, comparison: Comparison, seconds: float = SECONDS) -> list[Row]:
    """A row for each provider; a wrong result is not timed."""
    rows = {
        name: Row(
            "features",
            {"call": feature, "workload": comparison.gradients, "provider": name},
            {},
            is_right(timed.prepared()(), comparison),
        )
        for name, timed in comparison.providers.items()
    }
    timed = {name: call for name, call in comparison.providers.items() if rows[name].correct}
    samples = interleaved(list(timed.values()), CPU, LEAST, seconds)
    walls = {name: own.walls for name, own in zip(timed, samples, strict=True)}
    for name, own in walls.items():
        rows[name].values = spread("wall_us", own)
        call = timed[name].prepared()
        if name not in FOREIGN:
            # Their memory is unknown to PyTorch.
            rows[name].values["extra_mb"] = timing.extra_bytes(call, CPU) / 2**20
    if others := [name for name in walls if not name.startswith("tritonclip")]:
        best = min(others, key=lambda name: statistics.median(walls[name]))
        ratio = spread("ratio", paired(walls[best], walls["tritonclip"]))
        rows["tritonclip"].values |= {**ratio, "baseline": best}
    return list(rows.values())


def run(names: Sequence[str]) -> Iterator[list[Row]]:
    """Rows of features, a list for each gradient list; of all where none is named."""
    for name in names or FEATURES:
        for comparison in FEATURES[name]():
            yield rows_of(name, comparison)
