"""A case of `test_clip` and `test_functional`: every provider is checked, then all are timed.

A case is one gradient list, one rule, clipped or unclipped. Gradients are in cache where a list
fits, but for the device time on a GPU, and so are code and plans, unless a backward pass comes
before every call. Other frameworks choose their threads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bench import timing
from bench.accuracy import Gradients, WrongResultError
from bench.comparison import AllSamples, Comparison, Effort, ratio
from bench.providers import FOREIGN, IN_PLACE, OUT_OF_PLACE, Entry, Provider
from tritonclip.backends import choose
from tritonclip.samples import Samples, Timed, paired

BASELINES = [one.name for one in (*IN_PLACE, *OUT_OF_PLACE) if one.baseline]


def providers_of(asked: Sequence[str], training: bool) -> list[Provider]:
    """The providers that clip in place and were asked for; else all."""
    # Others work on arrays that no backward pass makes.
    known = [one for one in IN_PLACE if not training or (one.clips and one.name not in FOREIGN)]
    return [one for one in known if not asked or one.name in ("tritonclip", *asked)]


def compare(
    gradients: Gradients,
    rule: str,
    clipped: bool,
    providers: Sequence[Provider],
    effort: Effort,
    conditions: dict[str, Any],
) -> Comparison:
    """All providers of a case, checked; `conditions` are in each row ("after", "busy")."""
    calls, faults, figures = dict[str, Timed](), dict[str, str](), dict[str, dict[str, Any]]()
    entries = dict[str, Entry]()
    for one in providers:
        try:
            entry, error = checked(one, gradients, rule, clipped)
        except WrongResultError as wrong:
            faults[one.name] = str(wrong)
            continue
        prepare = entry.refill if clipped or rule == "step" else None
        if "after" in conditions:
            prepare = gradients.backward
        entries[one.name], calls[one.name] = entry, Timed(entry.call, prepare)
        known = {"bytes": bytes_moved(gradients, rule, clipped, one), "norm_error": error}
        known |= conditions
        figures[one.name] = {name: value for name, value in known.items() if value is not None}
    clipping = {one.name for one in providers if one.clips}

    def figures_of(name: str, samples: AllSamples) -> dict[str, Any]:
        found = dict(figures[name])
        if name in clipping:
            found |= ratio(name, samples, BASELINES)
        if sums := samples.get("torch sum"):
            found["sum_share"] = statistics.median(paired(sums.walls, samples[name].walls))
        time: float | None = statistics.median(samples[name].walls)
        if gradients.device.type == "cuda":
            found |= _on_gpu(name, entries[name], calls[name], samples[name])
            time = found.get("device_us")
        if time is not None and "bytes" in found:
            found["gb_per_s"] = found["bytes"] / (time * 1e3)
        return found | {"copy_gb_per_s": timing.copy_gb_per_s(gradients.device)}

    return Comparison(calls, effort, figures_of, faults, gradients.device)


def checked(
    provider: Provider, gradients: Gradients, rule: str, clipped: bool
) -> tuple[Entry, float | None]:
    """A provider that was called once and is right, and its norm's error; else WrongResultError."""
    limit = gradients.limit(rule, clipped)
    gradients.refill()
    entry = provider.make(gradients, rule, limit)
    grads, norms = entry.result(entry.call())
    if isinstance(norms, Tensor):
        norms = norms.detach().flatten()
    norm_error = None if norms is None else gradients.norm_error(rule, list(map(float, norms)))
    if norm_error is not None and not norm_error <= provider.tolerance:
        raise WrongResultError(f"the norm is off by {norm_error:.2g}")
    most = limit if provider.clips else math.inf
    gradients.check(grads, rule, most, provider.tolerance, provider.eps)
    return entry, norm_error


def bytes_moved(gradients: Gradients, rule: str, clipped: bool, provider: Provider) -> int | None:
    """Bytes read and written, by formula, for gradients of N bytes; None for an optimizer's step.

    Passes of the provider x N, or, where it looks first: by norm N, and 2 N more where it clips;
    each by its own norm the same for each; by value N within bounds, else at most 2 N. The torch
    backend clamps without a look: 2 N.
    """
    n, passes = gradients.n_bytes, provider.passes[rule]
    if rule in ("step", "unit"):
        return None
    if passes is not None:
        return passes * n
    if rule in ("norm", "largest"):
        return 3 * n if clipped else n
    if rule == "gradient":
        multipliers = gradients.multipliers(rule, gradients.limit(rule, clipped))
        changed = zip(gradients.fresh, multipliers, strict=True)
        return n + 2 * sum(fresh.nbytes for fresh, multiplier in changed if multiplier < 1)
    looks = choose.backend_name(gradients.device, gradients.fresh[0].dtype) != "torch"
    return n if looks and not clipped else 2 * n


def _on_gpu(name: str, entry: Entry, timed: Timed, samples: Samples) -> dict[str, Any]:
    """Launches and times; none on another stream than torch's."""
    if name in FOREIGN:
        return {}
    device, host = entry.gradients.device, statistics.median(samples.hosts)
    entry.refill()
    found = {"launches": timing.launches(entry.call, device), "host_us": host}
    replay = Timed(timing.captured(timed).replay, timed.prepare)
    for figure, one in (("device_us", timed), ("graph_us", replay)):
        found[figure] = statistics.median(timing.device_us(one, device, host))
    return found
