"""The one place where kernels are launched."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from struct import Struct
from typing import Any

import torch
import triton
import triton.language as tl

from tritonclip.kernels.walk import WARPS, Occupancy

TL_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
INTERPRETED = bool(triton.knobs.runtime.interpret)
_FLOAT64, _INT64 = Struct("<d"), Struct("<q")
# How every kernel is compiled. Contraction to fused multiply-add is asked for by name, because its
# default depends on the version of Triton.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": True}
# ROCm: a program's 8 waves of 64 threads lie on 4 SIMDs, and 4 waves leave each other 128
# registers. With 3 programs some kernels spill, and with no limit one of them takes 142.
HIP_PROGRAMS = 2
HIP_OPTIONS = {"waves_per_eu": HIP_PROGRAMS * WARPS // 4}
# One wave of the interpreter, which runs programs one after another: more than one, so that
# partials are really combined.
INTERPRETED_WAVE = 3


def wave(device: torch.device, occupancy: Occupancy) -> int:
    """Programs that are resident at once: a launch never starts more."""
    if INTERPRETED:
        return INTERPRETED_WAVE
    programs = HIP_PROGRAMS if torch.version.hip else occupancy.programs
    return programs * multiprocessors(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; PyTorch looks that up anew every time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes the tensors' device the current one, on which Triton launches."""
    if INTERPRETED:
        from tritonclip.kernels.interpreter import as_device

        return as_device()
    return torch.cuda.device(device)


def launch(
    kernel: Any,
    device: torch.device,
    programs: int,
    occupancy: Occupancy,
    arguments: Sequence[Any],
    **constants: Any,
) -> None:
    """Runs a kernel once, on the current stream of the device."""
    registers = HIP_OPTIONS if torch.version.hip else {"maxnreg": occupancy.registers}
    options = OPTIONS if INTERPRETED else OPTIONS | registers
    with _on_device(device):
        kernel[(programs,)](*arguments, **constants, **options)


def float_bits(x: float) -> int:
    """The bits of a float64 as an integer: an argument that no launcher rounds to float32."""
    return int(_INT64.unpack(_FLOAT64.pack(x))[0])
