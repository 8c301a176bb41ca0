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

This is the one place of the benchmarks that knows the modules of tritonclip.kernels and the
arguments of their launchers. Its absent GPU, where nothing happens, also serves `host` and tests.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from bench.results import Row

CAPTION = "needed = bandwidth * {} ns (assumed) / multiprocessors; arithmetic, not measured"
# A load's bytes by the suffix of its opcode; 4 where it has none.
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
REGISTERS = 65_536
THREADS = 2048
# More chunks than any grid has programs.
ELEMENTS = 2**20
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


class Launch(NamedTuple):
    """The arguments of one call of `tritonclip.kernels.launch.launch`."""

    kernel: Any
    device: torch.device
    programs: int
    occupancy: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def options(self) -> dict[str, Any]:
        """The options that the library compiles kernels with."""
        options: dict[str, Any] = kernel_module("launch").options_of(self.occupancy)
        return options

    def compiled(self) -> Any:
        """The binary, through Triton's JIT, for the active driver."""
        given = {"grid": (self.programs,), **self.constants, **self.options()}
        result = self.kernel.warmup(*self.arguments, **given)
        return result.result() if hasattr(result, "result") else result


def kernel_module(name: str) -> ModuleType:
    """A module of tritonclip.kernels, imported when it is asked for: it imports triton."""
    return importlib.import_module(f"tritonclip.kernels.{name}")


@contextmanager
def replaced_launch(launch: Callable[..., Any]) -> Iterator[None]:
    """Replaces the function that launches kernels."""
    with patch.object(kernel_module("launch"), "launch", launch):
        yield


@contextmanager
def absent_gpu(arch: int) -> Iterator[None]:
    """Makes an absent GPU the active one of Triton; nothing compiled for another is launched.

    Args:
        arch: its compute capability, 90 for an H100.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # The part of a driver that the JIT uses.
    absent = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        # One device an architecture, so that the JIT keeps their binaries apart.
        get_current_device=lambda: arch,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        launcher_cls=lambda source, metadata: lambda *arguments: None,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**20},
            # Module, function, registers, spills, most threads.
            load_binary=lambda name, binary, shared, device: (1, 1, 1, 0, 1024),
        ),
    )
    driver.set_active(absent)
    try:
        with patch.object(kernel_module("launch"), "_runners", {}):
            yield
    finally:
        # Without a GPU there is no other driver to go back to.
        if torch.cuda.is_available():
            driver.reset_active()


def launches_of(dtype: torch.dtype) -> dict[str, Launch]:
    """One launch of each kernel on a long list, as its launcher asks for it, by the kernel's name.

    Names end with "each" where every gradient has a norm. The GPU has one multiprocessor.
    """
    launches: list[Launch] = []

    def record(
        kernel: Any, device: Any, programs: int, occupancy: Any, arguments: Any, **constants: Any
    ) -> None:
        launches.append(Launch(kernel, device, programs, occupancy, tuple(arguments), constants))

    norm, scale, clamp = map(kernel_module, ("norm", "scale", "clamp"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    terms = {"max_norm": 1.0, "norm_type": 2.0, "eps": 1e-6, "dtype": wide, "grad_scale": 1.0}
    one = patch.object(kernel_module("launch"), "multiprocessors", lambda device: 1)
    with replaced_launch(record), one:
        table = kernel_module("chunk_table").lay_out(torch.device("cpu"), dtype, [ELEMENTS], [16])
        for each in (False, True):
            n = norm.count_norms(table, per_gradient=each)
            norms = torch.empty(n, dtype=torch.float64)
            norm.norm(table, 2.0, norms, per_gradient=each)
            if each:
                scale.scale_each_(table, norms, 0, **terms, erase=None)
            else:
                scale.scale_(table, norms, **terms, erase_nonfinite=False)
        clamp.clamp_(table, -1.0, 1.0)
    names = ("norm", "scale", "norm, each", "scale, each", "clamp")
    return dict(zip(names, launches, strict=True))


def rows_of(chip: Chip, dtype: torch.dtype, latency_ns: float) -> list[Row]:
    """All kernels, compiled for one chip and dtype.

    Raises:
        RuntimeError: kernels are interpreted.
    """
    if kernel_module("launch").INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: interpreted kernels have no machine code")
    short = str(dtype).removeprefix("torch.")
    with absent_gpu(chip.arch):
        return [
            Row(
                "codegen",
                {"chip": chip.name, "kernel": kernel, "loop": loop, "dtype": short},
                values,
            )
            for kernel, launch in launches_of(dtype).items()
            for loop, values in figures_of(chip, launch, latency_ns).items()
        ]


def figures_of(chip: Chip, launch: Launch, latency_ns: float) -> dict[str, dict[str, Any]]:
    """Reads one binary, and does the arithmetic for each of its loops: "read" or "write"."""
    compiled = launch.compiled()
    code = _dump(compiled.asm["cubin"], "--dump-sass")
    usage = _dump(compiled.asm["cubin"], "--dump-resource-usage")
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    threads = compiled.metadata.num_warps * 32
    shared = used["SHARED"] + compiled.metadata.shared
    rounded = -(-used["REG"] // 8) * 8
    programs = min(launch.programs, REGISTERS // (threads * rounded), THREADS // threads)
    if shared:
        programs = min(programs, chip.shared_kib * 1024 // shared)
    width, needed = widest(code, "LDG"), round(chip.bytes_needed(latency_ns))
    by_loop = loads_by_loop(code, width)
    figures: dict[str, dict[str, Any]] = {}
    for (loop, masked), loads in sorted(by_loop.items()):
        if masked:
            continue
        in_flight = programs * threads * loads * width
        figures[loop] = {
            "load_bits": 8 * width,
            "registers": used["REG"],
            "spilled_bytes": used["STACK"] + used["LOCAL"],
            "loads": loads,
            "masked_loads": by_loop.get((loop, True), 0),
            "programs": programs,
            "threads": threads,
            "bytes_in_flight": in_flight,
            "bytes_needed": needed,
            "enough": in_flight / needed,
        }
        if loop == "write":
            figures[loop]["store_bits"] = 8 * widest(code, "STG")
    return figures


def _dump(cubin: bytes, option: str) -> str:
    """Output of cuobjdump, which comes with Triton, for a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), option, str(path)]
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
