"""Calls that do the same, timed in turn, and handed over to pytest-benchmark one by one.

A test of pytest-benchmark times one call, but ratios of times can be trusted on a busy machine
only if the calls take turns (`bench.samples`). Therefore the first test of a case times all its
calls, and each test hands over the samples of one call.
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
# The samples of all providers of a case, by name.
AllSamples = Mapping[str, Samples]


class Effort(NamedTuple):
    """How long to measure a case."""

    samples: int = 9  # Fewest timed samples of each call.
    seconds: float = 0.6  # How long to take more samples than these.


def hand_over(benchmark: Any, samples: Samples | None) -> None:
    """Stores samples in pytest-benchmark as its `pedantic` does; `samples` may be None.

    pytest-benchmark has no public way for samples that were taken elsewhere.
    """
    # Otherwise it warns that nothing was timed.
    benchmark._mode = "paired"
    if samples is None or not benchmark.enabled:
        return
    case = (str(part) for name, part in benchmark.params.items() if name != "provider")
    benchmark.group = " ".join((benchmark.name.split("[")[0], *case))
    stats = benchmark._make_stats(samples.n_calls)
    for wall in samples.walls:
        # The plugin divides the seconds of a whole sample by the number of calls.
        stats.update(wall * samples.n_calls / 1e6)


@dataclass
class Comparison:
    """The calls of a case, by provider, and how they are timed."""

    calls: Mapping[str, Timed]
    effort: Effort
    # Further figures of a provider, from its name and the samples of all providers.
    figures: Callable[[str, AllSamples], dict[str, Any]] = lambda name, samples: {}
    # How wrong results differ from float64, by provider; these are not timed.
    faults: Mapping[str, str] = field(default_factory=dict)
    device: torch.device = CPU
    samples: dict[str, Samples] = field(default_factory=dict)

    def hand_over(self, benchmark: Any, provider: str) -> None:
        """Hands over a provider's samples; if its result was wrong, fails for ours, else skips."""
        if fault := self.faults.get(provider):
            if provider.startswith("tritonclip"):
                pytest.fail(f"{provider}: {fault}")
            pytest.skip(f"wrong result, not timed: {provider}: {fault}")
        if benchmark.enabled:
            self.take_turns()
            benchmark.extra_info |= self.figures(provider, self.samples)
        hand_over(benchmark, self.samples.get(provider))

    def take_turns(self) -> AllSamples:
        """Times all calls whose results are right, when it is first called."""
        ready = {name: call for name, call in self.calls.items() if name not in self.faults}
        if ready and not self.samples:
            calls = list(ready.values())
            found = interleaved(calls, self.device, *self.effort)
            self.samples = dict(zip(ready, found, strict=True))
        return self.samples


def ratio(provider: str, samples: AllSamples, baselines: Iterable[str]) -> dict[str, Any]:
    """The time of the best baseline over a provider's, paired, and the name of the baseline."""
    medians = {n: statistics.median(samples[n].walls) for n in baselines if n in samples}
    if not medians:
        return {}
    best = min(medians, key=medians.__getitem__)
    ratios = paired(samples[best].walls, samples[provider].walls)
    return {**spread("ratio", ratios), "baseline": best, "baseline_us": medians[best]}


def beside_torch(provider: str, samples: AllSamples) -> dict[str, float]:
    """Torch's time on the same tensors, and a provider's time as a share of it, paired."""
    share = statistics.median(paired(samples[provider].walls, samples["torch"].walls))
    return {"torch_us": statistics.median(samples["torch"].walls), "share": share}
