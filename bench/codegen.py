"""`python -m bench codegen`: bytes that compiled kernels keep in flight, and that a chip needs.

Arithmetic, no timing: docs/performance/codegen.md has the formulas and their limits. Every kernel
is compiled ahead of time for sm_80, sm_90, sm_100 and gfx942 through Triton's JIT, with the
arguments and options of its verb. NVIDIA's machine code is read with cuobjdump, AMD's from Triton's
assembly; no GPU is needed.

This is the one place of the benchmarks that knows the Triton backend and its kernels. Its absent
GPU, where nothing happens, also serves `host` and tests.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from subprocess import check_output
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from bench.results import Row
from tritonclip.backends.interface import Clip

# Assumed: of a memory with little to do, and of a busy one.
LATENCIES_NS = {"": 650, "_busy": 1000}
# A load's bytes by the suffix of its opcode; 4 where it has none.
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
# AMD's names of as much.
AMD_WIDTHS = {"ubyte": "U8", "ushort": "U16", "short": "U16", "dwordx2": "64", "dwordx4": "128"}
THREADS = 2048
# More chunks than any grid has programs.
ELEMENTS = 2**20
# "each": every gradient has a norm.
KERNELS = ("norm", "scale", "norm, each", "scale, each", "clamp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Chip(NamedTuple):
    """A data sheet; shared memory and 32-bit registers are those of a multiprocessor."""

    name: str
    arch: int | str
    tb_per_s: float
    multiprocessors: int
    shared_kib: int
    registers: int = 65_536


CHIPS = (
    Chip("A100", 80, 2.0, 108, 164),
    Chip("H100", 90, 3.35, 132, 228),
    Chip("H200", 90, 4.8, 132, 228),
    Chip("B200", 100, 8.0, 148, 228),
    Chip("MI300X", "gfx942", 5.3, 304, 64, 131_072),
)


class Launch(NamedTuple):
    """The arguments of one call of `tritonclip.kernels.launch.launch`."""

    kernel: Any
    device: torch.device
    programs: int
    occupancy: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def compiled(self) -> Any:
        """The binary, through Triton's JIT, for the active driver."""
        options = kernel_module("launch").options_of(self.occupancy)
        given = {"grid": (self.programs,), **self.constants, **options}
        result = self.kernel.warmup(*self.arguments, **given)
        return result.result() if hasattr(result, "result") else result


def kernel_module(name: str) -> ModuleType:
    """A module of tritonclip.kernels, imported when it is asked for: it imports triton."""
    return importlib.import_module(f"tritonclip.kernels.{name}")


def replaced_launch(launch: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replaces the function that launches kernels."""
    return patch.object(kernel_module("launch"), "launch", launch)


@contextmanager
def absent_gpu(arch: int | str) -> Iterator[None]:
    """Makes an absent GPU the active one of Triton; `arch` is 90 for an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    is_amd = isinstance(arch, str)
    target = GPUTarget("hip", arch, 64) if is_amd else GPUTarget("cuda", arch, 32)
    # The part of a driver that the JIT uses.
    absent = SimpleNamespace(
        get_current_target=lambda: target,
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
        version = patch.object(torch.version, "hip", "6.4" if is_amd else None)
        with version, patch.object(kernel_module("launch"), "_runners", {}):
            yield
    finally:
        # Without a GPU there is no other driver to go back to.
        if torch.cuda.is_available():
            driver.reset_active()


def launches_of(dtype: torch.dtype) -> dict[str, Launch]:
    """A launch of each kernel on a long list, by its name, on a GPU of one multiprocessor."""
    launches = []

    def record(kernel, device, programs, occupancy, arguments, **constants):
        launches.append(Launch(kernel, device, programs, occupancy, tuple(arguments), constants))

    backend = importlib.import_module("tritonclip.backends.triton")
    one = patch.object(kernel_module("launch"), "multiprocessors", lambda device: 1)
    with replaced_launch(record), one:
        table = kernel_module("tables").lay_out(torch.device("cpu"), dtype, [ELEMENTS], [16])
        batch = backend.TritonBatch([], table, torch.promote_types(dtype, torch.float32))
        clip = Clip(norm_type=2.0, eps=1e-6, limit=1.0, grad_scale=1.0)
        batch.scale_(batch.norm(2.0, per_gradient=False), clip)
        batch.scale_each_(batch.norm(2.0, per_gradient=True), clip)
        batch.clamp_(-1.0, 1.0, 1.0)
    return dict(zip(KERNELS, launches, strict=True))


def rows_of(chip: Chip, dtype: torch.dtype) -> list[Row]:
    """All kernels, compiled for one chip and dtype; refuses kernels that are interpreted."""
    if kernel_module("launch").INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: interpreted kernels have no machine code")
    name = str(dtype).removeprefix("torch.")
    with absent_gpu(chip.arch):
        return [
            Row(
                "codegen",
                {"chip": chip.name, "kernel": kernel, "loop": loop, "dtype": name},
                values,
            )
            for kernel, launch in launches_of(dtype).items()
            for loop, values in figures_of(chip, launch)
        ]


def machine_code(compiled: Any) -> tuple[str, dict[str, int]]:
    """The code of a binary, as cuobjdump prints it, and its registers, shared and spilled bytes."""
    import triton

    if amdgcn := compiled.asm.get("amdgcn"):
        found = {name: int(n) for name, n in re.findall(r"\.(\w+): +(\d+)", amdgcn)}
        spilled = found["private_segment_fixed_size"] + 4 * found["vgpr_spill_count"]
        return as_sass(amdgcn), {"REG": found["vgpr_count"], "SHARED": 0, "SPILLED": spilled}
    # Machine code and use of resources, from the cuobjdump that comes with Triton.
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [str(tool), "--dump-sass", "--dump-resource-usage", file.name]
        code = check_output(command, text=True)
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", code)}
    return code, used | {"SPILLED": used["STACK"] + used["LOCAL"]}


def as_sass(amdgcn: str) -> str:
    """AMD's assembly in NVIDIA's words, as far as `widest` and `loads_by_loop` read them.

    A masked load has its offset from v_cndmask: where the mask is false, beyond all memory.
    """
    lines, labels = list[str](), dict[str, int]()
    for line in amdgcn.splitlines():
        text = line.partition(";")[0].strip()
        if text.endswith(":"):
            labels[text[:-1]] = len(lines)
        elif text and not text.startswith("."):
            lines.append(text)
    chosen: set[int] = set()
    result = []
    for i, line in enumerate(lines):
        opcode, _, operands = line.partition(" ")
        runs = re.findall(r"\bv(?:\[(\d+):)?(\d+)", operands)
        registers = [n for a, b in runs for n in range(int(a or b), int(b) + 1)]
        guard = ""
        if found := re.match(r"(?:buffer|global)_(load|store)_([a-z]+?(?:x\d)?)(?:_|$)", opcode):
            guard = "@P " * (found[1] == "load" and int(runs[1][1]) in chosen)
            opcode = ("LDG.E." if found[1] == "load" else "STG.E.") + AMD_WIDTHS.get(found[2], "")
        elif "branch" in opcode:
            opcode, guard = f"BRA 0x{labels.get(operands.strip(), 0):x}", "@P "
        else:
            change = chosen.add if opcode.startswith("v_cndmask") else chosen.discard
            for n in registers[:1]:
                change(n)
        result.append(f"/*{i:04x}*/ {guard}{opcode} {' '.join(f'R{n}' for n in registers)} ;")
    return "\n".join(result)


def figures_of(chip: Chip, launch: Launch) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads one binary, and does the arithmetic for each of its loops: "read" or "write"."""
    compiled = launch.compiled()
    code, used = machine_code(compiled)
    threads = compiled.metadata.num_warps * compiled.metadata.target.warp_size
    by_registers = chip.registers // (threads * -(-used["REG"] // 8) * 8)
    by_memory = chip.shared_kib * 1024 // max(used["SHARED"] + compiled.metadata.shared, 1)
    programs = min(launch.programs, by_registers, THREADS // threads, by_memory)
    width = widest(code, "LDG")
    by_loop = loads_by_loop(code, width)
    for loop in sorted(loop for loop, masked in by_loop if not masked):
        in_flight = programs * threads * by_loop[loop, False] * width
        values = {
            "load_bits": 8 * width,
            "registers": used["REG"],
            "spilled_bytes": used["SPILLED"],
            "loads": by_loop[loop, False],
            "masked_loads": by_loop.get((loop, True), 0),
            "programs": programs,
            "threads": threads,
            "bytes_in_flight": in_flight,
        }
        if loop == "write":
            values["store_bits"] = 8 * widest(code, "STG")
        for state, latency in LATENCIES_NS.items():
            needed = chip.tb_per_s * 1e3 * latency / chip.multiprocessors
            values |= {f"bytes_needed{state}": round(needed), f"enough{state}": in_flight / needed}
        yield loop, values


def widest(sass: str, access: str) -> int:
    """Bytes that the widest LDG or STG moves for a thread; 0 where there is none."""
    opcodes = [one.split(".") for one in re.findall(rf"\b{access}\.\S+", sass)]
    widths = ([WIDTHS[part] for part in parts if part in WIDTHS] or [4] for parts in opcodes)
    return max(map(max, widths), default=0)


def loads_by_loop(sass: str, width: int) -> dict[tuple[str, bool], int]:
    """Most loads of `width` bytes before the first is needed, by ("read" or "write", masked)."""
    # Instructions between places that are jumped to or from, in the order of the program.
    targets = set(re.findall(r"\b(?:BRA|BSSY)\S* [^;]*?0x([0-9a-f]+)", sass))
    place, blocks = 0, defaultdict(list)
    for address, instruction in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass):
        place += address.lstrip("0") in targets
        blocks[place].append(instruction)
        place += re.search(r"\bBRA\b", instruction) is not None
    result: dict[tuple[str, bool], int] = {}
    for block in blocks.values():
        most, masked = 0, True
        # The registers of loads, which are waited for in the order in which they were issued.
        pending: list[set[int]] = []
        for instruction in block:
            used = {int(number) for number in re.findall(r"\bR(\d+)", instruction)}
            needed = (i + 1 for i, registers in enumerate(pending) if registers & used)
            pending = pending[max(needed, default=0) :]
            load = re.search(r"\bLDG\.\S+ R(\d+)", instruction)
            if load and widest(load[0], "LDG") == width:
                masked &= instruction.startswith("@")
                pending.append(set(range(int(load[1]), int(load[1]) + width // 4)))
                most = max(most, len(pending))
        if most:
            kind = "write" if any("STG." in one for one in block) else "read", masked
            result[kind] = max(most, result.get(kind, 0))
    return result
