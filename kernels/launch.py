"""The one place where kernels are launched.

Triton's JIT derives at every call how a kernel is specialised to its arguments. Ours are
specialised to types alone: no argument's alignment or value counts. So a kernel is compiled once
for its types and constants, and the launcher that Triton made for it is called from then on.

A known launch on CUDA derives nothing: `Launches` keeps it as a `Start`, one call of the driver
through `native/kernel.h`, which takes a stream and addresses as integers. It passes what Triton's
launcher would pass. Triton's launcher is called if a kernel needs anything else, such as scratch
memory, if parts of Triton are not those known here, or if there is no extension.
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
# The options of every kernel. Contraction to fused multiply-add is explicit, because its default
# depends on the version of Triton.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": True}
# On ROCm, 2 programs of 8 waves of 64 threads put 4 waves on each of 4 SIMDs, which leaves a thread
# 128 registers. With 3 programs some kernels spill, and without a limit one of them takes 142.
HIP_PROGRAMS = 2
HIP_OPTIONS = {"waves_per_eu": HIP_PROGRAMS * WARPS // 4}
# These pointers have the same dtype in every launch, so keys of compiled kernels leave them out.
TABLES = {
    *("pointers_ptr", "sizes_ptr", "first_chunks_ptr", "tensor_of_chunk_ptr"),
    *("addresses_ptr", "forms_ptr", "pieces_ptr"),
}
# The programs of a wave in the interpreter, which runs them one after another. There are several,
# so that partials are really combined.
INTERPRETED_WAVE = 3


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` for kernels: specialised to types and constants, never to values.

    Every integer parameter has to name its type, or its size would depend on its value.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = [p.name for p in parameters if p.annotation is not tl.constexpr]
    kernel: Any = triton.jit(function, do_not_specialize=runtime)
    # The positions of the arguments whose dtypes vary.
    kernel.typed = [
        i for i, name in enumerate(runtime) if name.endswith("_ptr") and name not in TABLES
    ]
    return kernel


def options_of(occupancy: Occupancy) -> dict[str, Any]:
    """The options with which a kernel is compiled for an occupancy."""
    registers = HIP_OPTIONS if torch.version.hip else {"maxnreg": occupancy.registers}
    return OPTIONS | registers


def wave(device: torch.device, occupancy: Occupancy) -> int:
    """The number of programs that are resident at once; a launch never starts more."""
    if INTERPRETED:
        return INTERPRETED_WAVE
    programs = HIP_PROGRAMS if torch.version.hip else occupancy.programs
    return programs * multiprocessors(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; this is cached, because PyTorch looks them up every time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# Runs a kernel again. It takes the current stream of the current device, then the arguments of
# `launch`, except that addresses may stand for tensors, and floats for their bits. It returns
# whether the kernel started.
Start = Callable[..., bool]
_FLOAT, _INTEGER = Struct("<d"), Struct("<q")
# The extension `tritonclip.backends._native`, once the backend has set it.
native: Any = None


class Runner(NamedTuple):
    """A kernel compiled for types and constants on a device.

    Attributes:
        run: launches the kernel, given the size of the grid and the arguments.
        compiled: Triton's compiled kernel, if Triton's launcher is called directly.
    """

    run: Callable[[int, Sequence[Any]], Any]
    compiled: Any = None

    def start(self, programs: int, n_arguments: int) -> Start:
        """Returns the `Start` of a grid of `programs`; `refuse` if only `run` may launch it."""
        kinds = _kinds_of(self.compiled, n_arguments) if native is not None else None
        driver = _cu_launch_kernel() if kinds is not None else 0
        if not driver:
            return refuse
        function, metadata = self.compiled.function, self.compiled.metadata
        sizes = programs, 32 * metadata.num_warps, metadata.shared
        return partial(native.launch, native.kernel(driver, function, *sizes, kinds, self.compiled))


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches on a device with the same first arguments; each is known from the second time on.

    Attributes:
        device: the device of all tensors.
        arguments: the first arguments of each kernel, such as tables.
        addresses: the addresses of these arguments.
        starts: the known launches by key, which serve other first arguments as well.
    """

    device: torch.device
    arguments: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]
    starts: dict[Hashable, Start] = field(default_factory=dict)

    def starts_again(self, key: Hashable, *arguments: Any) -> bool:
        """Repeats the launch of a key if it is known; returns whether it started.

        Args:
            key: stands for the kernel, the size of the grid, constants, and the dtypes and absence
                of arguments.
            *arguments: the arguments after the first: tensors, addresses, numbers or None.
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
        """Launches a kernel as the function `launch` does, and remembers it under the key."""
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
        device: the device of the tensors among the arguments.
        programs: the size of the grid.
        occupancy: the occupancy for which the kernel is compiled.
        arguments: tensors, integers and None, in the order of the kernel's signature.
        **constants: all constexpr parameters of the kernel.

    Returns:
        The runner of the kernel; None in the interpreter.
    """
    if INTERPRETED:
        from tritonclip.kernels.interpreter import as_device

        with as_device():
            kernel[(programs,)](*arguments, **constants, **OPTIONS)
        return None
    # Looking at these types alone takes a third less time than looking at all types.
    types = [None if (x := arguments[i]) is None else x.dtype for i in kernel.typed]
    key = (kernel.fn, device, *types, *constants.values())
    runner = _runners.get(key)
    if runner is None:
        # Triton loads a compiled kernel for the current device.
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


# The runners by kernel, device, dtypes and constants; a process has some dozens at most.
_runners: dict[tuple[Any, ...], Runner] = {}


def _runner(
    kernel: Any,
    device: torch.device,
    programs: int,
    occupancy: Occupancy,
    arguments: Sequence[Any],
    constants: dict[str, Any],
) -> Runner:
    """Compiles a kernel for such arguments; the JIT launches it if nothing else can."""
    options = options_of(occupancy)
    compiled = kernel.warmup(*arguments, grid=(programs,), **constants, **options)
    # Asynchronous compilation returns a future.
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
        # The three None are the metadata for hooks, and the two hooks.
        start(
            programs, 1, 1, current_stream(index), function, metadata, None, None, None,
            *arguments, *rest,
        )  # fmt: skip

    return Runner(run, compiled)


def refuse(stream: int, *arguments: Any) -> bool:
    """Starts nothing: the `Start` of a kernel that only `launch` may run."""
    return False


# With other values, the driver could not launch a kernel without attributes.
_PLAIN = {"num_ctas": 1, "launch_pdl": False, "launch_cooperative_grid": False}
# The sizes of scratch memory, whose pointers come after the other parameters, in new Tritons.
_SCRATCH = "global_scratch_size", "profile_scratch_size"
# The kind for `native.kernel` and the bits of a parameter, by its type in a signature.
_KINDS = {"i32": (b"i", "32"), "i64": (b"l", "64"), "constexpr": (b"-", "")}


def _kinds_of(compiled: Any, n_arguments: int) -> bytes | None:
    """The kinds of a kernel's arguments for `native.kernel`; None if only Triton may launch it.

    They are read from Triton's signature and compared with the parameters that the PTX declares, so
    that a Triton with other conventions is noticed.
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
    # Constants and None are no parameters. Pointers to scratch memory come last.
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
    """The address of the driver's function; 0 if this process has not loaded the driver."""
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
    """The current stream of a GPU, in less time than PyTorch's object for it takes."""
    stream: int = driver.active.get_current_stream(device.index)
    return stream


def direct_stream(device: torch.device) -> int | None:
    """The current stream, if a known launch may start on it; None if only `launch` may launch.

    Known launches start on the current device, and call no hooks.
    """
    if is_hooked():
        return None
    # A CPU has no index. Comparing the type, which is a string, takes ten times as long.
    if device.index is None:
        return 0
    return current_stream(device) if device.index == torch.cuda.current_device() else None
