"""Which backend serves which gradients, and why."""

import importlib
from functools import cache

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.backends.interface import Layout, UnitLayout
from tritonclip.backends.native import CODES, NativeLayout, fault, loops
from tritonclip.backends.operators import TorchLayout
from tritonclip.backends.units import TorchUnitLayout, has_dense_units
from tritonclip.messages import warn_user

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def layout_of(tensors: list[Tensor], *, flat: bool, negated: bool = False) -> Layout:
    """The layout of some gradients, of the backend that serves them.

    Args:
        tensors: real, of one device and dtype; at least one.
        flat: each is dense in memory, and contiguous where its layout is not `by_address`.
        negated: some are lazily negated, and the sign of an element matters. Where it does not,
            kernels may read them too.

    Raises:
        RuntimeError: a backend was asked for by name and cannot serve the device.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    name = backend_name(device, dtype, flat=flat, negated=negated)
    if name == "native":
        return NativeLayout(tensors)
    if name == "torch":
        return torch_layout(device)
    backend = importlib.import_module("tritonclip.backends.triton")
    layout: Layout = backend.TritonLayout(tensors)
    return layout


def torch_layout(device: torch.device) -> Layout:
    """The layout of the torch backend."""
    return TorchLayout(on_host=host_decides(device))


def unit_layout_of(
    grads: list[Tensor], weights: list[Tensor], dtype: torch.dtype, *, flat: bool
) -> UnitLayout:
    """The layout of some gradients for a rule by unit, of the backend that serves them.

    Args:
        grads: of one device and dtype, as users see them; at least one.
        weights: theirs.
        dtype: of results.
        flat: each gradient is dense in memory.

    Raises:
        RuntimeError: triton was asked for by name and cannot serve the device.
    """
    device, kinds = grads[0].device, {weight.dtype for weight in weights}
    name = backend_name(device, grads[0].dtype.to_real(), flat=flat)
    if name == "triton":
        known = len(kinds) == 1 and next(iter(kinds)).to_real() in KERNEL_DTYPES
        # As many reals in a unit of the weights as in one of the gradients.
        known = known and weights[0].is_complex() == grads[0].is_complex()
        if known and all(map(has_dense_units, [*grads, *weights])):
            backend = importlib.import_module("tritonclip.backends.triton_units")
            layout: UnitLayout = backend.TritonUnitLayout(grads, weights, dtype)
            return layout
        _warn_once(
            "tritonclip's kernels read units that are dense in memory, and weights of one dtype, "
            "complex where their gradients are: others take the slower torch backend; make "
            "parameters contiguous or channels_last where speed matters"
        )
    by_loops = name == "native"
    return TorchUnitLayout(grads, dtype, on_host=host_decides(device), by_loops=by_loops)


def host_decides(device: torch.device) -> bool:
    """Whether the host can read a device's values without waiting for it."""
    return device.type == "cpu"


def backend_name(
    device: torch.device, dtype: torch.dtype, *, flat: bool = True, negated: bool = False
) -> str:
    """The backend of gradients of a kind: 'triton', 'native' or 'torch'; errors as `layout_of`."""
    requested = settings.current().backend
    if requested == "torch":
        return "torch"
    if requested == "native" or (requested == "auto" and device.type == "cpu"):
        return _name_on_cpu(device, dtype, requested, flat=flat, negated=negated)
    if requested == "auto" and device.type != "cuda":
        return "torch"
    reason = _why_not_triton(device.type)
    if reason is not None:
        if requested == "triton":
            raise RuntimeError(f"the triton backend was asked for, but {reason}")
        _warn_once(f"tritonclip uses its slower torch backend on {device.type}: {reason}")
        return "torch"
    if dtype not in KERNEL_DTYPES:
        _warn_once(
            f"tritonclip's kernels do not read {dtype}: these gradients take the slower torch "
            "backend"
        )
        return "torch"
    if not flat or negated:
        _warn_once(
            "tritonclip's kernels read gradients that are dense in memory: those with gaps or "
            "lazily negated take the slower torch backend; replace them by grad.contiguous() or "
            "grad.resolve_neg() where speed matters"
        )
        return "torch"
    return "triton"


def _name_on_cpu(
    device: torch.device, dtype: torch.dtype, requested: str, *, flat: bool, negated: bool
) -> str:
    """'native' or 'torch': the backend of gradients of a kind on a CPU."""
    reason = None
    if device.type != "cpu":
        reason = f"it runs on CPU tensors, not on {device.type}: use backend 'auto'"
    elif loops is None:
        reason = fault
    if reason is None:
        return "native" if dtype in CODES and flat and not negated else "torch"
    if requested == "native":
        raise RuntimeError(f"the native backend was asked for, but {reason}")
    _warn_once(
        f"tritonclip uses its slower torch backend on {device.type}: {reason}, or set "
        "TRITONCLIP_BACKEND=torch, where that is intended"
    )
    return "torch"


def warn_without_kernels(device: torch.device, dtype: torch.dtype, where: str) -> None:
    """Says once that kernels cannot serve a place, for tensors that they serve elsewhere."""
    if backend_name(device, dtype) == "triton":
        _warn_once(
            f"tritonclip's kernels cannot read tensors {where}: clipping takes the slower PyTorch "
            "operators; clip outside where speed matters"
        )


@cache
def triton_fault() -> str | None:
    """Why triton cannot be imported, with a remedy; None where it can."""
    try:
        importlib.import_module("triton")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return "triton is not installed: pip install triton"
        if isinstance(error, ModuleNotFoundError) and error.name == "numpy":
            return "triton is installed, and its interpreter needs numpy: pip install numpy"
        # One that was built for other libraries raises all kinds of errors.
        return (
            f"triton is installed but cannot be imported ({type(error).__name__}: {error}): "
            "install the one that your torch was built with"
        )
    return None


def _why_not_triton(device: str) -> str | None:
    """The reason why triton cannot serve a device, with a remedy; None where it can."""
    fault = triton_fault()
    if fault is not None:
        return fault
    if settings.interpreting():
        return (
            None
            if device == "cpu"
            else f"TRITON_INTERPRET=1 runs kernels on CPU tensors, not on {device}: unset it"
        )
    if device != "cuda":
        return (
            f"triton does not run on {device} tensors: use backend 'auto', or set "
            "TRITON_INTERPRET=1 to interpret kernels"
        )
    return None


@cache
def _warn_once(message: str) -> None:
    warn_user(message)
