"""Calls that do the same, timed in turn, and handed over to pytest-benchmark one by one.

A test of pytest-benchmark times one call. Ratios of times are honest on a busy machine only where
the calls take turns (`bench.samples`). So the first test of a case times all calls of the
case, and each test hands over the samples of one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from bench.samples import Samples, Timed, interleaved, paired, spread

CPU = torch.device("cpu")
# Of all providers of a case.
AllSamples = Mapping[str, Samples]


class Effort(NamedTuple):
    """How long to measure a case."""

    samples: int = 9  # Fewest timed samples of each call.
    seconds: float = 0.6  # How long to go on with more of them.


def hand_over(benchmark: Any, samples: Samples | None) -> None:
    """Gives samples to pytest-benchmark in the way in which its `pedantic` stores its own.

    It has no public way for samples that were taken elsewhere. None of them where it is disabled.
    """
    # Else it warns that nothing was timed.
    benchmark._mode = "paired"
    if samples is None or not benchmark.enabled:
        return
    case = (str(part) for name, part in benchmark.params.items() if name != "provider")
    benchmark.group = " ".join((benchmark.name.split("[")[0], *case))
    stats = benchmark._make_stats(samples.n_calls)
    for wall in samples.walls:
        # Seconds of a whole sample, which it divides by the number of calls.
        stats.update(wall * samples.n_calls / 1e6)


@dataclass
class Comparison:
    """The calls of a case, by provider, and how they are timed."""

    calls: Mapping[str, Timed]
    effort: Effort
    # Figures of a provider that are no times, from its name and the samples of all.
    figures: Callable[[str, AllSamples], dict[str, Any]] = lambda name, samples: {}
    # How results differ from float64, of those that are not timed.
    faults: Mapping[str, str] = field(default_factory=dict)
    device: torch.device = CPU
    samples: dict[str, Samples] = field(default_factory=dict)

    def hand_over(self, benchmark: Any, provider: str) -> None:
        """Hands over samples of a provider; fails or skips where its result was wrong."""
        if fault := self.faults.get(provider):
            if provider.startswith("tritonclip"):
                pytest.fail(f"{provider}: {fault}")
            pytest.skip(f"wrong result, not timed: {provider}: {fault}")
        if benchmark.enabled:
            self.take_turns()
            benchmark.extra_info |= self.figures(provider, self.samples)
        hand_over(benchmark, self.samples.get(provider))

    def take_turns(self) -> AllSamples:
        """Times all calls whose results are right, once."""
        ready = {name: call for name, call in self.calls.items() if name not in self.faults}
        if ready and not self.samples:
            calls = list(ready.values())
            found = interleaved(calls, self.device, *self.effort)
            self.samples = dict(zip(ready, found, strict=True))
        return self.samples


def ratio(provider: str, samples: AllSamples, baselines: Iterable[str]) -> dict[str, Any]:
    """The best baseline's time over that of a provider, paired, and which baseline it is."""
    medians = {n: statistics.median(samples[n].walls) for n in baselines if n in samples}
    if not medians:
        return {}
    best = min(medians, key=medians.__getitem__)
    ratios = paired(samples[best].walls, samples[provider].walls)
    return {**spread("ratio", ratios), "baseline": best, "baseline_us": medians[best]}


def beside_torch(provider: str, samples: AllSamples) -> dict[str, float]:
    """Host time of torch on the same tensors, and the share of it that a call takes, paired."""
    share = statistics.median(paired(samples[provider].walls, samples["torch"].walls))
    return {"torch_us": statistics.median(samples["torch"].walls), "share": share}
