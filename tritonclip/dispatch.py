"""Which backend serves which gradients, and how the parts of one call come together.

The only place that decides between backends, and the only one that reads the environment.
"""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from tritonclip import torch_backend
from tritonclip.gradient_list import Group
from tritonclip.limit import Limit

BACKENDS = ("auto", "triton", "torch")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Backend(Protocol):
    """The verbs; see `tritonclip.torch_backend` for what each promises."""

    def prepare(self, group: Group, /) -> Any:
        """What the other verbs take in place of a group's tensors."""

    def count_norms(self, handle: Any, each: bool, /) -> int:
        """How many norms `norm` writes."""

    def norm(self, handle: Any, norm_type: float, out: Tensor, /, *, each: bool = False) -> None:
        """Measures gradients."""

    def scale_(
        self, handle: Any, norms: Tensor, limit: Limit, /, *, write: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Multiplies all gradients by one coefficient."""

    def scale_each_(
        self,
        handle: Any,
        norms: Tensor,
        first: int,
        limit: Limit,
        /,
        *,
        erase: Tensor | None = None,
        write: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Multiplies each gradient by a coefficient of its own."""

    def clamp_(self, handle: Any, low: float, high: float, grad_scale: float | Tensor, /) -> None:
        """Clamps gradients."""


_asked: ContextVar[str | None] = ContextVar("tritonclip_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Chooses the backend of every call in the block, before TRITONCLIP_BACKEND.

    Args:
        name: "triton", "torch", or "auto": triton for CUDA and ROCm tensors where triton can be
            imported, else torch.

    Raises:
        ValueError: another name.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.ones(3, requires_grad=True)
        >>> weight.sum().backward()
        >>> with tritonclip.use_backend("torch"):
        ...     norm = tritonclip.clip_(weight, 1.0)
    """
    token = _asked.set(_checked_name(name, "use_backend"))
    try:
        yield
    finally:
        _asked.reset(token)


def _checked_name(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: expected 'auto', 'triton' or 'torch', got {name!r}")
    return name


def asked_backend() -> str:
    """The backend that was asked for: by `use_backend`, else by TRITONCLIP_BACKEND, else 'auto'."""
    asked = _asked.get()
    if asked is not None:
        return asked
    return _checked_name(
        (os.environ.get("TRITONCLIP_BACKEND") or "auto").lower(), "TRITONCLIP_BACKEND"
    )


def verification_asked() -> bool:
    """Whether TRITONCLIP_VERIFY says so."""
    asked = os.environ.get("TRITONCLIP_VERIFY", "").lower()
    if asked in ("", "0", "false", "no", "off"):
        return False
    if asked in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"TRITONCLIP_VERIFY: expected '1' or '0', got {asked!r}")


@cache
def triton_found() -> bool:
    """Whether triton can be imported; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _kernels() -> Backend:
    return cast(Backend, importlib.import_module("tritonclip.kernels.backend"))


def backend_name(group: Group, *, by_sign: bool = False) -> str:
    """'triton' or 'torch': what serves a group of gradients.

    Args:
        group: the gradients.
        by_sign: whether signs matter to what will be done. Where they do not, kernels may read
            lazily negated gradients too.

    Raises:
        RuntimeError: triton was asked for by name and cannot serve the group's device.
    """
    asked, device = asked_backend(), group.device.type
    if asked == "torch" or (asked == "auto" and device != "cuda"):
        return "torch"
    reason = _why_not_triton(device)
    if reason is not None:
        if asked == "triton":
            raise RuntimeError(f"the triton backend was asked for, but {reason}")
        _warn_once(f"tritonclip uses its slower torch backend on {device}: {reason}")
        return "torch"
    if group.dtype not in KERNEL_DTYPES:
        _warn_once(
            f"tritonclip's kernels do not read {group.dtype}: these gradients take the slower "
            "torch backend"
        )
        return "torch"
    if not group.flat or (by_sign and group.has_negated):
        _warn_once(
            "tritonclip's kernels read gradients that are dense in memory: those with gaps or "
            "lazily negated take the slower torch backend; replace them by grad.contiguous() or "
            "grad.resolve_neg() where speed matters"
        )
        return "torch"
    return "triton"


def _why_not_triton(device: str) -> str | None:
    """What keeps triton from a device, and what to do about it; None where nothing does."""
    if not triton_found():
        return "triton is not installed: pip install triton"
    if interpreting():
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
    warnings.warn(message, UserWarning, stacklevel=6)


def backend_of(group: Group, *, by_sign: bool = False) -> Backend:
    """The backend that serves a group; see `backend_name`."""
    if backend_name(group, by_sign=by_sign) == "triton":
        return _kernels()
    return cast(Backend, torch_backend)


@dataclass(slots=True)
class _Part:
    """A group in the hands of its backend, and where its norms begin among those of its device."""

    group: Group
    backend: Backend
    written: Any
    measured: Any
    first: int = 0
    count: int = 0
    # Temporaries that a backend knows by their addresses only.
    kept: Sequence[Tensor] = ()


@dataclass(slots=True)
class Measured:
    """Norms of all parts of a call, on every device that has gradients.

    Attributes:
        each: whether norms are told apart by gradient.
    """

    each: bool
    _parts: list[_Part]
    _norms: dict[torch.device, Tensor]

    def scale_(self, limit: Limit, *, write: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Scales every group; returns norms and coefficients by group."""
        erase: dict[torch.device, Tensor] = {}
        if self.each and write and limit.erase_nonfinite:
            # One gradient's norm decides for all: every norm has to be known before the first
            # write.
            erase = self._any_nonfinite([norms for norms, _ in self.scale_(limit, write=False)])
        results = []
        for part in self._parts:
            device = part.group.device
            norms = self._norms[device]
            if self.each:
                result = part.backend.scale_each_(
                    part.written, norms, part.first, limit, erase=erase.get(device), write=write
                )
            else:
                result = part.backend.scale_(part.written, norms, limit, write=write)
            results.append(result)
            if write:
                torch.autograd.graph.increment_version(part.group.written)
        return results

    def _any_nonfinite(self, norms: Sequence[Tensor]) -> dict[torch.device, Tensor]:
        """Whether any norm is not finite, 0-d bool, on every device that has gradients."""
        flags = [~torch.isfinite(n).all() for n in norms]
        return {d: torch.stack([f.to(d) for f in flags]).any() for d in self._norms}


def measure(groups: Sequence[Group], norm_type: float, *, each: bool = False) -> Measured:
    """Measures gradients: one launch a group on a GPU."""
    parts = _parts(groups)
    if norm_type != 2.0:
        for part in parts:
            if part.group.pairs:
                # Kernels tell gradients apart by the chunks that they write to, and moduli have
                # others.
                if each:
                    part.backend, part.written = cast(Backend, torch_backend), part.group
                moduli = part.group.moduli()
                measured = Group(moduli, part.group.places, flat=True)
                part.kept, part.measured = moduli, part.backend.prepare(measured)
    sizes: dict[torch.device, int] = {}
    for part in parts:
        device = part.group.device
        part.first = sizes.get(device, 0)
        part.count = part.backend.count_norms(part.measured, each)
        sizes[device] = part.first + part.count
    own = {
        device: torch.empty(n, dtype=_wide(device), device=device) for device, n in sizes.items()
    }
    for part in parts:
        out = own[part.group.device]
        if part.count < len(out):
            out = out[part.first : part.first + part.count]
        part.backend.norm(part.measured, norm_type, out, each=each)
    return Measured(each, parts, _exchange(own, each))


def given(groups: Sequence[Group], norm: Tensor) -> Measured:
    """A norm that somebody else measured, in place of a measurement."""
    norms = norm.detach().abs().reshape(1)
    # An upload need not be waited for; a download must be.
    uploaded = norms.device.type == "cpu"
    own = {
        device: norms.to(device, non_blocking=uploaded).to(_wide(device))
        for device in {group.device for group in groups}
    }
    return Measured(False, _parts(groups), own)


def clamp_(groups: Sequence[Group], low: float, high: float, grad_scale: float | Tensor) -> None:
    """Clamps every group to [low, high], the bounds rounded to its dtype."""
    for part in _parts(groups, by_sign=True):
        dtype = part.group.dtype
        part.backend.clamp_(part.written, _bound(low, dtype), _bound(high, dtype), grad_scale)
        torch.autograd.graph.increment_version(part.group.written)


def _parts(groups: Sequence[Group], *, by_sign: bool = False) -> list[_Part]:
    """Every group with its backend; all are chosen, and refused, before anything is computed."""
    backends = [backend_of(group, by_sign=by_sign) for group in groups]
    handles = [b.prepare(g) for b, g in zip(backends, groups, strict=True)]
    return [_Part(g, b, h, h) for g, b, h in zip(groups, backends, handles, strict=True)]


def _wide(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def _exchange(own: dict[torch.device, Tensor], each: bool) -> dict[torch.device, Tensor]:
    """Gives every device the norms of all, its own first where they are told apart by place."""
    if len(own) == 1:
        return own
    everything = {}
    for device, norms in own.items():
        others = [n.to(device).to(norms.dtype) for d, n in own.items() if d != device]
        # In one order everywhere, so that every device finds the same bits.
        parts = [norms, *others] if each else [n.to(device).to(norms.dtype) for n in own.values()]
        everything[device] = torch.cat(parts)
    return everything


def _bound(bound: float, dtype: torch.dtype) -> float:
    """A bound as the dtype holds it; a finite one stays finite."""
    # What is remembered of 0.0 would be found for -0.0.
    return _rounded(bound, dtype) if bound else bound


@lru_cache
def _rounded(bound: float, dtype: torch.dtype) -> float:
    largest = torch.finfo(dtype).max
    if abs(bound) != float("inf"):
        bound = min(max(bound, -largest), largest)
    return float(torch.tensor(bound, dtype=torch.float64, device="cpu").to(dtype))
