"""The one place where kernels are launched.

Triton's JIT derives at every call how a kernel is specialised to its arguments. Ours are
specialised to types alone: no argument's alignment or value counts. So a kernel is compiled once
for its types and constants, and the launcher that Triton made for it is called from then on.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from tritonclip.kernels.access import WARPS, Occupancy

TL_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
INTERPRETED = bool(triton.knobs.runtime.interpret)
# How every kernel is compiled. Contraction to fused multiply-add is asked for by name, because its
# default depends on the version of Triton.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": True}
# ROCm: a program's 8 waves of 64 threads lie on 4 SIMDs, and 4 waves leave each other 128
# registers. With 3 programs some kernels spill, and with no limit one of them takes 142.
HIP_PROGRAMS = 2
HIP_OPTIONS = {"waves_per_eu": HIP_PROGRAMS * WARPS // 4}
# Pointers to memory of one dtype in every launch: a compiled kernel is known without them.
TABLES = {
    *("pointers_ptr", "sizes_ptr", "first_chunks_ptr", "tensor_of_chunk_ptr"),
    *("addresses_ptr", "forms_ptr", "pieces_ptr"),
}
# One wave of the interpreter, which runs programs one after another: more than one, so that
# partials are really combined.
INTERPRETED_WAVE = 3


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` for kernels: specialised to types and constants, never to values.

    Every integer parameter names its type: else its size would depend on its value.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = [p.name for p in parameters if p.annotation is not tl.constexpr]
    kernel: Any = triton.jit(function, do_not_specialize=runtime)
    # Places of the arguments whose dtypes vary.
    kernel.typed = [
        i for i, name in enumerate(runtime) if name.endswith("_ptr") and name not in TABLES
    ]
    return kernel


def options_of(occupancy: Occupancy) -> dict[str, Any]:
    """How a kernel is compiled for an occupancy."""
    registers = HIP_OPTIONS if torch.version.hip else {"maxnreg": occupancy.registers}
    return OPTIONS | registers


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


def launch(
    kernel: Any,
    device: torch.device,
    programs: int,
    occupancy: Occupancy,
    arguments: Sequence[Any],
    **constants: Any,
) -> None:
    """Runs a kernel once, on the current stream of the device.

    Args:
        kernel: decorated by `jit`.
        device: of the tensors among the arguments.
        programs: size of the grid.
        occupancy: that the kernel is compiled for.
        arguments: tensors, integers and None, in the order of the kernel's signature.
        **constants: its constexpr parameters, all of them.
    """
    if INTERPRETED:
        from tritonclip.kernels.interpreter import as_device

        with as_device():
            kernel[(programs,)](*arguments, **constants, **OPTIONS)
        return
    # A third less time than for all arguments.
    types = [None if (x := arguments[i]) is None else x.dtype for i in kernel.typed]
    key = (kernel.fn, device, *types, *constants.values())
    run = _runners.get(key)
    if run is None:
        # What is compiled is loaded for the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            run = _runner(kernel, device, programs, occupancy, arguments, constants)
        _runners[key] = run
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        run(programs, arguments)
    else:
        # Triton launches on the current device.
        with torch.cuda.device(device):
            run(programs, arguments)


# By kernel, device, dtypes and constants; some dozens at most in a process.
_runners: dict[tuple[Any, ...], Callable[[int, Sequence[Any]], Any]] = {}


def _runner(
    kernel: Any,
    device: torch.device,
    programs: int,
    occupancy: Occupancy,
    arguments: Sequence[Any],
    constants: dict[str, Any],
) -> Callable[[int, Sequence[Any]], Any]:
    """Launches the kernel compiled for such arguments; through the JIT where it has to be."""
    options = options_of(occupancy)
    compiled = kernel.warmup(*arguments, grid=(programs,), **constants, **options)
    # A future, where compilation is asynchronous.
    compiled = compiled.result() if hasattr(compiled, "result") else compiled
    if not hasattr(type(compiled), "__getitem__"):
        return lambda programs, arguments: kernel[(programs,)](*arguments, **constants, **options)
    rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        return lambda programs, arguments: compiled[programs, 1, 1](*arguments, *rest)
    start, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    current_stream, index = driver.active.get_current_stream, device.index

    def run(programs: int, arguments: Sequence[Any]) -> None:
        if _is_hooked():
            compiled[programs, 1, 1](*arguments, *rest)
            return
        # No metadata for hooks, and no hooks.
        start(
            programs, 1, 1, current_stream(index), function, metadata, None, None, None,
            *arguments, *rest,
        )  # fmt: skip

    return run


def _is_hooked() -> bool:
    """Whether somebody, such as a profiler, wants to be told of every launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Newer Tritons have chains of calls for hooks, older ones a function or None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: torch.device) -> int:
    """The stream of a GPU that is current; in less time than PyTorch's object of it."""
    stream: int = driver.active.get_current_stream(device.index)
    return stream
