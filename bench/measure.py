"""One gradient list under one rule: every rival is checked, then all are timed in turn.

Repetitions are paired: each goes through all rivals, in an order of its own, so that what slows
the machine down for a while slows all of them. What gives a wrong result is not timed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from bench import clocks
from bench.gradients import Gradients, WrongResultError
from bench.rivals import MOST_COMPILED, Entry, Rival
from bench.rows import Row, device_name
from tritonclip.torch_backend import ONE_PASS

Say = Callable[[str], None]
MOST_REPETITIONS = 300


@dataclass
class Contender:
    """A rival with what was found out about it.

    Attributes:
        rival: what clips.
        entry: ready to be called.
        norm_error: of the norm it returned; None where it returned none.
        walls: microseconds, one a repetition.
        hosts: the same until its call returned.
    """

    rival: Rival
    entry: Entry
    norm_error: float | None
    walls: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)


def why_absent(rival: Rival, gradients: Gradients) -> str | None:
    """Why a rival is not compared on these gradients; None where it is."""
    n = len(gradients.fresh)
    if rival.compiles and n > MOST_COMPILED:
        return f"compiling a list of {n} takes minutes"
    return rival.absent(gradients.device, gradients.dtype)


def checked(rival: Rival, gradients: Gradients, rule: str, clipped: bool) -> Contender:
    """Gets a rival ready, calls it once, and compares the result with float64.

    Raises:
        WrongResultError: norm or gradients are off.
    """
    limit = gradients.limit(rule, clipped)
    gradients.refill()
    entry = rival.make(gradients, rule, limit)
    output = entry.call()
    norms = entry.norms(output)
    norm_error = gradients.norm_error(rule, norms) if norms else None
    if norm_error is not None and not norm_error <= rival.tolerance:
        raise WrongResultError(f"the norm is off by {norm_error:.2g}")
    given = entry.grads(output)
    gradients.check(given, rule, limit if rival.clips else None, rival.tolerance)
    return Contender(rival, entry, norm_error)


def measure(
    gradients: Gradients,
    rule: str,
    clipped: bool,
    rivals: Sequence[Rival],
    *,
    repetitions: int,
    seconds: float,
    copy_gb_per_s: float,
    say: Say,
) -> list[Row]:
    """Rows of all rivals that serve a rule.

    Args:
        gradients: whose memory torch's rivals share.
        rule: "norm", "value" or "gradient".
        clipped: whether the limit is one that changes gradients.
        rivals: what to compare.
        repetitions: fewest timed calls of each.
        seconds: how long to go on with more of them, up to 300.
        copy_gb_per_s: for the rows.
        say: takes what has to be said: who is absent, and whose result is wrong.
    """
    contenders, rows = [], []
    # Else the same function on another list would count as compiled again, and be slower to find.
    torch._dynamo.reset()
    for rival in rivals:
        if rule not in rival.passes or why_absent(rival, gradients) is not None:
            continue
        row = _row(gradients, rule, clipped, rival, copy_gb_per_s)
        try:
            contenders.append(checked(rival, gradients, rule, clipped))
        except WrongResultError as error:
            say(f"{_words(row)}: wrong result, not timed: {error}")
        rows.append(row)
    with torch._dynamo.config.patch(error_on_recompile=True):
        _time_in_turn(contenders, clipped, gradients.device, repetitions, seconds)
        known = {c.rival.name: c for c in contenders}
        best = _best_torch(contenders)
        return [
            _filled(row, known[row.rival], best, clipped, gradients) if row.rival in known else row
            for row in rows
        ]


def bytes_moved(gradients: Gradients, rule: str, clipped: bool, rival: Rival) -> int:
    """Bytes read and written, by formula.

    Args:
        gradients: N bytes.
        rule: what they are clipped by.
        clipped: whether that changes them.
        rival: by what. Its passes x N, or, where it looks first: by norm N, and 2 N more where it
            clips; each by its own norm the same for each; by value N within bounds, else 2 N; on a
            CPU 2 N, but of gradients of fewer than 4,096 elements, which are looked at first, N
            within bounds, else up to 5 N.
    """
    n, passes = gradients.n_bytes, rival.passes[rule]
    if passes is not None:
        return passes * n
    if rule == "norm":
        return 3 * n if clipped else n
    if rule == "gradient":
        multipliers = gradients.multipliers(rule, gradients.limit(rule, clipped))
        changed = zip(gradients.fresh, multipliers, strict=True)
        return n + 2 * sum(fresh.nbytes for fresh, multiplier in changed if multiplier < 1)
    if gradients.device.type != "cpu":
        return 2 * n if clipped else n
    if rival.flat:
        return 2 * n
    small = 5 if clipped else 1
    return sum((small if f.numel() < ONE_PASS else 2) * f.nbytes for f in gradients.fresh)


def _row(gradients: Gradients, rule: str, clipped: bool, rival: Rival, copy_gb_per_s: float) -> Row:
    return Row(
        list=gradients.list.name,
        n_tensors=len(gradients.fresh),
        n_elements=gradients.list.n_elements,
        gradient_bytes=gradients.n_bytes,
        dtype=gradients.dtype,
        rule=rule,
        clipped=clipped,
        rival=rival.name,
        device=device_name(gradients.device),
        bytes_moved=bytes_moved(gradients, rule, clipped, rival),
        copy_gb_per_s=copy_gb_per_s,
    )


def _words(row: Row) -> str:
    step = "clipped" if row.clipped else "unclipped"
    return f"{row.list} {row.dtype} {row.rule} {step}, {row.rival}"


def _time_in_turn(
    contenders: list[Contender],
    clipped: bool,
    device: torch.device,
    repetitions: int,
    seconds: float,
) -> None:
    """Two rounds to warm up, the second of which says how many follow."""
    shuffle = random.Random(0)
    with clocks.quiet():
        _round(contenders, clipped, device)
        start = perf_counter()
        _round(contenders, clipped, device)
        fitting = int(seconds / (perf_counter() - start))
        for contender in contenders:
            contender.walls.clear()
            contender.hosts.clear()
        for _ in range(max(repetitions, min(fitting, MOST_REPETITIONS))):
            _round(shuffle.sample(contenders, len(contenders)), clipped, device)


def _round(contenders: list[Contender], clipped: bool, device: torch.device) -> None:
    for contender in contenders:
        if clipped:
            contender.entry.refill()
        host, wall = clocks.host_and_wall(contender.entry.call, device)
        contender.hosts.append(host)
        contender.walls.append(wall)


def _best_torch(contenders: list[Contender]) -> Contender | None:
    """The fastest of torch's ways to clip, by median."""
    torchs = [c for c in contenders if c.rival.baseline]
    return min(torchs, key=lambda c: statistics.median(c.walls), default=None)


def _filled(
    row: Row, contender: Contender, best: Contender | None, clipped: bool, gradients: Gradients
) -> Row:
    """A row with everything that was measured, and is measured now beside the pairs."""
    entry, device = contender.entry, gradients.device
    lower, middle, upper = statistics.quantiles(contender.walls, n=4)
    row = replace(
        row,
        repetitions=len(contender.walls),
        wall_us=middle,
        wall_lo_us=lower,
        wall_hi_us=upper,
        norm_error=contender.norm_error,
        correct=True,
    )
    if best is not None:
        pairs = zip(best.walls, contender.walls, strict=True)
        lower, ratio, upper = statistics.quantiles([t / ours for t, ours in pairs], n=4)
        row = replace(row, ratio=ratio, ratio_lo=lower, ratio_hi=upper)
    if entry.on_torch_stream:
        entry.refill()
        row = replace(row, extra_bytes=clocks.extra_bytes(entry.call, device))
    if device.type == "cuda":
        row = _on_gpu(row, contender, clipped, device)
    time = row.wall_us if device.type == "cpu" else row.device_us
    if time is None or row.bytes_moved is None:
        return row
    return replace(row, gb_per_s=row.bytes_moved / (time * 1e3))


def _on_gpu(row: Row, contender: Contender, clipped: bool, device: torch.device) -> Row:
    """The columns that only a GPU has; those of other frameworks' streams stay empty."""
    entry = contender.entry
    if not entry.on_torch_stream:
        return row
    refill = entry.refill if clipped else None
    flush = clocks.Flush(device)
    entry.refill()
    row = replace(
        row,
        host_us=statistics.median(contender.hosts),
        launches=clocks.launches(entry.call, device),
        device_us=statistics.median(
            clocks.device_times(entry.call, refill, flush, len(contender.walls))
        ),
    )
    if not entry.graphable:
        return row
    graph = clocks.captured(entry.call, refill)
    times = clocks.device_times(graph.replay, refill, flush, len(contender.walls))
    return replace(row, graph_us=statistics.median(times))
