"""The native backend: the C loops of `native/` on the memory of CPU gradients.

The extension is built where a C compiler is found when tritonclip is installed. Norms of the usual
orders, products and clamps take one call each, whatever the number of gradients. Loops run in the
threads of the OpenMP library that PyTorch has loaded, so that no second pool competes with them.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
from array import array
from contextlib import suppress
from ctypes import c_double, c_float
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tritonclip.backends.interface import Batch, Clip, PartialNorms
from tritonclip.backends.operators import (
    TorchBatch,
    as_contiguous,
    as_tensor,
    combine_numbers,
    norm_of,
    results_of,
    unscale_and_clamp_,
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


class NativeLayout:
    """Sizes of gradients on a CPU that are dense in memory, of one dtype that has loops."""

    by_address = True

    def __init__(self, tensors: list[Tensor]) -> None:
        sizes = list(map(Tensor.numel, tensors))
        self.dtype = torch.float32
        self.is_double = tensors[0].dtype == torch.float64
        self.code = CODES[tensors[0].dtype]
        self.packed_sizes = array("q", sizes).tobytes()
        self.is_shared = may_share(sizes)
        self.n_bytes = len(self.packed_sizes)

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> Batch:
        return NativeBatch(tensors, self, addresses or list(map(Tensor.data_ptr, tensors)))


class NativeBatch:
    """Verbs by addresses; see :class:`tritonclip.backends.interface.Batch`.

    The host decides, in Python's numbers: a gradient whose coefficient is 1 is not written.
    Versions count before a write, so that an interrupt leaves none that autograd does not see.
    """

    def __init__(self, tensors: list[Tensor], layout: NativeLayout, addresses: list[int]) -> None:
        self.tensors, self.layout, self.dtype = tensors, layout, layout.dtype
        threads = torch.get_num_threads() if layout.is_shared else 1
        self._list = addresses, layout.packed_sizes, layout.code, threads

    def norm(self, norm_type: float, *, per_gradient: bool) -> PartialNorms:
        """Measures the gradients: one partial norm a gradient, or one."""
        if norm_type not in ORDERS:
            batch = TorchBatch(as_contiguous(self.tensors), self.dtype, on_host=True)
            return batch.norm(norm_type, per_gradient=per_gradient)
        if per_gradient:
            norms = loops.norms(*self._list, norm_type)
        else:
            norms = [loops.norm(*self._list, norm_type)]
        if norm_type == 2.0 and self.layout.is_double:
            for i, norm in enumerate(norms):
                # Squares of float64 may have overflowed or lost digits.
                if is_extreme(norm):
                    tensors = as_contiguous([self.tensors[i]] if per_gradient else self.tensors)
                    norms[i] = float(norm_of(tensors, 2.0, torch.float64))
        return norms

    def total(self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        total = combine_numbers(_as_numbers(norms), norm_type)
        return self._as_tensor(results_of([total], grad_scale, self.dtype))[0]

    def total_each(
        self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        return self._as_tensor(results_of(_as_numbers(norms), grad_scale, self.dtype))

    def norms_each(self, norms: PartialNorms, norm_type: float) -> Tensor:
        return as_tensor(norms)

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        return norms

    def _as_tensor(self, results: array[float]) -> Tensor:
        """Norms as a tensor, 1-d; torch.tensor would take three times as long."""
        return torch.frombuffer(results, dtype=self.dtype)

    def scale_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        numbers = norms if isinstance(norms, list) else norms.tolist()
        total = numbers[0] if len(numbers) == 1 else combine_numbers(numbers, clip.norm_type)
        scale, wide = float(clip.grad_scale), self.dtype == torch.float64
        rounded = c_double if wide else c_float
        # A count of elements carries no loss scale.
        measured = rounded(total / scale).value
        norm = torch.scalar_tensor(measured, dtype=self.dtype, device=_CPU)
        if clip.erase and not math.isfinite(measured):
            torch._foreach_zero_(self.tensors)
            return norm, 0.0
        _, coefficient = loops.coefficients([measured], float(clip.limit), clip.eps, wide)
        factor = coefficient
        if scale != 1:
            factor = rounded(coefficient / rounded(scale).value).value
        if factor != 1:
            increment_version(self.tensors)
            loops.multiply_(*self._list, factor)
        return norm, coefficient

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        norm = None
        if norm_type in ORDERS:
            numbers = norm_type, limit, eps, float(grad_scale), self.layout.is_double
            norm = loops.clip_(*self._list, *numbers, increment_version, self.tensors)
        if norm is None:
            norms = self.norm(norm_type, per_gradient=False)
            return self.scale_(norms, Clip(norm_type, eps, limit, grad_scale))[0]
        return torch.scalar_tensor(norm, dtype=self.dtype, device=_CPU)

    def scale_each_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        numbers = norms if isinstance(norms, list) else norms.tolist()
        scale, wide = float(clip.grad_scale), self.dtype == torch.float64
        unscaled = [norm / scale for norm in numbers] if scale != 1 else numbers
        norm = self._as_tensor(results_of(unscaled, 1.0, self.dtype))
        if isinstance(clip.erase, Tensor) and bool(clip.erase):
            torch._foreach_zero_(self.tensors)
            return norm, 0.0
        limit = clip.limit.tolist() if isinstance(clip.limit, Tensor) else clip.limit
        coefficients, least = loops.coefficients(unscaled, limit, clip.eps, wide)
        factors = coefficients
        if scale != 1:
            rounded = c_double if wide else c_float
            divisor = rounded(scale).value
            factors = [rounded(coefficient / divisor).value for coefficient in coefficients]
        elif least == 1:
            return norm, least
        changed = self.tensors
        if 1.0 in factors:
            changed = [t for t, f in zip(changed, factors, strict=True) if f != 1]
        increment_version(changed)
        loops.multiply_(*self._list, factors)
        return norm, least

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients, and writes none where all are within the bounds."""
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(as_contiguous(self.tensors), low, high, grad_scale)
        else:
            increment_version(self.tensors)
            loops.clamp_(*self._list, low, high)


def _as_numbers(norms: PartialNorms) -> list[float]:
    numbers: list[float] = norms if isinstance(norms, list) else norms.tolist()
    return numbers
