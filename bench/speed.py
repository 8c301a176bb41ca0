"""A case of `pytest bench`: every provider is checked, then all are timed in paired rounds.

A case is one gradient list, one rule, clipped or unclipped. Gradients are in cache where a list
fits, but for the device time on a GPU, and so are code and plans, unless a backward pass comes
before every call. Other frameworks choose their threads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import timing
from bench.accuracy import Gradients, WrongResultError
from bench.providers import FOREIGN, IN_PLACE, OUT_OF_PLACE, UNCAPTURED, Entry, Provider
from bench.results import Row
from tritonclip.backends import choose
from tritonclip.samples import Samples, Timed, interleaved, paired, spread

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


@dataclass
class Measured:
    """One provider of a case, and its row."""

    provider: Provider
    row: Row
    fault: str = ""  # How its result differs from float64.
    entry: Any = None
    timed: Any = None
    walls: Sequence[float] = ()  # Microseconds a call in each round; none where it was not timed.


def providers_of(
    asked: Sequence[str], plan: str, workload: str, dtype: str, rule: str
) -> list[Provider]:
    """The providers that clip in place and were asked for; else all that fit the plan."""
    names = {"tritonclip", *asked}
    # Others work on arrays that no backward pass makes.
    if plan == "training" and not asked:
        names |= {"tritonclip wrapper", *BASELINES}
    elif not asked:
        by_norm = (dtype, rule) == ("float32", "norm")
        compiled = by_norm and workload in COMPILED and plan != "quick"
        left_out = (*(NOT_QUICK if plan == "quick" else ()), *(() if compiled else COMPILERS))
        names |= {one.name for one in IN_PLACE if one.name not in left_out}
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
    is_training = effort is not None and effort.training
    conditions: dict[str, Any] = {"busy": effort.busy} if effort and effort.busy else {}
    conditions |= {"after": "backward pass"} if is_training else {}
    result: list[Measured] = []
    for one in compared:
        row = Row("speed", {**case, "provider": one.name, **conditions}, {}, True)
        try:
            entry, error = checked(one, gradients, rule, clipped)
        except WrongResultError as wrong:
            row.correct = False
            result.append(Measured(one, row, str(wrong)))
            continue
        known = {"bytes_moved": bytes_moved(gradients, rule, clipped, one), "norm_error": error}
        row.values = {name: value for name, value in known.items() if value is not None}
        prepare = entry.refill if clipped or rule == "step" else None
        timed = Timed(entry.call, entry.gradients.backward if is_training else prepare)
        result.append(Measured(one, row, "", entry, timed))
    ready = [found for found in result if not found.fault]
    if effort and ready:
        calls = [found.timed for found in ready]
        with torch._dynamo.config.patch(error_on_recompile=True):
            samples = interleaved(calls, gradients.device, effort.samples, effort.seconds)
        walls = {found.provider.name: own.walls for found, own in zip(ready, samples, strict=True)}
        for found, own in zip(ready, samples, strict=True):
            found.walls, values = own.walls, found.row.values
            values |= {"batch": own.n_calls, "repetitions": len(own.walls)}
            values |= _figures(found.provider, walls)
            values |= _beside(found, own)
            values["copy_gb_per_s"] = timing.copy_gb_per_s(gradients.device)
    return result


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


def _figures(provider: Provider, walls: Mapping[str, list[float]]) -> dict[str, Any]:
    """Time, and the paired ratios to the best torch variant and to torch.sum."""
    ours = walls[provider.name]
    found: dict[str, Any] = {**spread("wall_us", ours)}
    torchs = [name for name in BASELINES if name in walls]
    if torchs and provider.clips:
        best = min(torchs, key=lambda name: statistics.median(walls[name]))
        found |= {**spread("ratio", paired(walls[best], ours)), "baseline": best}
    if sums := walls.get("torch sum"):
        found["sum_us"] = statistics.median(sums)
        found["sum_share"] = statistics.median(paired(sums, ours))
    return found


def _beside(measured: Measured, samples: Samples) -> dict[str, float]:
    """The figures that are measured beside the pairs; those of other streams stay empty."""
    entry, timed, values = measured.entry, measured.timed, measured.row.values
    device, found = entry.gradients.device, dict[str, float]()
    time = values["wall_us"] if device.type == "cpu" else None
    if measured.provider.name not in FOREIGN:
        # A profiler takes 0.1 s to start: torch's default stands for its variants.
        if not measured.provider.name.endswith("foreach"):
            entry.refill()
            found["extra_mb"] = timing.extra_bytes(entry.call, device) / 2**20
        if device.type == "cuda":
            entry.refill()
            found["launches"] = timing.launches(entry.call, device)
            host = found["host_us"] = statistics.median(samples.hosts)
            time = found["device_us"] = timing.device_us(timed, device, host)
            if measured.provider.name not in UNCAPTURED:
                replay = Timed(timing.captured(timed).replay, timed.prepare)
                found["graph_us"] = timing.device_us(replay, device, host)
    if time is not None and "bytes_moved" in values:
        found["gb_per_s"] = values["bytes_moved"] / (time * 1e3)
    return found
