"""The suite: `python -m bench.suite` measures whatever is there and prints a table.

By default every list in float32, some in other dtypes (`PLAN`); options choose others. Rows go to
bench/results/ with where they come from. Gradients are in cache where a list fits, but for the
device time on a GPU. Only torch gets `--threads`: other frameworks choose theirs. The largest lists
by default have 1 GB of gradients, of which torch's rivals hold three copies, and each other
framework up to two; `llama3_8b_full` is measured only where asked for by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import clocks, rows
from bench.foreign import OPTIONAL
from bench.gradients import DTYPES, RULES, Gradients
from bench.lists import LISTS
from bench.measure import measure, why_absent
from bench.rivals import RIVALS, Rival
from bench.rows import Row

ALL = (*RIVALS, *OPTIONAL)
# Interquartile range over median beyond which a time is marked as noisy.
NOISY = 0.15
# Where torch.compile is compared unless asked for elsewhere: it takes 10 to 40 seconds a rival.
COMPILED = ("gpt2_124m", "float32", "norm")
# (list, dtype): the rules it is measured by when nothing else is asked for.
PLAN: dict[tuple[str, str], tuple[str, ...]] = {
    ("resnet50", "float32"): RULES,
    ("vit_b16", "float32"): RULES,
    ("gpt2_124m", "float32"): RULES,
    ("gpt2_124m", "bfloat16"): RULES,
    ("gpt2_124m", "float16"): ("norm", "value"),
    ("gpt2_124m", "mixed"): ("norm",),
    ("llama3_8b", "float32"): ("norm", "value"),
    ("llama3_8b", "bfloat16"): ("norm",),
    ("moe", "float32"): ("norm", "value"),
    ("lora_r16", "float32"): RULES,
    ("lora_r16", "bfloat16"): ("norm", "value"),
    ("huge_and_small", "float32"): RULES,
    ("tiny_10000", "float32"): RULES,
    ("tiny_10000", "bfloat16"): ("norm", "value"),
    ("odd", "float32"): RULES,
    ("odd", "float16"): ("norm", "value"),
}
QUICK: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpt2_124m", "float32"): ("norm", "value"),
    ("gpt2_124m", "bfloat16"): ("norm",),
    ("tiny_10000", "float32"): ("norm", "value"),
}
# Left out of a quick run: by default torch uses foreach where it can, and on a CPU it can.
NOT_QUICK = ("torch foreach",)


@dataclass(frozen=True)
class Task:
    """One list in one dtype, unclipped and clipped by some rules."""

    name: str
    dtype: str
    rules: tuple[str, ...]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.suite", description=__doc__)
    names = [rival.name for rival in ALL]
    parser.add_argument("--quick", action="store_true", help="some rows, in under two minutes")
    parser.add_argument("--lists", nargs="+", choices=LISTS, help="these, in every dtype given")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="these")
    parser.add_argument("--rules", nargs="+", choices=RULES, help="these")
    parser.add_argument("--rivals", nargs="+", choices=names, help="these beside tritonclip")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile, too")
    parser.add_argument("--device", default="auto", help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--repetitions", type=int, help="fewest timed calls (15; quick: 7)")
    parser.add_argument("--out", type=Path, help="where to write rows (bench/results/DEVICE.json)")
    options = parser.parse_args(argv)
    options.repetitions = options.repetitions or (7 if options.quick else 15)
    if options.repetitions < 2:
        parser.error(f"--repetitions must be 2 or more, got {options.repetitions}")
    if options.threads < 1:
        parser.error(f"--threads must be 1 or more, got {options.threads}")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


def tasks(options: argparse.Namespace) -> list[Task]:
    """What to measure: the plan, or what was asked for, whatever the plan."""
    plan = QUICK if options.quick else PLAN
    if options.lists:
        dtypes = options.dtypes or ["float32"]
        return [
            Task(name, dtype, tuple(options.rules or RULES))
            for name in options.lists
            for dtype in dtypes
        ]
    dtypes, wanted = options.dtypes or DTYPES, options.rules or RULES
    found = [
        Task(name, dtype, tuple(rule for rule in rules if rule in wanted))
        for (name, dtype), rules in plan.items()
        if dtype in dtypes
    ]
    return [task for task in found if task.rules]


def rivals_of(task: Task, rule: str, options: argparse.Namespace) -> list[Rival]:
    """What is compared: what was asked for, else all but what takes long to compile."""
    if options.rivals:
        return [rival for rival in ALL if rival.name in ("tritonclip", *options.rivals)]
    planned = (task.name, task.dtype, rule) == COMPILED and not options.quick
    left_out = NOT_QUICK if options.quick else ()
    if not (options.compiled or planned):
        left_out = (*left_out, *(rival.name for rival in RIVALS if rival.name.endswith("compiled")))
    return [rival for rival in ALL if rival.name not in left_out]


def run(options: argparse.Namespace, console: Console) -> list[Row]:
    """Measures all tasks."""
    device = torch.device(options.device)
    planned = tasks(options)
    found: list[Row] = []
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            console.print(text, markup=False, highlight=False)
        said.add(text)

    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=sum(2 * len(task.rules) for task in planned))
        for task in planned:
            progress.update(bar, description=f"{task.name} {task.dtype}: gradients")
            gradients = Gradients(LISTS[task.name](), task.dtype, device)
            copy_gb_per_s = clocks.copy_gb_per_s(device)
            for rule in task.rules:
                rivals = rivals_of(task, rule, options)
                for rival in rivals:
                    why = why_absent(rival, gradients)
                    if why is not None:
                        say(f"left out: {rival.name}: {why}")
                for clipped in (False, True):
                    step = "clipped" if clipped else "unclipped"
                    progress.update(bar, description=f"{task.name} {task.dtype}: {rule} {step}")
                    found += measure(
                        gradients,
                        rule,
                        clipped,
                        rivals,
                        repetitions=options.repetitions,
                        seconds=0.5 if options.quick else 2.0,
                        copy_gb_per_s=copy_gb_per_s,
                        say=say,
                    )
                    progress.advance(bar)
    return found


def table(found: Sequence[Row]) -> Table:
    """The rows for people; GPU columns only where something was measured."""
    result = Table(caption="ratio: the best torch variant's wall time over this one's, paired")
    optional = ("host_us", "device_us", "graph_us", "launches")
    shown = [name for name in optional if any(getattr(row, name) is not None for row in found)]
    result.add_column("list, dtype, rule, step", no_wrap=True)
    result.add_column("rival", no_wrap=True)
    headings = ["wall us", *(name.replace("_us", " us") for name in shown)]
    for name in (*headings, "ratio", "quartiles", "GB/s", "copy", "extra MB", "norm error"):
        result.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(found):
        case = f"{row.list} {row.dtype} {row.rule} {'clipped' if row.clipped else 'unclipped'}"
        before = found[i - 1] if i > 0 else None
        same = before is not None and key(before) == key(row)
        if before is not None and not same:
            result.add_section()
        result.add_row(
            "" if same else case,
            row.rival,
            *cells(row, shown),
        )
    return result


def key(row: Row) -> tuple[str, str, str, bool]:
    """What rows of one comparison have in common."""
    return row.list, row.dtype, row.rule, row.clipped


def cells(row: Row, shown: Sequence[str]) -> list[str]:
    """The numbers of a row as text; empty where nothing was measured."""
    if not row.correct:
        return ["wrong", *[""] * (len(shown) + 6)]

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    extra = None if row.extra_bytes is None else row.extra_bytes / 2**20
    spread = "" if row.ratio is None else f"{row.ratio_lo:.2f} to {row.ratio_hi:.2f}"
    return [
        text(row.wall_us, ",.0f") + (" ~" if is_noisy(row) else ""),
        *(text(getattr(row, name), ",.0f") for name in shown),
        text(row.ratio, ".2f"),
        spread,
        text(row.gb_per_s, ".1f"),
        text(row.copy_gb_per_s, ".1f"),
        text(extra, ".1f"),
        text(row.norm_error, ".0e"),
    ]


def is_noisy(row: Row) -> bool:
    """Whether the quartiles of the wall time lie far apart."""
    if row.wall_us is None or row.wall_lo_us is None or row.wall_hi_us is None:
        return False
    return (row.wall_hi_us - row.wall_lo_us) / row.wall_us > NOISY


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes rows, prints the table; 1 where a result of tritonclip was wrong."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    console = Console(width=None if sys.stdout.isatty() else 160)
    found = run(options, console)
    out = options.out or rows.RESULTS / f"{'quick-' if options.quick else ''}{device.type}.json"
    rows.write(out, rows.provenance(device), found)
    console.print(table(found))
    console.print(f"{len(found)} rows in {out}; ~ marks quartiles more than 15% apart")
    wrong = [row for row in found if row.rival.startswith("tritonclip") and not row.correct]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
