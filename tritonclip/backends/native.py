"""The native backend: the C loops of `native/` on the memory of CPU gradients.

The extension is built where a C compiler is found when tritonclip is installed. Norms of the usual
orders, products and clamps take one call each, whatever the number of gradients. Loops run in the
threads of the OpenMP library that PyTorch has loaded, so that no second pool competes with them.

`HostBatch` decides for the torch backend, too: a step would enter one file more if it stood there.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tritonclip.backends.interface import Batch, Clip, Of, PartialNorms, arithmetic_of
from tritonclip.backends.operators import (
    TYPECODES,
    as_contiguous,
    coefficients_of,
    combine,
    combine_numbers,
    count_rows,
    has_dense_units,
    multiply_units_,
    norm_of,
    norms_of_units,
    results_of,
    unscale_and_clamp_,
    unscaled,
)

# Codes of the dtypes that it has loops for.
CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Of the functions and their arguments, as in `native/module.c`: a binary may be older.
INTERFACE = 17

_MODULE = "tritonclip.backends._native"


def _remedy() -> str:
    if sys.platform == "win32":
        return "MSVC cannot build its loops, which need GCC or Clang: run Python in WSL"
    return (
        "install a C compiler (gcc or clang) and Python's headers, and then, in a checkout of "
        "tritonclip, run pip install --force-reinstall --no-cache-dir --no-deps ."
    )


def load() -> tuple[Any, str]:
    """The extension, whose functions `_native.pyi` has; or None, and why, with a remedy."""
    if find_spec(_MODULE) is None:
        root = Path(__file__).parents[2]
        if (root / "native" / "module.c").exists():
            return None, (
                f"tritonclip is imported from its sources in {root}, where its C "
                "extension was not built: run Python in another folder, or, with gcc or clang and "
                "Python's headers, install them in place by pip install -e ."
            )
        return None, f"tritonclip was installed without its C extension: {_remedy()}"
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        return None, f"its C extension cannot be loaded ({error}): {_remedy()}"
    if getattr(module, "INTERFACE", None) != INTERFACE:
        return None, f"its C extension was built from another version: {_remedy()}"
    return module, ""


loops, fault = load()


def _share_threads() -> bool:
    """Lets loops run in PyTorch's threads; False where its OpenMP library cannot be called."""
    folder = f"{Path(torch.__file__).parent}/lib"
    # First as PyTorch itself looks it up, so that a library that was preloaded serves both; then
    # through PyTorch's library, by its names on Linux and on macOS.
    for library in (None, f"{folder}/libtorch_cpu.so", f"{folder}/libtorch_cpu.dylib"):
        with suppress(OSError, AttributeError, TypeError):
            # GCC's interface, which LLVM's library has too. Already loaded: nothing is read.
            function = ctypes.CDLL(library).GOMP_parallel
            loops.use_threads(ctypes.cast(function, ctypes.c_void_p).value)
            return True
    return False


# Whether large lists are shared by threads.
has_threads = loops is not None and _share_threads()
if has_threads and hasattr(os, "register_at_fork"):
    # A forked process has none of these threads: it would wait for them.
    os.register_at_fork(after_in_child=partial(loops.use_threads, 0))


def describe() -> str:
    """Whether the extension serves, for a report."""
    if loops is None or has_threads:
        return fault or "built"
    return "built; it runs in one thread, as those of PyTorch's OpenMP library cannot be shared"


# Orders of a norm that has loops.
ORDERS = (2.0, 1.0, math.inf)
_CPU = torch.device("cpu")


def is_extreme(norm: float) -> bool:
    """Whether squares of float64 may have overflowed or lost digits."""
    return norm != 0 and not loops.LEAST_NORM <= norm < loops.LARGEST_NORM


def may_share(sizes: list[int]) -> bool:
    """Whether threads may share tensors of these sizes; at least one."""
    least: int = loops.SHARED * (1 if max(sizes) >= loops.GRAIN else 2)
    return sum(sizes) >= least


class Form(NamedTuple):
    """Rows as the loops take those of a list of tensors."""

    # Packed, the reals in a row of each tensor.
    lengths: bytes
    # Of the dtype.
    code: int
    # Packed, the rows of each tensor.
    rows: bytes


class Rows:
    """The rows of gradients and of their weights, as the loops take them.

    All have dtypes that have loops; weights have one.
    """

    def __init__(self, grads: list[Tensor], weights: Sequence[Tensor]) -> None:
        self.counts = list(map(count_rows, grads))
        self.sides = [self._form_of(side) for side in (grads, weights) if side]
        self.form = self.sides[0]
        if weights and weights[0].dtype == grads[0].dtype:
            # One call measures both.
            lengths, code, rows = self.form
            self.sides = [Form(lengths * 2, code, rows * 2)]
        self.is_double = CODES[torch.float64] in {form.code for form in self.sides}
        self.with_gaps = {i for i, x in enumerate([*grads, *weights]) if not has_dense_units(x)}
        # Where the partial norms of each gradient begin, in bytes.
        self.starts = [
            8 * (end - n) for end, n in zip(accumulate(self.counts), self.counts, strict=True)
        ]

    def _form_of(self, tensors: Sequence[Tensor]) -> Form:
        reals = 2 if tensors[0].is_complex() else 1
        counted = zip(tensors, self.counts, strict=True)
        lengths = array("q", [reals * tensor.numel() // n for tensor, n in counted])
        code = CODES[tensors[0].dtype.to_real()]
        return Form(lengths.tobytes(), code, array("q", self.counts).tobytes())


class NativeLayout:
    """Sizes of gradients on a CPU that are dense in memory, of one dtype that has loops.

    With weights, or none, it is one by rows, and gradients may have gaps.
    """

    def __init__(self, tensors: list[Tensor], weights: Sequence[Tensor] | None = None) -> None:
        self.dtype, dtype = torch.float32, tensors[0].dtype.to_real()
        self.is_double = dtype == torch.float64
        self.code = CODES[dtype]
        sizes = list(map(Tensor.numel, tensors))
        self.packed_sizes = array("q", sizes).tobytes()
        self.n_bytes = len(self.packed_sizes)
        self.rows = None if weights is None else Rows(tensors, weights)
        self.is_shared = may_share([*sizes, *map(Tensor.numel, weights or ())])

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> Batch:
        addresses = addresses or list(map(Tensor.data_ptr, tensors))
        if self.rows is not None and self.rows.with_gaps:
            # The loops leave out what has no address.
            addresses = [0 if i in self.rows.with_gaps else at for i, at in enumerate(addresses)]
        return NativeBatch(tensors, self, addresses)


class HostBatch(Batch):
    """Verbs on gradients of a CPU: the host decides, in Python's numbers.

    A backend measures and multiplies. A gradient whose coefficients are 1 is not written. By rows,
    weights may follow the gradients.
    """

    tensors: list[Tensor]
    dtype: torch.dtype
    # The coefficients of norms, and the least.
    _coefficients: Callable[..., tuple[list[float], float]] = staticmethod(coefficients_of)

    def combine(
        self,
        norms: PartialNorms,
        norm_type: float,
        of: Of,
        grad_scale: float | Tensor = 1.0,
        *,
        wide: bool = False,
    ) -> Tensor:
        """The norm of all, or of each gradient."""
        if of == "rows":
            norms = self._of_rows(norms)
        if isinstance(norms, list):
            numbers = [combine_numbers(norms, norm_type)] if of == "all" else norms
            dtype = torch.float64 if wide else self.dtype
            # torch.tensor would take three times as long.
            found = torch.frombuffer(results_of(numbers, grad_scale, dtype), dtype=dtype)
            return found[0] if of == "all" else found
        if of == "all":
            norms = combine(norms, norm_type)
        return unscaled(norms, grad_scale).to(norms.dtype if wide else self.dtype)

    @abstractmethod
    def _of_rows(self, norms: Tensor) -> PartialNorms:
        """The norm of each gradient, from those of its rows."""

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The same norms."""
        return norms

    def scale_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies all gradients by one coefficient, or each gradient or unit by its own."""
        norm_type, eps, limit, grad_scale, erase, of = clip
        if of == "rows":
            return self._scale_rows_(norms, clip)
        numbers = norms if isinstance(norms, list) else norms.tolist()
        if of == "all" and len(numbers) > 1:
            numbers = [combine_numbers(numbers, norm_type)]
        code, scale = TYPECODES[self.dtype], float(grad_scale)
        # Rounded as results are.
        measured = array(code, [norm / scale for norm in numbers] if scale != 1 else numbers)
        if of == "all":
            norm = torch.scalar_tensor(measured[0], dtype=self.dtype, device=_CPU)
        else:
            norm = torch.frombuffer(measured, dtype=self.dtype)
        if erase and (of == "each" or not math.isfinite(measured[0])):
            torch._foreach_zero_(self.tensors)
            return norm, 0.0
        limit = limit.tolist() if isinstance(limit, Tensor) else limit
        factors, least = self._coefficients(measured.tolist(), limit, eps, code == "d")
        if scale != 1:
            (divisor,) = array(code, [scale])
            factors = array(code, [factor / divisor for factor in factors]).tolist()
        if factors.count(1.0) < len(factors):
            self._multiply_(factors)
        return norm, least

    @abstractmethod
    def _multiply_(self, factors: list[float]) -> None:
        """Multiplies all gradients by one number, or each by its own, unless it is 1."""

    def _scale_rows_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies each unit by its coefficient."""
        norm = self.combine(norms, 2.0, "rows", clip.grad_scale)
        if isinstance(clip.erase, Tensor) and bool(clip.erase):
            # Not by torch._foreach_zero_, which refuses conjugate views.
            for tensor in self.tensors[: len(norm)]:
                tensor.zero_()
            return norm, 0.0
        return norm, self._multiply_rows_(norms, clip)

    @abstractmethod
    def _multiply_rows_(self, norms: Tensor, clip: Clip) -> float | Tensor:
        """Multiplies each unit by its coefficient; returns those, or the least."""

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        """Measures all gradients and multiplies them by one coefficient."""
        norms = self.norm(norm_type, "all")
        return self.scale_(norms, Clip(norm_type, eps, limit, grad_scale))[0]


class NativeBatch(HostBatch):
    """Verbs by addresses; see :class:`tritonclip.backends.interface.Batch`.

    Versions count before a write, so that an interrupt leaves none that autograd does not see.
    """

    _coefficients = staticmethod(loops.coefficients if loops else coefficients_of)

    def __init__(self, tensors: list[Tensor], layout: NativeLayout, addresses: list[int]) -> None:
        # By rows, the weights follow the gradients.
        self.tensors, self.layout, self.dtype = tensors, layout, layout.dtype
        self._threads = torch.get_num_threads() if layout.is_shared else 1
        self.sizes = () if layout.rows is None else layout.rows.counts
        self._list = addresses, layout.packed_sizes, layout.code, self._threads

    def norm(self, norm_type: float, of: Of) -> PartialNorms:
        """Measures the gradients: one partial norm, or one for each gradient or row."""
        if self.layout.rows is not None:
            return self._norms_of_rows(self.layout.rows)
        if norm_type not in ORDERS:
            tensors = as_contiguous(self.tensors)
            lists = [[tensor] for tensor in tensors] if of == "each" else [tensors]
            return [float(norm_of(part, norm_type, torch.float64)) for part in lists]
        if of == "each":
            norms = loops.norms(*self._list, norm_type)
        else:
            norms = [loops.norm(*self._list, norm_type)]
        if norm_type == 2.0 and self.layout.is_double:
            for i, norm in enumerate(norms):
                # Squares of float64 may have overflowed or lost digits.
                if is_extreme(norm):
                    tensors = as_contiguous([self.tensors[i]] if of == "each" else self.tensors)
                    norms[i] = float(norm_of(tensors, 2.0, torch.float64))
        return norms

    def _norms_of_rows(self, rows: Rows) -> Tensor:
        """The norm of each row of the gradients, and below them those of the weights."""
        n, n_sides = len(rows.counts), len(self.tensors) // len(rows.counts)
        norms = torch.empty(n_sides, sum(rows.counts), dtype=torch.float64, device=_CPU)
        at = self._list[0]
        parts, first = norms.view(-1).split(rows.counts * n_sides), 0
        for lengths, code, counts in rows.sides:
            stop = first + len(counts) // 8
            out = norms[first // n].data_ptr()
            # Those that were left out, or have extreme squares.
            for i in loops.unit_norms(at[first:stop], lengths, code, self._threads, counts, out):
                parts[first + i].copy_(norms_of_units(self.tensors[first + i]))
            first = stop
        return norms

    def _of_rows(self, norms: Tensor) -> list[float]:
        """The norm of each gradient, from those of its rows."""
        rows, first = self.layout.rows, norms.data_ptr()
        assert rows is not None
        at = [first + start for start in rows.starts]
        totals: list[float] = loops.norms(at, rows.form.rows, CODES[torch.float64], 1, 2.0)
        if rows.is_double and any(map(is_extreme, totals)):
            # Squares may have left the range.
            totals = [combine(part, 2.0).item() for part in norms[0].split(rows.counts)]
        return totals

    def _multiply_(self, factors: list[float]) -> None:
        if len(factors) == 1:
            increment_version(self.tensors)
            loops.multiply_(*self._list, factors[0])
        else:
            increment_version([t for t, f in zip(self.tensors, factors, strict=True) if f != 1])
            loops.multiply_(*self._list, factors)

    def _multiply_rows_(self, norms: Tensor, clip: Clip) -> float:
        """Multiplies each row by its factor; operators do it where rows have gaps."""
        rows, limit = self.layout.rows, clip.limit
        assert rows is not None
        lengths, code, counts = rows.form
        limit = limit.tolist() if isinstance(limit, Tensor) else limit
        wide, scale = self.dtype == torch.float64, float(clip.grad_scale)
        numbers = limit, clip.eps, scale, wide, self.layout.code
        least: float
        factors, changed, least = loops.unit_factors(norms.data_ptr(), counts, *numbers)
        if not changed:
            return least
        at = self._list[0][: len(rows.counts)]
        increment_version([self.tensors[i] for i in changed if at[i]])
        loops.multiply_units_(at, lengths, code, self._threads, counts, factors)
        with_gaps = [i for i in changed if not at[i]]
        if with_gaps:
            by = torch.frombuffer(bytearray(factors), dtype=torch.float64)
            own = by.to(arithmetic_of(self.tensors[0].dtype.to_real())).split(rows.counts)
            for i in with_gaps:
                multiply_units_(self.tensors[i], own[i])
        return least

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        norm = None
        if norm_type in ORDERS:
            numbers = norm_type, limit, eps, float(grad_scale), self.layout.is_double
            norm = loops.clip_(*self._list, *numbers, increment_version, self.tensors)
        if norm is None:
            return super().clip_(norm_type, eps, limit, grad_scale)
        return torch.scalar_tensor(norm, dtype=self.dtype, device=_CPU)

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients, and writes none where all are within the bounds."""
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(as_contiguous(self.tensors), low, high, grad_scale)
        else:
            increment_version(self.tensors)
            loops.clamp_(*self._list, low, high)
