"""Settings of a process: environment variables, `use_backend` and `verify`.

The only reader of the environment. Variables are read at every call, so that a change takes effect
with the next call. They are read from the mapping behind `os.environ`: `os.environ` itself encodes
a key and decodes a value at each look-up, which is slow beside all else here.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tritonclip.messages import ClippingWarning

P = ParamSpec("P")
T = TypeVar("T")
BACKENDS = ("auto", "triton", "native", "torch")

# The mapping behind os.environ and the form of its keys; os.environ on a Python without them.
_variables: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_key = getattr(os.environ, "encodekey", str) if _variables is not os.environ else str
_BACKEND, _VERIFY = _key("TRITONCLIP_BACKEND"), _key("TRITONCLIP_VERIFY")

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

_chosen_backend: ContextVar[str | None] = ContextVar("tritonclip_backend", default=None)
_verifying: ContextVar[bool] = ContextVar("tritonclip_verify", default=False)


class Settings(NamedTuple):
    """The settings of a call: one of BACKENDS, and whether every result is checked."""

    backend: str
    verifying: bool


class Block:
    """A setting that holds in a `with` block, or in every call of a function that it decorates.

    A context variable gets a value. Messages show the call that made this, and the environment
    variable for a whole program. It warns when it is deleted without use.
    """

    # The default is for an object whose __init__ did not run.
    _is_used = True

    def __init__(self, variable: ContextVar[Any], value: object, call: str, elsewhere: str) -> None:
        self._variable, self._value = variable, value
        self._call, self._elsewhere = call, elsewhere
        self._tokens: list[Token[Any]] = []
        self._is_used = False

    def __enter__(self) -> None:
        self._is_used = True
        self._tokens.append(self._variable.set(self._value))

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._tokens.pop())

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function with the setting in every call of it.

        TypeError for a generator or a coroutine, which runs after its call.
        """
        self._is_used = True
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"{self._call} cannot decorate a generator or a coroutine, whose code runs after "
                f"the call: got {function!r}; write with tritonclip.{self._call}: ... inside of it"
            )

        @wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
            with Block(self._variable, self._value, self._call, self._elsewhere):
                return function(*args, **kwargs)

        return decorated

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                f"{self._call} was called without a block, so that nothing was set; write with "
                f"tritonclip.{self._call}: ... For a whole program, set the environment variable "
                f"{self._elsewhere}",
                ClippingWarning,
                stacklevel=2,
            )


def use_backend(name: str) -> Block:
    """Chooses the backend of every call in a block; it overrides TRITONCLIP_BACKEND.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> (weight * weight).sum().backward()
        >>> with tritonclip.use_backend("torch"):
        ...     norm = tritonclip.clip_(weight, 1.0)
        >>> norm
        tensor(10.)

    Args:
        name: "triton", "native" (loops in C on a CPU), "torch" (PyTorch's operators), or "auto":
            triton for CUDA and ROCm tensors where it can be imported, native for CPU tensors where
            the C extension was built, else torch.

    Returns:
        A context manager, also a decorator of functions. It warns if it is used as neither.

    Raises:
        ValueError: another name.
        RuntimeError: inside the block, by a call whose tensors the backend cannot serve.
    """
    name = _checked(name, "use_backend")
    return Block(_chosen_backend, name, f"use_backend({name!r})", f"TRITONCLIP_BACKEND={name}")


def verify() -> Block:
    """Checks every call in a block against the torch backend in float64.

    Norms may differ by 1e-6 in relative terms, or 1e-12 if all gradients are float64, and elements
    by twice as much and their rounding. Processes that share a norm first compare the call, its
    rule and arguments, and the parameters. Slow, and it waits for the device. Of the torch backend
    itself it checks the rounding. For a whole program set TRITONCLIP_VERIFY=1.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> (weight * weight).sum().backward()
        >>> with tritonclip.verify():
        ...     norm = tritonclip.clip_(weight, 1.0)
        >>> norm
        tensor(10.)

    Returns:
        A context manager, also a decorator of functions. It warns if it is used as neither.

    Raises:
        VerificationError: inside the block, by the call whose result differs: names the first
            gradients, their indices, and both values. The gradients are then as the call left them.
        ValueError: on each of several processes, by a call in which they differ.
    """
    return Block(_verifying, True, "verify()", "TRITONCLIP_VERIFY=1")


def current() -> Settings:
    """The backend and verification asked for: by a block, else by a variable, else auto and no.

    ValueError for a variable that names no backend, or is neither a yes nor a no.
    """
    return _combined(
        _chosen_backend.get(), _variables.get(_BACKEND), _verifying.get(), _variables.get(_VERIFY)
    )


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@lru_cache
def _combined(
    backend: str | None,
    backend_variable: str | bytes | None,
    verifying: bool,
    verify_variable: str | bytes | None,
) -> Settings:
    """The settings by values of blocks, None and False outside of any, and of variables."""
    if backend is None:
        name = os.fsdecode(backend_variable or b"").lower() or "auto"
        backend = _checked(name, "TRITONCLIP_BACKEND")
    if not verifying:
        answer = os.fsdecode(verify_variable or b"").lower()
        if answer not in (*_YES, *_NO):
            raise ValueError(f"TRITONCLIP_VERIFY: expected '1' or '0', got {answer!r}")
        verifying = answer in _YES
    return Settings(backend, verifying)


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: expected 'auto', 'triton', 'native' or 'torch', got {name!r}")
    return name
