"""A GPU that is not there, for Triton's JIT: kernels compile, and launches reach a driver that does
nothing."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tritonclip.backends.interface import Clip

# More chunks than any grid has programs.
ELEMENTS = 2**20


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


@contextmanager
def replaced_launch(launch: Callable[..., Any]) -> Iterator[None]:
    """Replaces the function that launches kernels, which then launches known ones too."""
    unknown = patch.object(kernel_module("launch").Launches, "starts_again", lambda *_: False)
    with patch.object(kernel_module("launch"), "launch", launch), unknown:
        yield


@contextmanager
def absent_gpu(arch: int) -> Iterator[None]:
    """Makes an absent NVIDIA GPU the active one of Triton; `arch` is 90 for an H100."""
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


def launches() -> list[Launch]:
    """A launch of each kernel on a long float32 list: norm, scale, both for each, and clamp."""
    found = []

    def record(kernel, device, programs, occupancy, arguments, **constants):
        found.append(Launch(kernel, device, programs, occupancy, tuple(arguments), constants))

    backend = importlib.import_module("tritonclip.backends.triton")
    one = patch.object(kernel_module("launch"), "multiprocessors", lambda device: 1)
    with replaced_launch(record), one:
        device = torch.device("cpu")
        table = kernel_module("tables").lay_out(device, torch.float32, [ELEMENTS], [16])
        batch = backend.TritonBatch([], table, torch.float32)
        clip = Clip(norm_type=2.0, eps=1e-6, limit=1.0, grad_scale=1.0)
        batch.scale_(batch.norm(2.0, "all"), clip)
        batch.scale_(batch.norm(2.0, "each"), clip._replace(of="each"))
        batch.clamp_(-1.0, 1.0, 1.0)
    return found
