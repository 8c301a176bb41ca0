"""Every kernel, compiled ahead of time for machines that are not here, as its verb asks for it.

The verbs run with a recorder in the kernel's place, so constants, argument types and compile
options are theirs. What counts is read from PTX, AMDGCN and the binary: 128-bit accesses in the
main loops, nothing spilled, and registers for as many programs as the grid starts.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.absent_gpu import Launch, kernel_module
from helpers.cases import INTERPRETED
from tritonclip.backends.interface import Clip

triton = pytest.importorskip("triton", reason="kernels are compiled with Triton")

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no machine code"),
]

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EPS = 1e-6
POINTERS = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


def _batch(table: Any) -> Any:
    backend = importlib.import_module("tritonclip.backends.triton")
    return backend.TritonBatch([], table, torch.promote_types(table.dtype, torch.float32))


def _number(variant: str) -> Any:
    """A limit or a loss scale: in a tensor for "zero"."""
    return torch.ones(1) if variant == "zero" else 1.0


def _flag(variant: str) -> torch.Tensor | None:
    return torch.zeros((), dtype=torch.bool) if variant == "zero" else None


def _scale(table: Any, p: float, variant: str) -> None:
    norms, number = torch.empty(1, dtype=torch.float64), _number(variant)
    _batch(table).scale_(norms, Clip(p, EPS, number, number, variant == "zero"))


def _scale_each(table: Any, p: float, variant: str) -> None:
    norms, number = torch.empty(1, dtype=torch.float64), _number(variant)
    _batch(table).scale_(norms, Clip(p, EPS, number, number, _flag(variant), "each"))


def _units(table: Any) -> Any:
    """Many long rows of gradients and weights of one dtype."""
    backend = importlib.import_module("tritonclip.backends.triton")
    row = torch.empty(64, kernel_module("access").CHUNK, dtype=table.dtype)
    layout = backend.TritonLayout([row], [row])
    layout.dtype = torch.promote_types(table.dtype, torch.float32)
    return layout.bind([row, row], None)


def _scale_units(table: Any, p: float, variant: str) -> None:
    units, number = _units(table), _number(variant)
    norms = torch.empty(2, 64, dtype=torch.float64)
    units.scale_(norms, Clip(2.0, 1e-3, number, number, _flag(variant), "rows"))


@dataclass(frozen=True)
class Verb:
    """How a kernel is launched, and the tile loops that it has for whole chunks (and as many more
    for the aligned part of shorter ones); by unit also tiles of rows, which a block fills."""

    launch: Callable[[Any, float, str], None]
    reading_loops: int
    writing_loops: int
    by_row: bool = False

    def masked(self, loops: int, binary: Binary) -> int:
        """Wide accesses that have a mask."""
        return loops * (binary.per_tile + self.by_row * binary.per_rows)


VERBS = {
    "norm": Verb(lambda table, p, kind: _batch(table).norm(p, kind or "all"), 1, 0),
    "scale": Verb(_scale, 1, 1),
    "scale_each": Verb(_scale_each, 1, 1),
    "clamp": Verb(lambda table, p, kind: _batch(table).clamp_(-1.0, 1.0, _number(kind)), 2, 1),
    "unit_norms": Verb(lambda table, p, kind: _units(table).norm(2.0, "rows"), 1, 0, by_row=True),
    "scale_units": Verb(_scale_units, 1, 1, by_row=True),
}


@dataclass(frozen=True)
class Case:
    """What to compile; variant "each" is a norm by chunk, "zero" the policy that writes zeros, with
    limit and loss scale in tensors."""

    verb: str
    target: str
    dtype: torch.dtype
    p: float = 2.0
    variant: str = ""

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.")
        p = "" if self.verb == "clamp" else f"p={self.p:g}"
        return "-".join(filter(None, (self.verb, self.target, short, p, self.variant)))


def _cases() -> list[Case]:
    made = [
        Case(verb, target, dtype, variant=variant)
        for target in TARGETS
        for dtype in DTYPES
        for verb in VERBS
        for variant in (("", "each") if verb == "norm" else ("",))
    ]
    # Registers hardly depend on the norm type: one target and dtype stand for the others.
    others = (1.0, torch.inf, 3.0)
    made += [Case("norm", "sm_90", torch.float32, p, v) for p in others for v in ("", "each")]
    made += [Case(v, "sm_90", torch.float32, p) for p in others for v in ("scale", "scale_each")]
    made += [
        Case(verb, target, torch.float32, variant="zero")
        for target in ("sm_90", "gfx942")
        for verb in ("scale", "scale_each", "clamp", "scale_units")
    ]
    return made


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what its launch assumed of it."""

    case: Case
    # PTX or AMDGCN.
    assembly: str
    # What cuobjdump prints; nothing for AMD.
    sass: str
    resources: str
    # Programs that the grid starts on each multiprocessor, and threads of a program.
    programs: int
    threads: int
    # Accesses of 16 bytes that a thread needs for one tile, and for a step over rows.
    per_tile: int
    per_rows: int

    def counts(self) -> dict[str, int]:
        """AMD: the counts in the kernel's metadata."""
        return {k: int(n) for k, n in re.findall(r"\.(\w+_count|\w+_size): +(\d+)", self.assembly)}

    def usage(self) -> dict[str, int]:
        """CUDA: registers a thread, and bytes of stack and local memory."""
        (line,) = re.findall(r"REG:.*", self.resources)
        return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)}


def _record(case: Case, hip: bool) -> tuple[Launch, dict[str, Any]]:
    """The launch of a verb on a device with one multiprocessor and more chunks than programs.

    And its options, which are others on AMD's.
    """
    launches = []

    def record(kernel, device, programs, occupancy, arguments, **constants):
        launches.append(Launch(kernel, device, programs, occupancy, arguments, constants))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4" if hip else None)
        patch.setattr(kernel_module("launch"), "multiprocessors", lambda device: 1)
        patch.setattr(kernel_module("launch"), "launch", record)
        n = 16 * kernel_module("access").CHUNK
        table = kernel_module("tables").lay_out(torch.device("cpu"), case.dtype, [n], [16])
        VERBS[case.verb].launch(table, case.p, case.variant)
        return launches[0], kernel_module("launch").options_of(launches[0].occupancy)


def _source(launch: Launch) -> Any:
    """What Triton compiles for a launch: it depends on types and constants alone."""
    from triton.compiler import ASTSource

    kernel = launch.kernel
    values = dict(zip(kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif name in launch.constants or value is None:
            signature[name] = "constexpr"
            constants[(place,)] = value
        else:
            signature[name] = kernel.params[place].annotation_type
    return ASTSource(kernel, signature, constexprs=constants)


@pytest.fixture(scope="module")
def no_linker(tmp_path_factory):
    """For Triton 3.4, which looks for ROCm's linker although only the assembly is read here."""
    script = tmp_path_factory.mktemp("linker") / "ld.lld"
    script.write_text(
        '#!/bin/sh\nif test "$1" = --version; then echo none; else cp "$4" "$6"; fi\n'
    )
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_HIP_LLD_PATH", str(script))
        yield


def _dump(cubin: Path, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), what, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def binary(request, no_linker, tmp_path_factory):
    """The case's kernel, compiled."""
    from triton.backends.compiler import GPUTarget

    case = request.param
    target = GPUTarget(*TARGETS[case.target])
    launch, options = _record(case, hip=target.backend == "hip")
    compiled = triton.compile(_source(launch), target=target, options=options)

    sass = resources = ""
    if target.backend == "cuda":
        cubin = tmp_path_factory.mktemp("binary") / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        sass, resources = _dump(cubin, "--dump-sass"), _dump(cubin, "--dump-resource-usage")
    threads, constants = options["num_warps"] * target.warp_size, launch.constants
    in_rows = constants.get("MEDIUM_ROWS", 0) * constants.get("ROW_COLUMNS", 0)
    return Binary(
        case=case,
        assembly=compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"],
        sass=sass,
        resources=resources,
        programs=launch.programs,
        threads=threads,
        per_tile=constants["BLOCK"] * case.dtype.itemsize // (16 * threads),
        per_rows=constants.get("STEPS", 1) * in_rows * case.dtype.itemsize // (16 * threads),
    )


ALL = _cases()
CUDA = [case for case in ALL if case.target != "gfx942"]
AMD = [case for case in ALL if case.target == "gfx942"]


def over(cases: list[Case], *, fast: bool = False) -> pytest.MarkDecorator:
    """Runs a test for each binary; `fast` leaves out the norm types whose norm has no fast loop."""
    kept = [case for case in cases if not (fast and case.verb == "norm" and case.p == 3.0)]
    # One worker compiles a kernel for all of its tests.
    grouped = [pytest.param(case, marks=pytest.mark.xdist_group(str(case))) for case in kept]
    return pytest.mark.parametrize("binary", grouped, ids=map(str, kept), indirect=True)


def assert_at_least(found: int, needed: int) -> None:
    assert found >= needed > 0, f"{found} of {needed} accesses are 128 bits wide"


# v8.b32 and v4.b64 are 256 bits, which sm_100 has.
WIDE_PTX = r"\.global[.\w:]*\.(?:v4\.b32|v2\.b64|v8\.b32|v4\.b64)"


@over(CUDA, fast=True)
def test_main_loops_are_wide_in_ptx(binary):
    """Whole chunks without a predicate, and the aligned part of shorter ones with one."""
    verb = VERBS[binary.case.verb]
    for access, loops in (("ld", verb.reading_loops), ("st", verb.writing_loops)):
        whole, masked = (
            len(re.findall(predicate + access + WIDE_PTX, binary.assembly, re.MULTILINE))
            for predicate in (r"^\s*", r"^\s*@!?%p\d+ ")
        )
        if loops:
            assert_at_least(whole, loops * binary.per_tile)
            assert_at_least(masked, verb.masked(loops, binary))


SASS = ("LDG", "STG", r"\b{}\.E\S*\.(?:128|256)\b")
AMDGCN = ("load", "store", r"\b(?:buffer|global)_{}_dwordx4\b")


@over([*CUDA, *AMD], fast=True)
def test_main_loops_are_wide_in_machine_code(binary):
    """Masked or not: AMD masks an access by an offset that is out of bounds."""
    verb = VERBS[binary.case.verb]
    load, store, pattern = SASS if binary.sass else AMDGCN
    for access, loops in ((load, verb.reading_loops), (store, verb.writing_loops)):
        found = re.findall(pattern.format(access), binary.sass or binary.assembly)
        if loops:
            assert_at_least(len(found), loops * binary.per_tile + verb.masked(loops, binary))


@over(CUDA)
def test_kernel_spills_nothing_and_leaves_room_for_the_grid_on_cuda(binary):
    """65,536 registers a multiprocessor; a warp takes them in units of 256, so 8 a thread."""
    usage = binary.usage()
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert not re.findall(r"\b(?:LDL|STL)\b.*", binary.sass)
    registers = -(-usage["REG"] // 8) * 8
    assert binary.programs >= 2
    assert binary.programs * binary.threads * registers <= 65536


@over(AMD)
def test_kernel_spills_nothing_and_leaves_room_for_the_grid_on_amd(binary):
    """A compute unit has 4 SIMDs, each with 512 vector registers a lane for all of its waves.

    A program of 8 waves puts 2 on each SIMD, so n programs leave 512 / 2n registers a lane, taken
    in units of 8: 128 for the two that the grid starts.
    """
    counts = binary.counts()
    assert counts["vgpr_spill_count"] == counts["sgpr_spill_count"] == 0
    assert counts["private_segment_fixed_size"] == 0
    waves_a_simd = binary.programs * binary.threads // 64 // 4
    registers = -(-counts["vgpr_count"] // 8) * 8
    assert binary.programs >= 2
    assert waves_a_simd * registers <= 512
