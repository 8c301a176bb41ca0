"""Which backend serves which gradients, and why."""

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, requires

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.backends.interface import Layout
from tritonclip.backends.native import NativeLayout, fault, loops
from tritonclip.backends.operators import ARITHMETIC, has_dense_units
from tritonclip.backends.torch import TorchLayout
from tritonclip.messages import warn_user
from tritonclip.modes import is_observed

# The backend that "auto" takes, if nothing keeps it from it.
_OF_DEVICE = {"cpu": "native", "cuda": "triton"}


def layout_of(tensors: list[Tensor], weights: Sequence[Tensor] | None = None) -> Layout:
    """The layout of gradients of one device and dtype, of the backend that serves them.

    They are real and dense in memory. With weights, or none of them, it is one by rows, of
    gradients as users see them. Raises NotImplementedError where a backend was asked for by name
    and cannot serve the device.
    """
    device = tensors[0].device
    name = backend_name(device)
    by_rows = weights is not None
    if name == "torch" or (by_rows and not _serves_rows(name, tensors, weights or tensors)):
        return torch_layout(tensors, weights)
    if name == "native":
        return NativeLayout(tensors, weights)
    backend = importlib.import_module("tritonclip.backends.triton")
    layout: Layout = backend.TritonLayout(tensors, weights)
    return layout


def torch_layout(tensors: list[Tensor], weights: Sequence[Tensor] | None = None) -> Layout:
    """The layout of the torch backend."""
    # Tensors that dual numbers, transforms or a tracer follow give no numbers.
    on_host = host_decides(tensors[0].device) and not is_observed()
    return TorchLayout(tensors, weights, on_host=on_host)


def _serves_rows(name: str, grads: list[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether a backend other than torch's takes the rows of these tensors."""
    kinds = {weight.dtype for weight in weights}
    serves = len(kinds) == 1 and weights[0].dtype.to_real() in ARITHMETIC
    if name == "native":
        return serves
    # As many reals in a unit of the weights as in one of the gradients.
    serves = serves and weights[0].is_complex() == grads[0].is_complex()
    if not (serves and all(map(has_dense_units, [*grads, *weights]))):
        _warn_once(
            "tritonclip's kernels read units that are dense in memory, and weights of one dtype, "
            "complex where their gradients are: others take the slower torch backend; make "
            "parameters contiguous or channels_last where speed matters"
        )
        return False
    return True


def host_decides(device: torch.device) -> bool:
    """Whether the host can read a device's values without waiting for it."""
    return device.type == "cpu"


def backend_name(device: torch.device) -> str:
    """The backend of gradients of a kind: 'triton', 'native' or 'torch'; errors as `layout_of`."""
    requested = settings.current().backend
    name = _OF_DEVICE.get(device.type, "torch") if requested == "auto" else requested
    if name == "torch":
        return "torch"
    reason = _reason_against(name, device.type)
    if reason is not None and requested == name:
        raise NotImplementedError(f"the {name} backend was asked for, but {reason}")
    if reason is not None:
        _warn_once(
            f"tritonclip uses its slower torch backend on {device.type}: {reason}, or set "
            "TRITONCLIP_BACKEND=torch, where that is intended"
        )
        return "torch"
    if not is_observed():
        return name
    if name == "triton":
        _warn_once(
            "tritonclip's kernels cannot read tensors inside torch.func, forward-mode derivatives "
            "and dispatch modes: clip outside where speed matters, as PyTorch's operators are "
            "slower"
        )
    return "torch"


@cache
def triton_fault() -> str | None:
    """Why triton cannot be imported, with a remedy; None where it can."""
    try:
        importlib.import_module("triton")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return f"triton is not installed: {_triton_remedy()}"
        if isinstance(error, ModuleNotFoundError) and error.name == "numpy":
            return "triton is installed, and its interpreter needs numpy: pip install numpy"
        # One that was built for other libraries raises all kinds of errors.
        return (
            f"triton is installed but cannot be imported ({type(error).__name__}: {error}): "
            f"install the one that your torch was built with: {_triton_remedy()}"
        )
    return None


def _triton_remedy() -> str:
    if sys.platform != "linux":
        return "PyPI has it for Linux only: on Windows, run Python in WSL"
    try:
        # Of torch's wheel, such as triton==3.7.1 or pytorch-triton-rocm==3.4.0.
        needed = requires("torch") or []
    except PackageNotFoundError:
        needed = []
    names = (name.partition(";")[0].strip() for name in needed if "triton" in name)
    return f'run pip install "{next(names, "tritonclip[triton]")}"'


def _reason_against(name: str, on: str) -> str | None:
    """What keeps a backend from a type of device, with a remedy; None where nothing does."""
    if name == "native":
        if on != "cpu":
            return f"it runs on CPU tensors, not on {on}: use backend 'auto'"
        return fault if loops is None else None
    if (reason := triton_fault()) is not None:
        return reason
    if settings.interpreting() and on != "cpu":
        return f"TRITON_INTERPRET=1 runs kernels on CPU tensors, not on {on}: unset it"
    if not settings.interpreting() and on != "cuda":
        return (
            f"triton does not run on {on} tensors: use backend 'auto', or set TRITON_INTERPRET=1 "
            "to interpret kernels"
        )
    return None


@cache
def _warn_once(message: str) -> None:
    warn_user(message)
