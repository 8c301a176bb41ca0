"""The functions of `native/module.c`.

`addresses` and `sizes` describe contiguous gradients of one dtype: the first byte of each, and its
number of elements, as bytes of int64. `dtype` is a code of `native.CODES`. At most `threads`
threads share a list of SHARED elements or more. Wrong arguments raise. Every address except 0 is
trusted, so an address without memory ends the process.

Other functions take `leaves`, which are a tensor or a list of tensors and None. They make new
tensors by `create`, which is like `torch.empty_like`, write to them, and return them in the form of
the leaves. They return None, and have changed nothing, unless the leaves are plain CPU tensors of
these dtypes (complex ones are read as pairs), with memory, without gaps between elements, lazy
signs or conjugates, and without operations that autograd records. They also return None if a limit
or bound is no number, or might be rounded when it is converted.
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
    """min(1, limit / (norm + eps)) for each norm, and the least of these, or NaN if one is NaN.

    `limit` is one number, or one for each norm. Every step is rounded to float32 unless `wide`.
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

    Factors are float32, except for float64 gradients. Gradients whose factor is 1 are not written.
    """

def unit_norms(
    addresses: list[int], sizes: bytes, dtype: int, threads: int, rows: bytes, norms: int, /
) -> list[int]:
    """Writes the 2-norm of each unit to memory, as float64, tensor after tensor.

    `sizes` are the elements of a unit, `rows` the units of each tensor, and `norms` is an address.
    A tensor with the address 0 is left out, and its norms are inf.

    Returns:
        The indices of tensors that were left out, and of float64 tensors whose squares may have
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
    """The factors of gradients of a dtype: coefficient / scale for each unit.

    A coefficient is min(1, ratio * max(weights, eps) / (gradient / scale)), rounded to float64 if
    `wide`, else to float32. `norms` is the address of the norms of gradients and weights,
    float64[2, n]. `ratio` is one number, or one for each gradient.

    Returns:
        The factors as bytes of float64; the indices of gradients with a factor that is not 1; and
        the least coefficient, or NaN if one is NaN.
    """

def multiply_units_(
    addresses: list[int], sizes: bytes, dtype: int, threads: int, rows: bytes, factors: bytes, /
) -> None:
    """Multiplies each unit by its factor, except for factors of 1 and addresses of 0."""

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

    The norm is the one after division by `scale`. `before(written)` is called before a write.

    Returns:
        The norm; or None, with nothing written, if float64 squares may be inf or have lost digits.
    """

def clamp_(
    addresses: list[int], sizes: bytes, dtype: int, threads: int, low: float, high: float, /
) -> None:
    """Clamps to bounds, which are numbers of the dtype; lists within them are not written."""

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
    """Registers PyTorch's objects, which reading leaves needs.

    Args:
        tensor: a class of plain tensors.
        parameter: another class of plain tensors.
        codes: the codes of dtypes, plus PAIRS for complex dtypes.
        number: a 0-d float32 tensor, the model for norms.
        wide_number: a 0-d float64 tensor, the model for norms of float64.
        is_recording: returns whether autograd records operations.
        n_threads: returns the number of PyTorch's threads.
        hypot: Python's hypot, which takes any number of floats.
        exchange: DLPack's functions for C; None to read contiguous tensors by their attributes.
    """

def clamped(leaves: Any, create: Callable[[Tensor], Tensor], low: Any, high: Any, /) -> Any:
    """Clamps to bounds; a bound is None, or a number that is brought into the range of a dtype."""

def clipped(
    leaves: Any, create: Callable[[Tensor], Tensor], limit: Any, norm: Any, /
) -> tuple[Any, Tensor] | None:
    """Limits the 2-norm of all tensors, which is measured if `norm` is None; returns it as well."""

def clipped_each(
    leaves: Any,
    create: Callable[[Tensor], Tensor],
    limit: Any,
    order: float,
    power: float,
    /,
) -> tuple[Any, list[float]] | None:
    """Limits each tensor's norm over numel**power, and returns the undivided norms as well.

    `power` is 0, 0.5 or 1.
    """

def measured(leaves: Any, create: Callable[[Tensor], Tensor], /) -> Tensor | None:
    """The 2-norm of all tensors, if they are contiguous."""

def are_apart(addresses: list[int], spans: list[int], /) -> bool:
    """Whether no two of these runs of bytes share a byte."""

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
        driver: the address of cuLaunchKernel.
        function: the driver's handle of the kernel.
        programs: the size of the grid.
        threads: the threads of a program.
        shared: the bytes of shared memory of a program.
        kinds: the kind of each argument: b"p" for a pointer, b"i" for an int32, b"l" for an int64,
            b"-" for None, which is no parameter.
        owner: an object that is kept alive, so that the function stays loaded.
    """

def launch(kernel: object, stream: int, /, *arguments: int | float | Tensor | None) -> bool:
    """Launches a kernel on the current device; returns whether it started.

    It does not start if an argument is of another kind, or if the driver reports an error. Tensors
    stand for their addresses, and floats for the bits of a float64, as an int64.
    """

def use_threads(function: int, /) -> None:
    """Sets the address of GOMP_parallel, which runs a function in several threads."""

def use_plain_loops(flag: bool, /) -> None:
    """Chooses the loops of every processor or the fastest; float64 norms may differ by a bit."""
