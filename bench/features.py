"""`python -m bench features`: features beside what a user would write without them, on the CPU.

A feature is a function that yields comparisons; FEATURES names it. Results are compared with
float64 first, then all providers are timed in turn, as in `pytest bench`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import tritonclip
from bench import timing
from bench.accuracy import Gradients
from bench.results import Row
from bench.timing import Timed, paired, spread
from bench.workloads import WORKLOADS

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
            return [torch.tensor(list(tritonclip.norms_by_name(named).values()))]

        def loop(named=named) -> list[Tensor]:
            norms = {name: p.grad.norm().item() for name, p in named}
            return [torch.tensor(list(norms.values()))]

        def foreach(named=named) -> list[Tensor]:
            norms = torch.stack(torch._foreach_norm([p.grad for _, p in named])).tolist()
            return [torch.tensor(list(dict(zip(dict(named), norms, strict=True)).values()))]

        providers = {"tritonclip": Timed(ours), "loop": Timed(loop), "foreach": Timed(foreach)}
        truth = [torch.tensor(gradients.norms, dtype=torch.float64)]
        yield Comparison(WORKLOADS[workload].title, providers, truth, 1e-2)


FEATURES: dict[str, Callable[[], Iterator[Comparison]]] = {"norms_by_name": norms_by_name}


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
    samples = timing.interleaved(list(timed.values()), CPU, LEAST, seconds)
    walls = {name: own.walls for name, own in zip(timed, samples, strict=True)}
    for name, own in walls.items():
        rows[name].values = spread("wall_us", own)
        call = timed[name].prepared()
        rows[name].values["extra_mb"] = timing.extra_bytes(call, CPU) / 2**20
    if others := [name for name in walls if name != "tritonclip"]:
        best = min(others, key=lambda name: statistics.median(walls[name]))
        ratio = spread("ratio", paired(walls[best], walls["tritonclip"]))
        rows["tritonclip"].values |= {**ratio, "baseline": best}
    return list(rows.values())


def run(names: Sequence[str]) -> Iterator[list[Row]]:
    """Rows of features, a list for each gradient list; of all where none is named."""
    for name in names or FEATURES:
        for comparison in FEATURES[name]():
            yield rows_of(name, comparison)
