"""`python -m bench codegen`: bytes that compiled kernels keep in flight, and that a chip needs.

Arithmetic, no timing. Every kernel is compiled ahead of time for sm_80, sm_90 and sm_100 through
Triton's JIT, with the arguments and options of its launcher; no GPU is needed. From the machine
code, read with cuobjdump, for each loop over gradients: the widest accesses to global memory,
registers, spills, and the most wide loads that a thread has issued before it uses the first of
them. From these and the chip's data sheet, by Little's law:

    programs resident on a multiprocessor = the least of
        what the grid starts, 65,536 registers / (threads * registers a thread, in units of 8),
        2,048 threads / threads, shared memory of the multiprocessor / that of a program
    bytes in flight = programs * threads * loads in flight * bytes a load
    bytes needed    = bandwidth * latency / multiprocessors

A loop with fewer bytes in flight than the chip needs cannot reach its bandwidth, as far as the
assumed latency holds. One with more may still miss it: bytes in flight are a peak, which a program
leaves while it computes. Chunks shorter than others (the end of every gradient) have masked loads,
of which fewer are in flight. The write loop of clamp reads again what its read loop has just read,
so mostly from cache. The latency is an assumption, a round number for a busy memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.absent_gpu import Launch, absent_gpu, kernel_module, launches_of
from bench.results import Row

CAPTION = "needed = bandwidth * {} ns (assumed) / multiprocessors; arithmetic, not measured"
# A load's bytes by the suffix of its opcode; 4 where it has none.
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
REGISTERS = 65_536
THREADS = 2048
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Chip:
    """A data sheet: terabytes a second, multiprocessors, KiB of shared memory in each."""

    name: str
    arch: int
    tb_per_s: float
    multiprocessors: int
    shared_kib: int

    def bytes_needed(self, latency_ns: float) -> float:
        """Bytes that a multiprocessor must have in flight to saturate memory."""
        return self.tb_per_s * 1e12 * latency_ns * 1e-9 / self.multiprocessors


CHIPS = (
    Chip("A100", 80, 2.0, 108, 164),
    Chip("H100", 90, 3.35, 132, 228),
    Chip("B200", 100, 8.0, 148, 228),
)


def rows_of(chip: Chip, dtype: torch.dtype, latency_ns: float) -> list[Row]:
    """All kernels, compiled for one chip and dtype.

    Raises:
        RuntimeError: kernels are interpreted.
    """
    if kernel_module("launch").INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: interpreted kernels have no machine code")
    with absent_gpu(chip.arch):
        return [
            row
            for kernel, launch in launches_of(dtype).items()
            for row in _rows_of_launch(chip, kernel, dtype, launch, latency_ns)
        ]


def _rows_of_launch(
    chip: Chip, kernel: str, dtype: torch.dtype, launch: Launch, latency_ns: float
) -> list[Row]:
    """Reads one binary, and does the arithmetic for each of its loops."""
    compiled = launch.compiled()
    code = _dump(compiled.asm["cubin"], "--dump-sass")
    (line,) = re.findall(r"REG:.*", _dump(compiled.asm["cubin"], "--dump-resource-usage"))
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}
    threads = compiled.metadata.num_warps * 32
    shared = usage["SHARED"] + compiled.metadata.shared
    rounded = -(-usage["REG"] // 8) * 8
    programs = min(launch.programs, REGISTERS // (threads * rounded), THREADS // threads)
    if shared:
        programs = min(programs, chip.shared_kib * 1024 // shared)
    width, needed = widest(code, "LDG"), round(chip.bytes_needed(latency_ns))
    by_loop = loads_by_loop(code, width)
    rows = []
    for (loop, masked), loads in sorted(by_loop.items()):
        if not masked:
            short = str(dtype).removeprefix("torch.")
            case = {"chip": chip.name, "kernel": kernel, "loop": loop, "dtype": short}
            in_flight = programs * threads * loads * width
            values = {
                "load_bits": 8 * width,
                "registers": usage["REG"],
                "spilled_bytes": usage["STACK"] + usage["LOCAL"],
                "loads": loads,
                "masked_loads": by_loop.get((loop, True), 0),
                "programs": programs,
                "threads": threads,
                "bytes_in_flight": in_flight,
                "bytes_needed": needed,
                "enough": in_flight / needed,
            }
            if loop == "write":
                values["store_bits"] = 8 * widest(code, "STG")
            rows.append(Row("codegen", case, values))
    return rows


def _dump(cubin: bytes, what: str) -> str:
    """What cuobjdump, which comes with Triton, prints of a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), what, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def access_bytes(opcode: str) -> int:
    """Bytes that a load or store moves for a thread."""
    return next((_WIDTHS[part] for part in opcode.split(".") if part in _WIDTHS), 4)


def widest(sass: str, access: str) -> int:
    """Bytes of the widest LDG or STG; 0 where there is none."""
    return max(map(access_bytes, re.findall(rf"\b({access}\.\S+)", sass)), default=0)


def blocks(sass: str) -> list[list[str]]:
    """Instructions between places that are jumped to or from, in the order of the program."""
    targets = set(re.findall(r"\b(?:BRA|BSSY)\S* [^;]*?0x([0-9a-f]+)", sass))
    result: list[list[str]] = [[]]
    for address, instruction in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass):
        if address.lstrip("0") in targets:
            result.append([])
        result[-1].append(instruction)
        if re.search(r"\bBRA\b", instruction):
            result.append([])
    return result


def loads_in_flight(block: list[str], width: int) -> int:
    """The most loads of `width` bytes that a thread issues before it needs the first of them."""
    most = 0
    pending: list[set[int]] = []
    for instruction in block:
        used = {int(number) for number in re.findall(r"\bR(\d+)", instruction)}
        # Loads are waited for in the order in which they were issued.
        needed = [place for place, registers in enumerate(pending) if registers & used]
        if needed:
            pending = pending[needed[-1] + 1 :]
        load = re.search(r"\b(LDG\.\S+) R(\d+)", instruction)
        if load and access_bytes(load[1]) == width:
            first = int(load[2])
            pending.append(set(range(first, first + width // 4)))
            most = max(most, len(pending))
    return most


def loads_by_loop(sass: str, width: int) -> dict[tuple[str, bool], int]:
    """Loads in flight by loop over gradients: ("read" or "write", whether it is masked)."""
    result: dict[tuple[str, bool], int] = {}
    for block in blocks(sass):
        loads = [
            instruction
            for instruction in block
            if any(access_bytes(op) == width for op in re.findall(r"\bLDG\.\S+", instruction))
        ]
        if loads:
            loop = "write" if any("STG." in instruction for instruction in block) else "read"
            masked = all(load.startswith("@") for load in loads)
            most = max(loads_in_flight(block, width), result.get((loop, masked), 0))
            result[loop, masked] = most
    return result
