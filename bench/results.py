"""Rows of all benchmarks: their one type, their columns, where they were measured, one table."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import getstatusoutput
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tritonclip
from tritonclip.backends import choose

RESULTS = Path(__file__).parent / "results"
# Named in the provenance where installed.
PACKAGES = ("triton", "tensorflow", "tensorflow-cpu", "paddlepaddle", "jax", "optax", "apex")


@dataclass
class Row:
    """One measurement; parts and figures have names of COLUMNS."""

    benchmark: str  # "speed", "accuracy", "features", "host" and so on.
    case: dict[str, Any]  # No two rows of a file share it.
    # Without figures that were not measured. Medians stand beside quartiles NAME_lo and NAME_hi;
    # NAME_goal is the most that is accepted.
    values: dict[str, Any]
    correct: bool | None = None  # Whether it passed its check against float64, if there is one.

    def get(self, name: str) -> Any:
        """A part of the case or a figure; None where the row has none."""
        return self.case.get(name, self.values.get(name))

    def __str__(self) -> str:
        return " ".join(map(str, self.case.values()))

    @property
    def ours(self) -> bool:
        """Whether it measures tritonclip beside others."""
        return str(self.get("provider")).startswith("tritonclip")


# Parts and figures in the order of tables: heading, format, meaning.
COLUMNS = {
    "workload": ("gradients", "", "the gradient list"),
    "model": ("model", "", "what is trained"),
    "dtype": ("dtype", "", "of the gradients; mixed: bfloat16 matrices, float32 vectors"),
    "rule": ("by", "", "norm, largest, value, gradient (each norm), unit or step (SGD)"),
    "step": ("step", "", "clipped or unclipped: whether the rule changes the gradients"),
    "busy": ("busy", "d", "other processes that kept cores busy meanwhile"),
    "after": ("after", "", "what comes before every call, as in a training loop"),
    "layout": ("layout", "", "how the gradients lie on processes"),
    "provider": ("provider", "", "what clipped"),
    "path": ("path", "", "cpu: PyTorch; triton: Triton, launches replaced by nothing"),
    "call": ("call", "", "the call"),
    "feature": ("a step with", "", "what a step of SGD has beside a fixed limit"),
    "list": ("list", "", "how the gradients differ from those of the call before"),
    "tensors": ("tensors", ",d", "gradients in the list"),
    "chip": ("chip", "", "the GPU that the kernel was compiled for"),
    "kernel": ("kernel", "", "the kernel and its variant"),
    "loop": ("loop", "", "read, or write where the loop also writes what it read"),
    # A day with a GPU.
    "chunk": ("chunk", ",d", "elements of a chunk"),
    "block": ("block", ",d", "elements loaded at a time"),
    "warps": ("warps", "d", "of a program"),
    "question": ("question", "", "what a GPU was asked"),
    "answer": ("answer", "", "what it answered"),
    # Speed. Times are in microseconds.
    "wall_us": ("wall us", ",.1f", "median and quartiles until all work was done"),
    "host_us": ("host us", ",.1f", "median until the call returned, on an idle queue"),
    "device_us": ("device us", ",.1f", "median on the GPU alone"),
    "graph_us": ("graph us", ",.1f", "median of the replay of a CUDA graph"),
    "launches": ("launches", "d", "kernels, copies and fills of a call on a GPU"),
    "ratio": ("ratio", ".2f", "the wall time of the best torch variant or loop over this, paired"),
    "baseline": ("over", "", "that variant or loop"),
    "sum_us": ("sum us", ",.1f", "torch.sum over the same bytes, in the same rounds"),
    "sum_share": ("of it", ".0%", "torch.sum's time over this one, paired"),
    "gb_per_s": ("GB/s", ".1f", "bytes moved by device time, or by wall time on a CPU"),
    "copy_gb_per_s": ("copy", ".1f", "GB/s of a copy in the same run"),
    "extra_mb": ("extra MB", ".1f", "peak memory beside the gradients"),
    "norm_error": ("norm error", ".0e", "of the returned norm, relative to float64"),
    "bytes_moved": ("bytes moved", ",d", "read and written, by formula"),
    "batch": ("batch", "d", "calls in a sample"),
    "repetitions": ("samples", "d", "timed samples"),
    # Accuracy.
    "truth": ("truth", ".7g", "the norm in float64"),
    "norm": ("norm", ".7g", "the norm that was returned"),
    "distinct": ("distinct", "d", "different results, bit for bit, of 20 calls"),
    # Several processes.
    "collectives": ("collectives", "d", "of one call"),
    "outcome": ("outcome", "", "in place of a norm"),
    # Host.
    "functions": ("functions", "d", "Python functions of the library that a call enters"),
    "modules": ("modules", "d", "modules of the library that a call enters"),
    "total_us": ("total us", ",.1f", "median and quartiles of a call"),
    "over_us": ("over us", ",.1f", "median over the step with a fixed limit, paired"),
    "torch_us": ("torch us", ",.1f", "torch.nn.utils.clip_grad_norm_ on the same tensors"),
    "share": ("of torch", ".2f", "total over torch's"),
    "floor_us": ("floor us", ",.1f", "reading and comparing all .grad and data_ptr"),
    "us_per_tensor": ("us a tensor", ".2f", "growth from the shortest to the longest list"),
    # Training.
    "step_us": ("step us", ",.0f", "median and quartiles of forward, backward, clip and AdamW"),
    "clip_us": ("clip us", ",.1f", "of its clip"),
    "step_share": ("of the step", ".2%", "that its clip takes"),
    # Code generation; bytes are of one multiprocessor.
    "load_bits": ("load bits", "d", "the widest load from global memory"),
    "store_bits": ("store", "d", "the widest store"),
    "registers": ("registers", "d", "of a thread"),
    "spilled_bytes": ("spilled", "d", "of a thread, in local memory"),
    "loads": ("loads", "d", "loads that a thread has in flight, over whole chunks"),
    "masked_loads": ("masked", "d", "the same over shorter chunks"),
    "programs": ("programs", "d", "resident on a multiprocessor"),
    "threads": ("threads", "d", "of a program"),
    "bytes_in_flight": ("in flight", ",d", "programs * threads * loads * bytes a load"),
    "bytes_needed": ("needed", ",d", "bandwidth * latency / multiprocessors"),
    "enough": ("of it", ".2f", "in flight over needed"),
    "bytes_needed_busy": ("needed, busy", ",d", "the same at the latency of a busy memory"),
    "enough_busy": ("of it, busy", ".2f", "in flight over these"),
}


def cell(row: Row, name: str) -> str:
    """One figure with its quartiles and goal; empty where nothing was measured."""
    form, value = COLUMNS[name][1], row.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    text = format(value, form)
    low, high, goal = (row.get(f"{name}_{end}") for end in ("lo", "hi", "goal"))
    if low is not None:
        text += f" ({low:{form}} to {high:{form}})"
    if goal is not None:
        text += f" / {goal:{form}}{' over' if value > goal else ''}"
    return text


def table(
    rows: Sequence[Row], *, shown: Collection[str] = COLUMNS, border: box.Box = box.SIMPLE
) -> str:
    """Figures that any row has, lines as wide as they need; repeats no case from above."""
    result = Table(box=border)
    cases = [name for name in COLUMNS if any(name in row.case for row in rows)]
    figures = [n for n in COLUMNS if n in shown and any(n in row.values for row in rows)]
    for heading, form, _ in (COLUMNS[name] for name in (*cases, *figures)):
        result.add_column(heading, justify="right" if form else "left", no_wrap=True)
    before = [""] * len(cases)
    for row in rows:
        case = [cell(row, name) for name in cases]
        new = next((i for i, (a, b) in enumerate(zip(before, case, strict=True)) if a != b), 0)
        values = [cell(row, name) for name in figures]
        if row.correct is False and not row.values:
            values[0] = "wrong result, not timed"
        result.add_row(*map(Text, ([""] * new + case[new:] + values)))
        before = case
    console = Console(width=10_000, color_system=None)
    with console.capture() as printed:
        console.print(result)
    return "\n".join(line.rstrip() for line in printed.get().splitlines() if line.strip())


def write(path: Path, origin: dict[str, Any], rows: Sequence[Row]) -> None:
    """Writes rows, one a line, with their provenance, as JSON; replaces a file in one step."""
    lines = []
    # Seven digits: more than any clock has, and as many as a float32 norm.
    for row in rows:
        values = {k: float(f"{v:.7g}") if type(v) is float else v for k, v in row.values.items()}
        lines.append(json.dumps(vars(row) | {"values": values}, allow_nan=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    start = f'{{"provenance": {json.dumps(origin, indent=1)},\n"rows": [\n'
    part = path.with_name(f"{path.name}.part")
    part.write_text(start + ",\n".join(lines) + "\n]}\n")
    part.replace(path)


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Provenance and rows that `write` wrote."""
    record = json.loads(path.read_text())
    return record["provenance"], [Row(**row) for row in record["rows"]]


class RefusedError(click.ClickException):
    """Rows or a page that nothing may be made from."""


def checked(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Provenance and rows of a file; refuses one that is missing, empty, unchecked or doubled."""
    if not path.exists():
        raise RefusedError(f"{path} does not exist: measure first, with --out {path}")
    try:
        origin, rows = read(path)
    except (KeyError, TypeError) as error:
        raise RefusedError(f"{path} holds no rows of these benchmarks: {error}") from error
    if not rows or not origin or "plan" in origin:
        raise RefusedError(f"{path} has no rows, no provenance, or a plan that was not finished")
    wrong = [str(row) for row in rows if not _is_checked(row)]
    twice = [case for case, n in Counter(map(str, rows)).items() if n > 1]
    for fault, found in (("results wrong or not checked", wrong), ("measured twice", twice)):
        if found:
            raise RefusedError(f"{path}: {fault}: {'; '.join(found)}")
    return origin, rows


def _is_checked(row: Row) -> bool:
    """Whether a row is right, cannot be wrong, or says that another library's result was wrong."""
    if row.correct is True or row.benchmark not in ("speed", "accuracy", "features"):
        return True
    return not row.ours and (row.correct is None if row.benchmark == "accuracy" else not row.values)


def provenance(device: torch.device, program: str = "python -m bench") -> dict[str, Any]:
    """The command, machine and versions that rows are measured with."""
    command = f"{program} {shlex.join(sys.argv[1:])}"
    status, commit = getstatusoutput("git describe --always --dirty")
    names = re.findall(r"model name\s*: (.+)", getstatusoutput("cat /proc/cpuinfo")[1])
    found: dict[str, Any] = {
        "command": re.sub(r" --(out|rows)[ =]('[^']*'|\S+)", "", command),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": "unknown" if status else commit,
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "tritonclip": tritonclip.__version__,
        "backend": choose.backend_name(device, torch.float32),
        "torch": torch.__version__,
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    if device.type == "cuda":
        chip = torch.cuda.get_device_properties(device)
        found["cuda"] = torch.version.cuda or f"hip {torch.version.hip}"
        found |= {"multiprocessors": chip.multi_processor_count, "l2_bytes": chip.L2_cache_size}
    return found
