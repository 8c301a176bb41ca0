"""A case of `test_clip` and `test_functional`: every provider is checked, then all are timed.

A case is one gradient list and one rule, clipped or unclipped. Gradients that fit are in cache,
except for the device time on a GPU, and so are code and plans, unless a backward pass comes before
every call. Other frameworks choose their number of threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.accuracy import Gradients, WrongResultError
from bench.comparison import AllSamples, Comparison, Effort, ratio
from bench.providers import BASELINES, Entry, Provider
from bench.samples import Timed, paired
from bench.workloads import CLIPS
from helpers.graphs import captured

# Lists on a CPU with more bytes are compared with torch.sum over as many: the time to read them.
SUMMED = 2**23


def compare(
    gradients: Gradients,
    rule: str,
    clipped: bool,
    providers: Sequence[Provider],
    effort: Effort,
    conditions: dict[str, Any],
) -> Comparison:
    """Checks all providers of a case; each row has the `conditions` ("after", "busy")."""
    entries, faults, calls = dict[str, Entry](), dict[str, str](), dict[str, Timed]()
    device, in_training = gradients.device, "after" in conditions
    for one in providers:
        try:
            entry = entries[one.name] = checked(one, gradients, rule, clipped)
        except WrongResultError as wrong:
            faults[one.name] = str(wrong)
            continue
        prepare = entry.refill if clipped or rule == "step" else None
        calls[one.name] = Timed(entry.call, gradients.backward if in_training else prepare)
    if rule in CLIPS and gradients.n_bytes > SUMMED and device.type == "cpu" and not in_training:
        as_float32 = torch.ones(gradients.n_bytes // 4)
        calls["torch sum"] = Timed(lambda: torch.sum(as_float32))

    def figures_of(name: str, samples: AllSamples) -> dict[str, Any]:
        found = conditions | ratio(name, samples, BASELINES)
        if sums := samples.get("torch sum"):
            found["sum_share"] = statistics.median(paired(sums.walls, samples[name].walls))
        if device.type == "cuda":
            entries[name].refill()
            host = found["host_us"] = statistics.median(samples[name].hosts)
            found["launches"] = timing.launches(calls[name].call, device)
            replay = calls[name]._replace(call=captured(calls[name].call)[0].replay)
            for figure, timed in (("device_us", calls[name]), ("graph_us", replay)):
                found[figure] = statistics.median(timing.device_us(timed, device, host))
        return found

    return Comparison(calls, effort, figures_of, faults, device)


def checked(provider: Provider, gradients: Gradients, rule: str, clipped: bool) -> Entry:
    """Calls a provider once, and raises WrongResultError if its result is wrong."""
    limit = gradients.limit(rule, clipped)
    gradients.refill()
    if rule == "unit":
        gradients.weigh()
    entry = provider.make(gradients, rule, limit)
    grads, norms = entry.result(entry.call())
    if isinstance(norms, Tensor):
        norms = norms.detach().flatten()
    if norms is not None:
        error = gradients.norm_error(rule, list(map(float, norms)))
        if not error <= provider.tolerance:
            raise WrongResultError(f"the norm is off by {error:.2g}")
    gradients.check(grads, rule, limit, provider.tolerance, provider.eps)
    return entry
