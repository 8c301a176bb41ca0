"""`python -m bench speed`: every provider is checked, then all are timed in turn.

By default every workload in float32, small ones and some large ones in other dtypes (`plan`);
options choose others. Gradients are in cache where a workload fits, but for the device time on a
GPU. Only torch gets `--threads`: other frameworks choose theirs. The largest workloads by default
have 1 GB of gradients, of which torch's providers hold three copies, and each other framework up
to two; `llama3_8b_full` is measured only where asked for by name.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench import timing
from bench.accuracy import RULES, Gradients, WrongResultError
from bench.baselines import PROVIDERS, Entry, Provider
from bench.frameworks import OPTIONAL
from bench.results import Row, spread
from bench.timing import Samples, Timed
from bench.workloads import SMALL, WORKLOADS

ALL = (*PROVIDERS, *OPTIONAL)
# Where torch.compile is compared unless asked for elsewhere: it takes 10 to 40 seconds a provider.
COMPILED = ("gpt2_124m", "float32", "norm")
CLIPS = ("norm", "value", "gradient")
SHORT = (*(f"small_{n}" for n in SMALL), "mlp4", "mlp8", "lenet5", "resnet20")
HALVES = ("bfloat16", "float16")
# (workload, dtype): the rules it is measured by when nothing else is asked for.
PLAN: dict[tuple[str, str], tuple[str, ...]] = {
    **{(name, "float32"): CLIPS for name in SHORT},
    ("resnet50", "float32"): CLIPS,
    ("vit_b16", "float32"): CLIPS,
    ("gpt2_124m", "float32"): RULES,
    ("twelve", "float32"): ("norm", "value"),
    ("llama3_8b", "float32"): ("norm", "value"),
    ("moe", "float32"): ("norm", "value"),
    ("lora_r16", "float32"): RULES,
    ("huge_and_small", "float32"): RULES,
    ("tiny_10000", "float32"): CLIPS,
    ("odd", "float32"): CLIPS,
    **{(name, dtype): CLIPS for dtype in HALVES for name in SHORT},
    **{("resnet50", dtype): CLIPS for dtype in HALVES},
    **{("gpt2_124m", dtype): CLIPS for dtype in HALVES},
    **{("twelve", dtype): ("norm", "value") for dtype in HALVES},
    ("gpt2_124m", "mixed"): ("norm",),
    ("llama3_8b", "bfloat16"): ("norm",),
    ("lora_r16", "bfloat16"): ("norm", "value"),
    ("tiny_10000", "bfloat16"): ("norm", "value"),
    ("odd", "float16"): ("norm", "value"),
}
QUICK: dict[tuple[str, str], tuple[str, ...]] = {
    **{(f"small_{n}", "float32"): CLIPS for n in (1, 10, 100)},
    **{(name, "float32"): CLIPS for name in ("mlp4", "lenet5")},
    ("small_10", "bfloat16"): CLIPS,
    ("resnet20", "float32"): RULES,
    ("resnet20", "float16"): CLIPS,
    ("resnet50", "float32"): ("norm", "value"),
    ("gpt2_124m", "bfloat16"): ("norm",),
    ("tiny_10000", "float32"): ("norm", "value"),
}
BUSY: dict[tuple[str, str], tuple[str, ...]] = {
    ("small_10", "float32"): CLIPS,
    ("small_100", "float32"): CLIPS,
    ("twelve", "float32"): ("norm", "value"),
    ("twelve", "bfloat16"): ("norm", "value"),
}
# Left out of a quick run.
NOT_QUICK = ("tritonclip flat", "torch norm only")


@dataclass(frozen=True)
class Task:
    """One workload in one dtype, unclipped and clipped by some rules."""

    name: str
    dtype: str
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Effort:
    """How long to measure, and under which conditions.

    Attributes:
        samples: fewest timed samples of each provider.
        seconds: how long to go on with more of them.
        busy: other processes that keep cores busy meanwhile.
    """

    samples: int = 9
    seconds: float = 0.6
    busy: int = 0


def plan(
    names: Iterable[str], dtypes: Iterable[str], rules: Iterable[str], quick: bool, busy: int
) -> list[Task]:
    """The cases to measure: those of the plan that fit, or, of named workloads, all."""
    names, dtypes, rules = tuple(names), tuple(dtypes), tuple(rules)
    if names:
        wanted = rules or CLIPS
        return [Task(name, dtype, wanted) for name in names for dtype in dtypes or ("float32",)]
    planned = BUSY if busy else QUICK if quick else PLAN
    tasks = [
        Task(name, dtype, tuple(rule for rule in own if rule in (rules or RULES)))
        for (name, dtype), own in planned.items()
        if not dtypes or dtype in dtypes
    ]
    return [task for task in tasks if task.rules]


def providers_of(
    task: Task, rule: str, asked: Sequence[str], compiled: bool, quick: bool
) -> list[Provider]:
    """The providers that were asked for, else all but those that take long to compile."""
    if asked:
        return [one for one in ALL if one.name in ("tritonclip", *asked)]
    compiled |= (task.name, task.dtype, rule) == COMPILED and not quick
    return [
        one
        for one in ALL
        if (compiled or not one.name.endswith("compiled")) and not (quick and one.name in NOT_QUICK)
    ]


def run(
    tasks: Sequence[Task],
    device: torch.device,
    effort: Effort,
    choose: Callable[[Task, str], list[Provider]],
    console: Console,
) -> list[Row]:
    """Rows of all tasks."""
    rows: list[Row] = []
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            console.print(text, markup=False, highlight=False)
        said.add(text)

    with Progress(console=console, transient=True) as progress, timing.busy_cores(effort.busy):
        bar = progress.add_task("", total=sum(2 * len(task.rules) for task in tasks))
        copy = timing.copy_gb_per_s(device)
        for task in tasks:
            progress.update(bar, description=f"{task.name} {task.dtype}: gradients")
            gradients = Gradients(WORKLOADS[task.name](), task.dtype, device)
            gc.collect()
            for rule in task.rules:
                providers = choose(task, rule)
                for why in filter(None, (one.why_absent(gradients) for one in providers)):
                    say(f"left out: {why}")
                for clipped in (False, True):
                    progress.update(bar, description=f"{task.name} {task.dtype}: {rule}")
                    given = (gradients, rule, clipped, providers)
                    rows += measure(*given, effort=effort, copy_gb_per_s=copy, say=say)
                    progress.advance(bar)
    return rows


def measure(
    gradients: Gradients,
    rule: str,
    clipped: bool,
    providers: Sequence[Provider],
    *,
    effort: Effort,
    copy_gb_per_s: float,
    say: Callable[[str], None],
) -> list[Row]:
    """Rows of all providers that serve a rule; a wrong result is said, and not timed."""
    rows: list[Row] = []
    entries: dict[str, Entry] = {}
    # Else the same function on another list would count as compiled again, and be slower to find.
    torch._dynamo.reset()
    serving = [one for one in providers if rule in one.passes and not one.why_absent(gradients)]
    for provider in serving:
        row = _row(gradients, rule, clipped, provider, effort.busy)
        row.values["copy_gb_per_s"] = copy_gb_per_s
        try:
            entries[provider.name], error = checked(provider, gradients, rule, clipped)
        except WrongResultError as wrong:
            say(f"{' '.join(map(str, row.case.values()))}: wrong result, not timed: {wrong}")
            rows.append(replace(row, values={}, correct=False))
            continue
        if error is not None:
            row.values["norm_error"] = error
        rows.append(row)
    with torch._dynamo.config.patch(error_on_recompile=True):
        timed = {
            name: Timed(entry.call, entry.refill if clipped or rule == "step" else None)
            for name, entry in entries.items()
        }
        samples, batch = timing.interleaved(
            list(timed.values()), gradients.device, effort.samples, effort.seconds
        )
        known = dict(zip(timed, samples, strict=True))
        for row in rows:
            if row.correct:
                name = row.case["provider"]
                row.values.update({"batch": batch, "repetitions": len(known[name].walls)})
                row.values.update(_figures(name, known, serving))
                row.values.update(_beside(entries[name], timed[name], known[name], row))
    return rows


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
    norms = entry.norms(output)
    norm_error = gradients.norm_error(rule, norms) if norms else None
    if norm_error is not None and not norm_error <= provider.tolerance:
        raise WrongResultError(f"the norm is off by {norm_error:.2g}")
    given = entry.grads(output)
    most = limit if provider.clips else None
    gradients.check(given, rule, most, provider.tolerance, provider.eps)
    return entry, norm_error


def bytes_moved(gradients: Gradients, rule: str, clipped: bool, provider: Provider) -> int | None:
    """Bytes read and written, by formula; None for a step of an optimizer.

    Args:
        gradients: N bytes.
        rule: what they are clipped by.
        clipped: whether that changes them.
        provider: by what. Its passes x N, or, where it looks first: by norm N, and 2 N more where
            it clips; each by its own norm the same for each; by value N within bounds, else 2 N; on
            a CPU 2 N, as looking costs as much there.
    """
    n, passes = gradients.n_bytes, provider.passes[rule]
    if rule == "step":
        return None
    if passes is not None:
        return passes * n
    if rule == "norm":
        return 3 * n if clipped else n
    if rule == "gradient":
        multipliers = gradients.multipliers(rule, gradients.limit(rule, clipped))
        changed = zip(gradients.fresh, multipliers, strict=True)
        return n + 2 * sum(fresh.nbytes for fresh, multiplier in changed if multiplier < 1)
    return 2 * n if clipped or gradients.device.type == "cpu" else n


def _row(gradients: Gradients, rule: str, clipped: bool, provider: Provider, busy: int) -> Row:
    case: dict[str, Any] = {
        "workload": gradients.workload.name,
        "dtype": gradients.dtype,
        "rule": rule,
        "step": "clipped" if clipped else "unclipped",
        "provider": provider.name,
    }
    if busy:
        case["busy"] = busy
    moved = bytes_moved(gradients, rule, clipped, provider)
    return Row("speed", case, {} if moved is None else {"bytes_moved": moved}, True)


def _figures(
    name: str, known: dict[str, Samples], serving: Sequence[Provider]
) -> dict[str, float | str]:
    """Time, and the paired ratios to the best torch variant and to torch.sum."""
    walls = known[name].walls
    found: dict[str, float | str] = {**spread("wall_us", walls)}
    torchs = [one.name for one in serving if one.baseline and one.name in known]
    if torchs and any(one.name == name and one.clips for one in serving):
        best = min(torchs, key=lambda one: statistics.median(known[one].walls))
        pairs = zip(known[best].walls, walls, strict=True)
        found |= spread("ratio", [theirs / ours for theirs, ours in pairs])
        found["baseline"] = best
    if "torch sum" in known:
        sums = known["torch sum"].walls
        found["sum_us"] = statistics.median(sums)
        pairs = zip(sums, walls, strict=True)
        found["sum_share"] = statistics.median([s / ours for s, ours in pairs])
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
            n, flush = len(samples.walls), timing.Flush(device)
            entry.refill()
            found["launches"] = timing.launches(entry.call, device)
            found["host_us"] = statistics.median(samples.hosts)
            time = found["device_us"] = statistics.median(timing.device_times(timed, flush, n))
            if entry.graphable:
                replay = Timed(timing.captured(timed).replay, timed.prepare)
                found["graph_us"] = statistics.median(timing.device_times(replay, flush, n))
    if time is not None and "bytes_moved" in row.values:
        found["gb_per_s"] = row.values["bytes_moved"] / (time * 1e3)
    return found
