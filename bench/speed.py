"""A case of `pytest bench`: every provider is checked, then all are timed in paired rounds.

A case is one gradient list, one rule, clipped or unclipped. Gradients are in cache where a list
fits, but for the device time on a GPU, and so are code and plans, unless a backward pass comes
before every call. Other frameworks choose their threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bench import frameworks, providers, timing
from bench.accuracy import Gradients, WrongResultError
from bench.providers import Entry, Provider
from bench.results import Row
from bench.timing import Samples, Timed, paired, spread
from tritonclip.backends import choose

IN_PLACE = (*providers.IN_PLACE, *frameworks.IN_PLACE)
OUT_OF_PLACE = (*providers.OUT_OF_PLACE, *frameworks.OUT_OF_PLACE)
BASELINES = [one.name for one in (*IN_PLACE, *OUT_OF_PLACE) if one.baseline]
# Where torch.compile is compared unless asked for, by norm: it takes 10 to 40 seconds a provider on
# the longest.
COMPILED = ("small_1", "mlp8", "resnet50", "gpt2_124m")
COMPILERS = ("tritonclip compiled", "torch compiled")
# Left out of a quick run.
NOT_QUICK = ("tritonclip flat", "tritonclip drop-in", "tritonclip norm only", "torch norm only")


class Effort(NamedTuple):
    """How long to measure a case, and under which conditions."""

    samples: int = 9  # Fewest timed samples of each provider.
    seconds: float = 0.6  # How long to go on with more of them.
    busy: int = 0  # Other processes that keep cores busy meanwhile.
    training: bool = False  # A backward pass makes new gradients before every call.


class Measured(NamedTuple):
    """One provider of a case."""

    row: Row
    walls: Sequence[float] = ()  # Microseconds a call in each round; none where it was not timed.
    fault: str = ""  # How its result differs from float64.


def providers_of(asked: Sequence[str], plan: str, workload: str, dtype: str, rule: str):
    """The providers that clip in place and were asked for; else all that fit the plan.

    In training ours and torch's: others work on arrays that no backward pass makes. Those that take
    long to compile are compared in few cases.
    """
    if asked:
        names = ("tritonclip", *asked)
    elif plan == "training":
        names = ("tritonclip", "tritonclip wrapper", *BASELINES)
    else:
        by_norm = (dtype, rule) == ("float32", "norm")
        compiled = by_norm and workload in COMPILED and plan != "quick"
        left_out = (*(NOT_QUICK if plan == "quick" else ()), *(() if compiled else COMPILERS))
        names = tuple(one.name for one in IN_PLACE if one.name not in left_out)
    return [one for one in IN_PLACE if one.name in names and rule in one.passes]


def measure(
    gradients: Gradients,
    rule: str,
    clipped: bool,
    compared: Sequence[Provider],
    effort: Effort | None,
) -> list[Measured]:
    """All providers of a case, timed only where their results are right, and an effort is given."""
    # Else the same function on another list would count as compiled again, and be slower to find.
    torch._dynamo.reset()
    case: dict[str, Any] = {"workload": gradients.workload.name, "dtype": gradients.dtype}
    case |= {"rule": rule, "step": "clipped" if clipped else "unclipped"}
    given = effort or Effort()
    conditions: dict[str, Any] = {"busy": given.busy} if given.busy else {}
    conditions |= {"after": "backward pass"} if given.training else {}
    faults: dict[str, str] = {}
    rows: dict[str, Row] = {}
    ready: list[tuple[Provider, Entry, Timed]] = []
    for one in compared:
        row = Row("speed", {**case, "provider": one.name, **conditions}, {}, True)
        rows[one.name] = row
        try:
            entry, error = checked(one, gradients, rule, clipped)
        except WrongResultError as wrong:
            row.correct, faults[one.name] = False, str(wrong)
            continue
        known = {"bytes_moved": bytes_moved(gradients, rule, clipped, one), "norm_error": error}
        row.values.update((name, value) for name, value in known.items() if value is not None)
        prepare = entry.refill if clipped or rule == "step" else None
        if given.training:
            prepare = entry.gradients.backward
        ready.append((one, entry, Timed(entry.call, prepare)))
    walls: dict[str, list[float]] = {}
    if effort:
        with torch._dynamo.config.patch(error_on_recompile=True):
            calls = [call for *_, call in ready]
            samples = timing.interleaved(calls, gradients.device, effort.samples, effort.seconds)
            walls = {one.name: found.walls for (one, *_), found in zip(ready, samples, strict=True)}
            for (one, entry, call), found in zip(ready, samples, strict=True):
                row = rows[one.name]
                row.values.update({"batch": found.n_calls, "repetitions": len(found.walls)})
                row.values.update(_figures(one, walls))
                row.values.update(_beside(entry, call, found, row))
                row.values["copy_gb_per_s"] = timing.copy_gb_per_s(gradients.device)
    return [Measured(row, walls.get(n, ()), faults.get(n, "")) for n, row in rows.items()]


def checked(
    provider: Provider, gradients: Gradients, rule: str, clipped: bool
) -> tuple[Entry, float | None]:
    """Gets a provider ready, calls it once, and compares with float64; returns the norm's error.

    Raises:
        WrongResultError: norm or gradients are off.
    """
    limit = gradients.limit(rule, clipped)
    gradients.refill()
    entry = provider.make(gradients, rule, limit)
    output = entry.call()
    grads, norms = entry.result(output)
    norm_error = gradients.norm_error(rule, norms) if norms else None
    if norm_error is not None and not norm_error <= provider.tolerance:
        raise WrongResultError(f"the norm is off by {norm_error:.2g}")
    most = limit if provider.clips else None
    gradients.check(grads, rule, most, provider.tolerance, provider.eps)
    return entry, norm_error


def bytes_moved(gradients: Gradients, rule: str, clipped: bool, provider: Provider) -> int | None:
    """Bytes read and written, by formula, for gradients of N bytes; None for an optimizer's step.

    Passes of the provider x N, or, where it looks first: by norm N, and 2 N more where it clips;
    each by its own norm the same for each; by value N within bounds, else at most 2 N. The torch
    backend clamps without a look: 2 N.
    """
    n, passes = gradients.n_bytes, provider.passes[rule]
    if rule == "step":
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


def _figures(provider: Provider, walls: dict[str, list[float]]) -> dict[str, Any]:
    """Time, and the paired ratios to the best torch variant and to torch.sum."""
    ours = walls[provider.name]
    found: dict[str, Any] = {**spread("wall_us", ours)}
    torchs = [name for name in BASELINES if name in walls]
    if torchs and provider.clips:
        best = min(torchs, key=lambda name: statistics.median(walls[name]))
        found |= {**spread("ratio", paired(walls[best], ours)), "baseline": best}
    if "torch sum" in walls:
        sums = walls["torch sum"]
        found["sum_us"] = statistics.median(sums)
        found["sum_share"] = statistics.median(paired(sums, ours))
    return found


def _beside(entry: Entry, timed: Timed, samples: Samples, row: Row) -> dict[str, float]:
    """The figures that are measured beside the pairs; those of other streams stay empty."""
    device, found = entry.gradients.device, dict[str, float]()
    time = row.values["wall_us"] if device.type == "cpu" else None
    if entry.on_torch_stream:
        # A profiler takes 0.1 s to start: torch's default stands for its variants.
        if not row.case["provider"].endswith("foreach"):
            entry.refill()
            found["extra_mb"] = timing.extra_bytes(entry.call, device) / 2**20
        if device.type == "cuda":
            flush = timing.flush_of(device)
            entry.refill()
            found["launches"] = timing.launches(entry.call, device)
            host = found["host_us"] = statistics.median(samples.hosts)
            time = found["device_us"] = timing.device_us(timed, flush, host)
            if entry.graphable:
                replay = Timed(timing.captured(timed).replay, timed.prepare)
                found["graph_us"] = timing.device_us(replay, flush, host)
    if time is not None and "bytes_moved" in row.values:
        found["gb_per_s"] = row.values["bytes_moved"] / (time * 1e3)
    return found
