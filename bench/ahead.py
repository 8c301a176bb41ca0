"""Every kernel, compiled as its launcher asks for it, for a GPU that is not there."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from tritonclip.kernels import chunks, clamp, launch, norm, scale
from tritonclip.kernels.walk import CHUNK
from tritonclip.limit import Limit


class AbsentGPU:
    """What Triton's JIT asks of a driver before it compiles, for a GPU that is not there."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        """The architecture to compile for."""
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """One device an architecture, so that the JIT keeps their binaries apart."""
        return self._arch

    def get_current_stream(self, device: int = 0) -> int:
        """No stream: nothing runs."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the arguments lie."""
        return torch.device("cpu")


def _norm(table: chunks.ChunkTable, each: bool) -> None:
    out = torch.empty(norm.count_norms(table, each), dtype=torch.float64)
    norm.norm(table, 2.0, out, each=each)


def _scale(table: chunks.ChunkTable, each: bool) -> None:
    wide = torch.float64 if table.dtype == torch.float64 else torch.float32
    limit = Limit(1.0, 2.0, 1e-6, wide)
    norms = torch.empty(norm.count_norms(table, each), dtype=torch.float64)
    if each:
        scale.scale_each_(table, norms, 0, limit)
    else:
        scale.scale_(table, norms, limit)


KERNELS: dict[str, Callable[[chunks.ChunkTable], None]] = {
    "norm": lambda table: _norm(table, False),
    "norm, each": lambda table: _norm(table, True),
    "scale": lambda table: _scale(table, False),
    "scale, each": lambda table: _scale(table, True),
    "clamp": lambda table: clamp.clamp_(table, -1.0, 1.0),
}


@contextmanager
def compiling(arch: int, compiled: list[tuple[Any, int]]) -> Iterator[None]:
    """Launchers compile instead of launching; kernels and programs a multiprocessor are kept."""

    def compile_only(
        kernel: Any, device: Any, programs: int, occupancy: Any, arguments: Any, **constants: Any
    ) -> None:
        options = {**launch.OPTIONS, "maxnreg": occupancy.registers}
        result = kernel.warmup(*arguments, grid=(programs,), **constants, **options)
        kept = result.result() if hasattr(result, "result") else result
        compiled.append((kept, programs))

    triton.runtime.driver.set_active(AbsentGPU(arch))
    with ExitStack() as stack:
        for module in (norm, scale, clamp):
            stack.enter_context(patch.object(module, "launch", compile_only))
        stack.enter_context(patch.object(launch, "multiprocessors", lambda device: 1))
        yield


def compiled_kernels(arch: int, dtype: torch.dtype) -> list[tuple[str, Any, int]]:
    """Name, binary, and programs that the grid starts on a multiprocessor, of each kernel."""
    compiled: list[tuple[Any, int]] = []
    with compiling(arch, compiled):
        # More chunks than any grid has programs.
        table = chunks.chunk_table([torch.zeros(64 * CHUNK, dtype=dtype)])
        for run in KERNELS.values():
            run(table)
    return [(name, *one) for name, one in zip(KERNELS, compiled, strict=True)]
