"""Rows of results, where they come from, and how they are written and read."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import tritonclip

RESULTS = Path(__file__).parent / "results"
# Named in the provenance where installed.
PACKAGES = (
    "triton",
    "tensorflow",
    "tensorflow-cpu",
    "paddlepaddle",
    "jax",
    "optax",
    "apex",
    "transformer_engine",
)


@dataclass(frozen=True)
class Row:
    """One rival on one gradient list. Times are in microseconds; None is what was not measured.

    Attributes:
        list: name of the parameter list.
        n_tensors: gradients.
        n_elements: elements of all of them.
        gradient_bytes: bytes of all of them.
        dtype: "float32", "bfloat16", "float16" or "mixed".
        rule: "norm", "value" or "gradient".
        clipped: whether the rule changed anything.
        rival: what clipped.
        device: "cpu" or the name of the GPU.
        repetitions: timed calls.
        wall_us: median until all was done.
        wall_lo_us: lower quartile.
        wall_hi_us: upper quartile.
        host_us: median until the call returned, on an idle queue.
        device_us: median on the GPU alone.
        graph_us: median of the replay of a CUDA graph.
        launches: kernels, copies and fills of a call.
        bytes_moved: read and written, by formula.
        gb_per_s: these by device time, or by wall time on a CPU.
        copy_gb_per_s: what a copy reached in the same run.
        extra_bytes: peak memory beside the gradients.
        norm_error: of the norm, relative to float64; None where no norm is returned.
        correct: whether norm and gradients passed the check against float64; what did not pass was
            not timed.
        ratio: wall time of the best torch variant of that run over this rival's, median over
            paired repetitions.
        ratio_lo: lower quartile.
        ratio_hi: upper quartile.
    """

    list: str
    n_tensors: int
    n_elements: int
    gradient_bytes: int
    dtype: str
    rule: str
    clipped: bool
    rival: str
    device: str
    repetitions: int = 0
    wall_us: float | None = None
    wall_lo_us: float | None = None
    wall_hi_us: float | None = None
    host_us: float | None = None
    device_us: float | None = None
    graph_us: float | None = None
    launches: int | None = None
    bytes_moved: int | None = None
    gb_per_s: float | None = None
    copy_gb_per_s: float | None = None
    extra_bytes: int | None = None
    norm_error: float | None = None
    correct: bool = False
    ratio: float | None = None
    ratio_lo: float | None = None
    ratio_hi: float | None = None


def device_name(device: torch.device) -> str:
    """What rows call a device: "cpu", or the name of the GPU."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def provenance(device: torch.device) -> dict[str, Any]:
    """Where and with what rows are measured."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": _commit(),
        "cpu": _cpu(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "tritonclip": tritonclip.__version__,
        "torch": torch.__version__,
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["cuda"] = torch.version.cuda or f"hip {torch.version.hip}"
        found["multiprocessors"] = properties.multi_processor_count
        found["l2_bytes"] = properties.L2_cache_size
    return found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def write(path: Path, origin: dict[str, Any], rows: Sequence[Any]) -> None:
    """Writes dataclass rows, with where they come from, as JSON."""
    record = {"provenance": origin, "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What `write` wrote of rows of the suite."""
    record = json.loads(path.read_text())
    return record["provenance"], [Row(**row) for row in record["rows"]]
