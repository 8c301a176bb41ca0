"""The functions of `native/module.c`.

`addresses` and `sizes` are of contiguous gradients of one dtype: the first byte of each, and its
elements as bytes of int64. `dtype` is a code of `native.CODES`. At most `threads` threads
share a list of SHARED elements or more. Wrong arguments raise; an address is trusted, but for 0:
memory that is not there ends the process.

Other functions take `leaves`, a tensor or a list of tensors and None, make new tensors by
`create`, as `torch.empty_like` does, write to them, and return them in place of the leaves. They
return None, having changed nothing, where the leaves are no plain tensors on a CPU of these dtypes
(of complex ones pairs are read), with memory, without gaps between their elements, without a lazy
sign or conjugate, and without operations that autograd records; and where a number is none, or may
be rounded on its way.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

SHARED: int
GRAIN: int
PAIRS: int
INTERFACE: int
LEAST_NORM: float
LARGEST_NORM: float

def norm(addresses: list[int], sizes: bytes, dtype: int, threads: int, order: float, /) -> float:
    """The norm of all elements, of order 1, 2 or inf."""

def norms(
    addresses: list[int], sizes: bytes, dtype: int, threads: int, order: float, /
) -> list[float]:
    """The norm of each gradient."""

def coefficients(
    norms: list[float], limit: float | list[float], eps: float, wide: bool, /
) -> tuple[list[float], float]:
    """min(1, limit / (norm + eps)) of each, and the least, or NaN where one is.

    `limit` is one number, or one for each norm. Every step is rounded to float32, or to float64
    where `wide`.
    """

def multiply_(
    addresses: list[int],
    sizes: bytes,
    dtype: int,
    threads: int,
    factor: float | list[float],
    /,
) -> None:
    """Multiplies all gradients by one factor, or each by its own.

    Factors are rounded to float32, but for float64 gradients. Gradients whose factor is 1 are left.
    """

def unit_norms(
    addresses: list[int], sizes: bytes, dtype: int, threads: int, rows: bytes, norms: int, /
) -> list[int]:
    """Writes the 2-norm of each unit to memory, as float64, tensor after tensor.

    `sizes` are elements of a unit, `rows` how many of them each tensor has; `norms` is an address.
    An address of 0 leaves a tensor out, whose norms are inf.

    Returns:
        Indices of tensors that were left out, and of those of float64 of which squares may have
        overflowed or lost digits.
    """

def unit_factors(
    norms: int,
    rows: bytes,
    ratio: float | list[float],
    eps: float,
    scale: float,
    wide: bool,
    dtype: int,
    /,
) -> tuple[bytes, list[int], float]:
    """The factors of gradients of a dtype: coefficient / scale of each unit.

    A coefficient is min(1, ratio * max(weights, eps) / (gradient / scale)), from the float64[2, n]
    of norms at an address, rounded to float32, or to float64 where `wide`. `ratio` is one number,
    or one for each gradient.

    Returns:
        Factors, as bytes of float64; indices of gradients with a factor that is not 1; the least
        coefficient, or NaN where one is.
    """

def multiply_units_(
    addresses: list[int], sizes: bytes, dtype: int, threads: int, rows: bytes, factors: bytes, /
) -> None:
    """Multiplies each unit by its factor; leaves units whose factor is 1, and addresses of 0."""

def clip_(
    addresses: list[int],
    sizes: bytes,
    dtype: int,
    threads: int,
    order: float,
    limit: float,
    eps: float,
    scale: float,
    wide: bool,
    before: Callable[[T], object],
    written: T,
    /,
) -> float | None:
    """Multiplies all gradients by min(1, limit / (norm + eps)) / scale.

    The norm is divided by `scale`. `before(written)` is called before a write.

    Returns:
        The norm, or None, with nothing written, where squares of float64 may have overflowed or
        lost digits.
    """

def clamp_(
    addresses: list[int], sizes: bytes, dtype: int, threads: int, low: float, high: float, /
) -> None:
    """Clamps; the bounds are numbers of the dtype. Lists within them are not written."""

def register_torch(
    tensor: type,
    parameter: type,
    codes: dict[Any, int],
    number: Tensor,
    wide_number: Tensor,
    is_recording: Callable[[], bool],
    n_threads: Callable[[], int],
    hypot: Callable[..., float],
    exchange: object,
    /,
) -> None:
    """Tells of PyTorch, before leaves are read.

    Args:
        tensor: a class of plain tensors.
        parameter: another one.
        codes: of dtypes, with PAIRS for complex ones.
        number: 0-d, float32; like it a norm is made.
        wide_number: 0-d, float64.
        is_recording: whether autograd records operations.
        n_threads: the threads of PyTorch.
        hypot: Python's, of any number of floats.
        exchange: DLPack's functions for C; None to read attributes, of contiguous tensors.
    """

def clamped(leaves: Any, create: Callable[[Tensor], Tensor], low: Any, high: Any, /) -> Any:
    """Clamps; a bound is a number, rounded into the range of each dtype, or None."""

def clipped(
    leaves: Any, create: Callable[[Tensor], Tensor], limit: Any, norm: Any, /
) -> tuple[Any, Tensor] | None:
    """Scales to a limit of the norm of all, of order 2, which is given or None; and the norm."""

def clipped_each(
    leaves: Any,
    create: Callable[[Tensor], Tensor],
    limit: Any,
    order: float,
    power: float,
    /,
) -> tuple[Any, list[float]] | None:
    """Scales each to a limit of its norm over a power of its number of elements; and the norms.

    `power` is 0, 0.5 or 1.
    """

def measured(leaves: Any, create: Callable[[Tensor], Tensor], /) -> Tensor | None:
    """The norm of all tensors, of order 2; of contiguous ones only."""

def are_apart(addresses: list[int], spans: list[int], /) -> bool:
    """Whether no two of these runs of bytes share one."""

def kernel(
    driver: int,
    function: int,
    programs: int,
    threads: int,
    shared: int,
    kinds: bytes,
    owner: object,
    /,
) -> object:
    """A compiled kernel, for `launch`.

    Args:
        driver: address of cuLaunchKernel.
        function: of the kernel, as the driver has it.
        programs: size of the grid.
        threads: of a program.
        shared: bytes of shared memory of a program.
        kinds: of each argument: b"p" for a pointer, b"i" for an int32, b"l" for an int64, b"-" for
            None, which is no parameter.
        owner: kept alive, so that the function stays loaded.
    """

def launch(kernel: object, stream: int, /, *arguments: int | float | Tensor | None) -> bool:
    """Launches a kernel of the current device; False if it did not start.

    It does not where an argument is of another kind, or the driver reports an error. Tensors stand
    for their addresses, and floats for the bits of a float64, as an int64.
    """

def use_threads(function: int, /) -> None:
    """Takes the address of GOMP_parallel, which runs a function in several threads."""

def use_plain_loops(flag: bool, /) -> None:
    """Whether to use the loops that every processor has; norms of float64 may differ by a bit."""
