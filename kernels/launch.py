"""The one place where kernels are launched.

Triton's JIT derives at every call how a kernel is specialised to its arguments. Ours are
specialised to types alone: no argument's alignment or value counts. So a kernel is compiled once
for its types and constants, and the launcher that Triton made for it is called from then on.

A known launch on CUDA derives nothing: `Launches` keep it as a `Start`, one call of the driver
through `native/kernel.h`, which takes a stream and addresses as integers. It hands over what
Triton's launcher would. Where a kernel needs anything else, such as memory for scratch, where parts
of Triton are not those known here, or where there is no extension, Triton's launcher is called.
"""

import ctypes
import inspect
import os
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from struct import Struct
from typing import Any, NamedTuple

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
_RUNTIME = triton.knobs.runtime
INTERPRETED = bool(_RUNTIME.interpret)
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


# Runs a kernel again: takes the current stream of the current device, then the arguments of
# `launch`, but addresses may stand for tensors, and floats for their bits. Returns False where it
# did not start.
Start = Callable[..., bool]
_FLOAT, _INTEGER = Struct("<d"), Struct("<q")
# The extension `tritonclip.backends._native`, once the backend has one.
native: Any = None


class Runner(NamedTuple):
    """A kernel compiled for types and constants on a device.

    Attributes:
        run: launches it, given the size of the grid and the arguments.
        compiled: by Triton, where it is launched by Triton's launcher.
    """

    run: Callable[[int, Sequence[Any]], Any]
    compiled: Any = None

    def start(self, programs: int, n_arguments: int) -> Start:
        """Launches the kernel again as so many programs; never starts where only `run` may."""
        kinds = _kinds_of(self.compiled, n_arguments) if native is not None else None
        driver = _cu_launch_kernel() if kinds is not None else 0
        if not driver:
            return refuse
        function, metadata = self.compiled.function, self.compiled.metadata
        sizes = programs, 32 * metadata.num_warps, metadata.shared
        return partial(native.launch, native.kernel(driver, function, *sizes, kinds, self.compiled))


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches on a device that take the same arguments first, each known from the second time on.

    Attributes:
        device: of all tensors.
        arguments: the first ones of each kernel, such as tables.
        addresses: of these.
        starts: known launches, by what tells them apart; also of other arguments.
    """

    device: torch.device
    arguments: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]
    starts: dict[Hashable, Start] = field(default_factory=dict)

    def starts_again(self, key: Hashable, *arguments: Any) -> bool:
        """Launches what was launched under this key before, if it is known.

        Args:
            key: stands for the kernel, the size of the grid, constants, and the dtypes and absence
                of arguments.
            *arguments: the others: tensors, addresses, other integers, floats, None.
        """
        start = self.starts.get(key)
        stream = None if start is None else direct_stream(self.device)
        if start is None or stream is None:
            return False
        return start(stream, *self.addresses, *arguments)

    def launch(
        self,
        key: Hashable,
        kernel: Any,
        programs: int,
        occupancy: Occupancy,
        arguments: Sequence[Any],
        **constants: Any,
    ) -> None:
        """Launches a kernel, as `launch` does, and knows it from then on by the key."""
        bits = [_INTEGER.unpack(_FLOAT.pack(a))[0] if type(a) is float else a for a in arguments]
        every = (*self.arguments, *bits)
        runner = launch(kernel, self.device, programs, occupancy, every, **constants)
        if runner is not None and key not in self.starts:
            self.starts[key] = runner.start(programs, len(every))


def launch(
    kernel: Any,
    device: torch.device,
    programs: int,
    occupancy: Occupancy,
    arguments: Sequence[Any],
    **constants: Any,
) -> Runner | None:
    """Runs a kernel once, on the current stream of the device.

    Args:
        kernel: decorated by `jit`.
        device: of the tensors among the arguments.
        programs: size of the grid.
        occupancy: that the kernel is compiled for.
        arguments: tensors, integers and None, in the order of the kernel's signature.
        **constants: its constexpr parameters, all of them.

    Returns:
        What ran; None for the interpreter.
    """
    if INTERPRETED:
        from tritonclip.kernels.interpreter import as_device

        with as_device():
            kernel[(programs,)](*arguments, **constants, **OPTIONS)
        return None
    # A third less time than for all arguments.
    types = [None if (x := arguments[i]) is None else x.dtype for i in kernel.typed]
    key = (kernel.fn, device, *types, *constants.values())
    runner = _runners.get(key)
    if runner is None:
        # What is compiled is loaded for the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            runner = _runner(kernel, device, programs, occupancy, arguments, constants)
        _runners[key] = runner
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        runner.run(programs, arguments)
    else:
        # Triton launches on the current device.
        with torch.cuda.device(device):
            runner.run(programs, arguments)
    return runner


# By kernel, device, dtypes and constants; some dozens at most in a process.
_runners: dict[tuple[Any, ...], Runner] = {}


def _runner(
    kernel: Any,
    device: torch.device,
    programs: int,
    occupancy: Occupancy,
    arguments: Sequence[Any],
    constants: dict[str, Any],
) -> Runner:
    """The kernel compiled for such arguments; launched through the JIT where it has to be."""
    options = options_of(occupancy)
    compiled = kernel.warmup(*arguments, grid=(programs,), **constants, **options)
    # A future, where compilation is asynchronous.
    compiled = compiled.result() if hasattr(compiled, "result") else compiled
    if not hasattr(type(compiled), "__getitem__"):
        return Runner(
            lambda programs, arguments: kernel[(programs,)](*arguments, **constants, **options)
        )
    rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        return Runner(lambda programs, arguments: compiled[programs, 1, 1](*arguments, *rest))
    start, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    current_stream, index = driver.active.get_current_stream, device.index

    def run(programs: int, arguments: Sequence[Any]) -> None:
        if is_hooked():
            compiled[programs, 1, 1](*arguments, *rest)
            return
        # No metadata for hooks, and no hooks.
        start(
            programs, 1, 1, current_stream(index), function, metadata, None, None, None,
            *arguments, *rest,
        )  # fmt: skip

    return Runner(run, compiled)


def refuse(stream: int, *arguments: Any) -> bool:
    """Starts nothing: the `Start` of a kernel that only `launch` may run."""
    return False


# What a driver's launch without attributes cannot do.
_PLAIN = {"num_ctas": 1, "launch_pdl": False, "launch_cooperative_grid": False}
# Memory behind the last parameters, as far as an installed Triton has it.
_SCRATCH = "global_scratch_size", "profile_scratch_size"
# By the type in a signature, the kind for `native.kernel` and the bits of the parameter.
_KINDS = {"i32": (b"i", "32"), "i64": (b"l", "64"), "constexpr": (b"-", "")}


def _kinds_of(compiled: Any, n_arguments: int) -> bytes | None:
    """The kinds of a kernel's arguments for `native.kernel`; None where only Triton may launch it.

    They are read from Triton's signature and compared with those that the PTX declares, so that a
    Triton with other conventions is noticed.
    """
    try:
        metadata, source = compiled.metadata, compiled.src
        sizes = metadata.num_warps, metadata.num_ctas, metadata.shared
        plain = all(getattr(metadata, name) == value for name, value in _PLAIN.items())
        plain = plain and compiled.packed_metadata[:3] == sizes
        scratch = [getattr(metadata, name) for name in _SCRATCH if hasattr(metadata, name)]
        types = [source.signature[name] for name in source.fn.arg_names]
        known = [(b"p", "64") if of[0] == "*" else _KINDS[of] for of in types]
        declared: Any = re.search(r"\.entry \w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
        parameters = re.findall(r"\.param \.[a-z](\d+)", declared[1])
    except (AttributeError, KeyError, TypeError):
        return None
    # A constant is no parameter, None neither. Pointers to scratch memory come last.
    expected = [bits for _, bits in known if bits] + ["64"] * len(scratch)
    if (
        not plain
        or any(scratch)
        or type(compiled.function) is not int
        or any(bits for _, bits in known[n_arguments:])
        or parameters != expected
    ):
        return None
    return b"".join(kind for kind, _ in known[:n_arguments])


@cache
def _cu_launch_kernel() -> int:
    """The address of the driver's function; 0 where this process has not loaded the driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        return ctypes.cast(library.cuLaunchKernel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def is_hooked() -> bool:
    """Whether somebody, such as a profiler, wants to be told of every launch."""
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    # Newer Tritons have chains of calls for hooks, older ones a function or None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: torch.device) -> int:
    """The stream of a GPU that is current; in less time than PyTorch's object of it."""
    stream: int = driver.active.get_current_stream(device.index)
    return stream


def direct_stream(device: torch.device) -> int | None:
    """The current stream, if a known launch may start on it; None where only `launch` may launch.

    Known launches start on the current device, and no hook is told of them.
    """
    if is_hooked():
        return None
    # Of a CPU; its type as a string takes ten times as long.
    if device.index is None:
        return 0
    return current_stream(device) if device.index == torch.cuda.current_device() else None
