"""Settings of a process: environment variables, `use_backend` and `verify`.

Variables are read at every call, so that a change takes effect with the next call. We read the
mapping behind `os.environ`, because `os.environ` itself encodes the key and decodes the value at
each look-up, which is slow compared with everything else here.
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

# The mapping behind os.environ and how it encodes keys; os.environ itself if these are missing.
_variables: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_key = getattr(os.environ, "encodekey", str) if _variables is not os.environ else str
_BACKEND, _VERIFY = _key("TRITONCLIP_BACKEND"), _key("TRITONCLIP_VERIFY")

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

_chosen_backend: ContextVar[str | None] = ContextVar("tritonclip_backend", default=None)
_verifying: ContextVar[bool] = ContextVar("tritonclip_verify", default=False)


class Settings(NamedTuple):
    """The settings of a call: its backend, one of BACKENDS, and whether its result is checked."""

    backend: str
    verifying: bool


class Block:
    """A setting that holds in a `with` block, or in every call of a function that it decorates.

    It gives a context variable a value. Messages show `call`, which made the block, and
    `elsewhere`, the setting for a whole program. A block that is deleted without use warns.
    """

    # The default that __del__ finds if __init__ did not run.
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
        """Wraps a function so that the setting holds in every call.

        Raises TypeError for a generator or a coroutine, whose code runs after the call.
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
        A context manager that can also decorate functions. It warns if it is used as neither.

    Raises:
        ValueError: a name that is no backend.
        RuntimeError: inside the block, by a call whose tensors the backend cannot serve.
    """
    name = _checked(name, "use_backend")
    return Block(_chosen_backend, name, f"use_backend({name!r})", f"TRITONCLIP_BACKEND={name}")


def verify() -> Block:
    """Checks every call in a block against the torch backend in float64.

    Norms may differ by 1e-6 in relative terms, or 1e-12 if all gradients are float64; elements may
    differ by twice as much plus their rounding. Processes that share a norm first compare the call,
    its rule and arguments, and the parameters. The check is slow and waits for the device. With the
    torch backend it checks only the rounding. For a whole program set TRITONCLIP_VERIFY=1.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> (weight * weight).sum().backward()
        >>> with tritonclip.verify():
        ...     norm = tritonclip.clip_(weight, 1.0)
        >>> norm
        tensor(10.)

    Returns:
        A context manager that can also decorate functions. It warns if it is used as neither.

    Raises:
        VerificationError: inside the block, by the call whose result differs. It names the first
            gradients, their indices, and both values. The gradients stay as the call left them.
        ValueError: on every process that shares a norm, by a call in which they differ.
    """
    return Block(_verifying, True, "verify()", "TRITONCLIP_VERIFY=1")


def current() -> Settings:
    """Returns the settings: those of a block, else of the variables, else auto and no check.

    Raises ValueError for a variable that names no backend, or means neither yes nor no.
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
    """Combines the values of blocks, which are None and False outside of any, with variables."""
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
