"""What the compiled kernels can keep in flight, against what a chip needs: arithmetic, no timing.

Every kernel is compiled ahead of time for sm_80, sm_90 and sm_100 through Triton's JIT, with the
arguments and options of its own launcher; no GPU is needed. From the binary, for each loop over
gradients: the widest accesses to global memory, registers, spills, and the most wide loads that a
thread has issued before it uses the first of them. From these and the chip's data sheet, by
Little's law:

    programs resident on a multiprocessor = the least of
        what the grid starts, 65,536 registers / (threads * registers a thread, in units of 8),
        2,048 threads / threads, shared memory of the multiprocessor / that of a program
    bytes in flight = programs * threads * loads in flight * bytes a load
    bytes needed    = bandwidth * latency / multiprocessors

A loop with fewer bytes in flight than the chip needs cannot reach its bandwidth, as far as the
assumed latency holds. One with more may still miss it: bytes in flight are a peak, which a program
leaves while it computes. Chunks shorter than others (the end of every gradient) have masked loads,
of which fewer are in flight. The write loop of clamp reads again what its read loop has just read,
so mostly from cache. LATENCY_NS is an assumption, a round number for a busy memory. Nothing here is
a measurement of speed.

Run `python -m bench.codegen`.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import rows, sass
from bench.ahead import compiled_kernels
from tritonclip.kernels import launch

LATENCY_NS = 650.0
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


@dataclass(frozen=True)
class CodegenRow:
    """One loop over gradients of a kernel on one chip; bytes are of one multiprocessor.

    Attributes:
        loop: "read", or "write" where it also writes what it read.
        load_bits, store_bits: the widest access to global memory; None where nothing is stored.
        registers: of a thread.
        spilled_bytes: of a thread, in local memory.
        loads: most loads of the widest kind that a thread has in flight, over whole chunks.
        masked_loads: the same over shorter chunks, whose loads are masked.
        programs: resident on a multiprocessor.
        threads: of a program.
    """

    chip: str
    kernel: str
    loop: str
    dtype: str
    load_bits: int
    store_bits: int | None
    registers: int
    spilled_bytes: int
    loads: int
    masked_loads: int
    programs: int
    threads: int
    bytes_in_flight: int
    bytes_needed: int
    latency_ns: float


def rows_of_binary(
    chip: Chip, kernel: str, dtype: torch.dtype, compiled: Any, grid: int, latency_ns: float
) -> list[CodegenRow]:
    """Reads one binary, and does the arithmetic for each of its loops."""
    code = sass.dump(compiled.asm["cubin"], "--dump-sass")
    (line,) = re.findall(r"REG:.*", sass.dump(compiled.asm["cubin"], "--dump-resource-usage"))
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}
    threads = compiled.metadata.num_warps * 32
    shared = usage["SHARED"] + compiled.metadata.shared
    rounded = -(-usage["REG"] // 8) * 8
    programs = min(grid, REGISTERS // (threads * rounded), THREADS // threads)
    if shared:
        programs = min(programs, chip.shared_kib * 1024 // shared)
    width = sass.widest(code, "LDG")
    by_loop = sass.loads_by_loop(code, width)
    return [
        CodegenRow(
            chip=chip.name,
            kernel=kernel,
            loop=loop,
            dtype=str(dtype).removeprefix("torch."),
            load_bits=8 * width,
            store_bits=8 * sass.widest(code, "STG") if loop == "write" else None,
            registers=usage["REG"],
            spilled_bytes=usage["STACK"] + usage["LOCAL"],
            loads=loads,
            masked_loads=by_loop.get((loop, True), 0),
            programs=programs,
            threads=threads,
            bytes_in_flight=programs * threads * loads * width,
            bytes_needed=round(chip.bytes_needed(latency_ns)),
            latency_ns=latency_ns,
        )
        for (loop, masked), loads in sorted(by_loop.items())
        if not masked
    ]


def rows_of(chip: Chip, dtype: torch.dtype, latency_ns: float) -> list[CodegenRow]:
    """All kernels, compiled for one chip and dtype."""
    return [
        row
        for kernel, binary, grid in compiled_kernels(chip.arch, dtype)
        for row in rows_of_binary(chip, kernel, dtype, binary, grid, latency_ns)
    ]


def table(made: list[CodegenRow], latency_ns: float) -> Table:
    """The rows for people, the arithmetic written out."""
    result = Table(
        title="Compiled kernels: bytes in flight on a multiprocessor (arithmetic, not measured)",
        caption=f"needed = bandwidth * {latency_ns:g} ns (assumed) / multiprocessors; "
        "masked: loads in flight over shorter chunks",
    )
    for name in ("chip", "kernel", "loop", "dtype"):
        result.add_column(name, no_wrap=True)
    for name in ("load bits", "store", "registers", "spilled B"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("programs x threads x loads x bytes = in flight", no_wrap=True)
    for name in ("needed", "of it", "masked"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in made:
        factors = f"{row.programs} x {row.threads} x {row.loads:>2} x {row.load_bits // 8}"
        result.add_row(
            row.chip,
            row.kernel,
            row.loop,
            row.dtype,
            str(row.load_bits),
            "" if row.store_bits is None else str(row.store_bits),
            str(row.registers),
            str(row.spilled_bytes),
            f"{factors} = {row.bytes_in_flight:,}",
            f"{row.bytes_needed:,}",
            f"{row.bytes_in_flight / row.bytes_needed:.2f}x",
            str(row.masked_loads),
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """Compiles everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency-ns", type=float, default=LATENCY_NS, help="assumed (650)")
    parser.add_argument("--out", type=Path, help="also write rows and provenance to this file")
    options = parser.parse_args(argv)
    if launch.INTERPRETED:
        parser.error("TRITON_INTERPRET is set: interpreted kernels have no machine code; unset it")
    console = Console(width=170)
    work = [(chip, dtype) for chip in CHIPS for dtype in DTYPES]
    made: list[CodegenRow] = []
    for chip, dtype in track(work, "compiling", console=console, transient=True):
        made += rows_of(chip, dtype, options.latency_ns)
    console.print(table(made, options.latency_ns))
    for chip in CHIPS:
        console.print(
            f"{chip.name} (sm_{chip.arch}): {chip.tb_per_s} TB/s * {options.latency_ns:g} ns / "
            f"{chip.multiprocessors} = {chip.bytes_needed(options.latency_ns):,.0f} bytes needed"
        )
    if options.out:
        rows.write(options.out, rows.provenance(torch.device("cpu")), made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
