"""Settings of a process: environment variables, `use_backend` and `verify`.

The only reader of the environment. Variables are looked up at every call, so that a change counts
from the next call on; `os.environ` decodes and encodes, which would cost more than all else here.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

BACKENDS = ("auto", "triton", "torch")

# The mapping behind os.environ, and the form of its keys; os.environ where a Python has neither.
_variables: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_key = getattr(os.environ, "encodekey", str) if _variables is not os.environ else str
_BACKEND, _VERIFY = _key("TRITONCLIP_BACKEND"), _key("TRITONCLIP_VERIFY")

_chosen_backend: ContextVar[str | None] = ContextVar("tritonclip_backend", default=None)
_verifying: ContextVar[bool] = ContextVar("tritonclip_verify", default=False)


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
    token = _chosen_backend.set(_checked(name, "use_backend"))
    try:
        yield
    finally:
        _chosen_backend.reset(token)


@contextmanager
def verify() -> Iterator[None]:
    """Checks every call in the block against a plain float64 reference.

    Slow, and it waits for the device.

    Raises:
        VerificationError: inside the block, by the call whose result differs: names the first
            gradients, their indices, and both values. The gradients are then as the call left them.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight * weight).sum().backward()
        >>> with tritonclip.verify():
        ...     norm = tritonclip.clip_(weight, 1.0)
    """
    token = _verifying.set(True)
    try:
        yield
    finally:
        _verifying.reset(token)


def backend() -> str:
    """The backend asked for: by `use_backend`, else by TRITONCLIP_BACKEND, else 'auto'.

    Raises:
        ValueError: TRITONCLIP_BACKEND names no backend.
    """
    chosen = _chosen_backend.get()
    if chosen is not None:
        return chosen
    value = _variables.get(_BACKEND)
    return "auto" if value is None else _backend_from(value)


def verifying() -> bool:
    """Whether calls are to be verified: by `verify`, else by TRITONCLIP_VERIFY.

    Raises:
        ValueError: TRITONCLIP_VERIFY is neither a yes nor a no.
    """
    if _verifying.get():
        return True
    value = _variables.get(_VERIFY)
    return value is not None and _verify_from(value)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@lru_cache
def _backend_from(value: str | bytes) -> str:
    return _checked((os.fsdecode(value) or "auto").lower(), "TRITONCLIP_BACKEND")


@lru_cache
def _verify_from(value: str | bytes) -> bool:
    answer = os.fsdecode(value).lower()
    if answer in ("", "0", "false", "no", "off"):
        return False
    if answer in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"TRITONCLIP_VERIFY: expected '1' or '0', got {answer!r}")


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: expected 'auto', 'triton' or 'torch', got {name!r}")
    return name
