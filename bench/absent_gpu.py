"""A GPU that is not there: kernels are compiled for it, or launched to where nothing happens.

The one place of the benchmarks that knows the modules of tritonclip.kernels and the arguments of
its launchers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

# More chunks than any grid has programs.
ELEMENTS = 2**20


class AbsentGPU:
    """The part of a Triton driver that the JIT uses, for a GPU that is not there.

    Args:
        arch: its compute capability, 90 for an H100.
    """

    def __init__(self, arch: int) -> None:
        self._arch = arch
        properties = {"max_shared_mem": 2**20}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            # Module, function, registers, spills, most threads.
            load_binary=lambda name, binary, shared, device: (1, 1, 1, 0, 1024),
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """A launcher that does nothing."""
        return lambda *arguments: None

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """One device an architecture, so that the JIT keeps their binaries apart."""
        return self._arch

    def get_current_stream(self, device: int = 0) -> int:
        """No stream: nothing runs."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The device of the arguments."""
        return torch.device("cpu")


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
def recorded_launches(multiprocessors: int = 1) -> Iterator[list[Launch]]:
    """Records launches instead of launching, as on a GPU of so many multiprocessors."""
    launches: list[Launch] = []

    def record(
        kernel: Any, device: Any, programs: int, occupancy: Any, arguments: Any, **constants: Any
    ) -> None:
        launches.append(Launch(kernel, device, programs, occupancy, tuple(arguments), constants))

    launch = kernel_module("launch")
    with (
        replaced_launch(record),
        patch.object(launch, "multiprocessors", lambda device: multiprocessors),
    ):
        yield launches


@contextmanager
def absent_gpu(arch: int) -> Iterator[AbsentGPU]:
    """Makes an absent GPU the active one of Triton; nothing compiled for another is launched."""
    from triton.runtime import driver

    driver.set_active(AbsentGPU(arch))
    try:
        with patch.object(kernel_module("launch"), "_runners", {}):
            yield driver.active
    finally:
        # Without a GPU there is no other driver to go back to.
        if torch.cuda.is_available():
            driver.reset_active()


def launches_of(dtype: torch.dtype) -> dict[str, Launch]:
    """One launch of each kernel on a long list, as its launcher asks for it, by the kernel's name.

    Names end with "each" where every gradient has a norm.
    """
    norm, scale, clamp = map(kernel_module, ("norm", "scale", "clamp"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    terms = {"max_norm": 1.0, "norm_type": 2.0, "eps": 1e-6, "dtype": wide, "grad_scale": 1.0}
    with recorded_launches() as launches:
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
