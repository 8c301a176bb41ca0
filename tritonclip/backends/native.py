"""The C extension of `native/`, where it was built: loops over the memory of CPU gradients.

It is built where a C compiler is found when tritonclip is installed; its loops run in the threads
of the OpenMP library that PyTorch has loaded, so that no second pool competes with them.

The native backend: the loops of `native/` on the memory of CPU gradients.

The host decides, as in `host_batch`; norms of the usual orders, products and clamps take one call
each, whatever the number of gradients.
"""

import ctypes
import importlib
import math
import os
from array import array
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from tritonclip.backends import cpu_norm
from tritonclip.backends.cpu_backend import CpuLayout
from tritonclip.backends.cpu_scale import (
    are_products,
    multiply_by_products_,
    multiply_each_exactly_,
)
from tritonclip.backends.host_batch import HostBatch
from tritonclip.backends.host_form import HostForm
from tritonclip.backends.interface import Batch, PartialNorms
from tritonclip.backends.numbers import Numbers, as_tensor
from tritonclip.backends.operators import TorchBatch, as_contiguous, unscale_and_clamp_
from tritonclip.modes import is_pre_dispatch, n_dispatch_modes

# Codes of the dtypes that it has loops for.
CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Of the functions and their arguments, as in `native/module.c`: a binary may be older.
INTERFACE = 3

_MODULE = "tritonclip.backends._native"
_REBUILD = (
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
        return None, f"tritonclip was installed without its C extension: {_REBUILD}"
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        return None, f"its C extension cannot be loaded ({error}): {_REBUILD}"
    if getattr(module, "INTERFACE", None) != INTERFACE:
        return None, f"its C extension was built from another version: {_REBUILD}"
    return module, ""


loops, fault = load()


def _share_threads() -> bool:
    """Lets loops run in PyTorch's threads; False where its OpenMP library cannot be called."""
    folder = Path(torch.__file__).parent / "lib"
    # First as PyTorch itself looks it up, so that a library that was preloaded serves both; then
    # through PyTorch's library, by its names on Linux and on macOS.
    for library in (None, folder / "libtorch_cpu.so", folder / "libtorch_cpu.dylib"):
        with suppress(OSError, AttributeError, TypeError):
            # GCC's interface, which LLVM's library has too. Already loaded: nothing is read.
            function = ctypes.CDLL(str(library) if library else None).GOMP_parallel
            loops.share(ctypes.cast(function, ctypes.c_void_p).value)
            return True
    return False


# Whether large lists are shared by threads.
has_threads = loops is not None and _share_threads()
if has_threads and hasattr(os, "register_at_fork"):
    # A forked process has none of these threads: it would wait for them.
    os.register_at_fork(after_in_child=partial(loops.share, 0))


def describe() -> str:
    """Whether the extension serves, for a report."""
    if loops is None or has_threads:
        return fault or "built"
    return (
        f"built; lists of {loops.SHARED:,} elements or more take PyTorch's operators, as the "
        "threads of its OpenMP library cannot be shared"
    )


# Orders of a norm that has loops.
ORDERS = (2.0, 1.0, math.inf, 0.0)
# A norm of float64 of order 2 is known where it is 0, or lies from the first up to the second: a
# smaller one may have lost squares to underflow, a larger one overflowed. Those of other dtypes fit
# float64.
_LEAST, _LARGEST = 2.0**-450, 2.0**450
# Elements of a gradient from which PyTorch's operators take threads (at::internal::GRAIN_SIZE).
# Where other processes keep the cores busy, a thread may have to wait for milliseconds: short lists
# of smaller gradients, for which PyTorch never waits, are left to one thread.
GRAIN = 32768


class NativeLayout(HostForm):
    """Sizes of gradients that are dense in memory.

    Args:
        tensors: gradients of one dtype that has loops, on a CPU; at least one.
    """

    by_address = True

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__(tensors)
        self.code = CODES[tensors[0].dtype]
        self.packed_sizes = array("q", self.sizes).tobytes()
        self.is_shared = sum(self.sizes) >= loops.SHARED * (1 if max(self.sizes) >= GRAIN else 2)
        self.n_bytes += len(self.packed_sizes)
        # Made where a call cannot be served by addresses.
        self._by_operators: CpuLayout | None = None

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> Batch:
        """The gradients of a call; operators serve those that modes or transforms have to see."""
        is_dual = forward_ad._current_level >= 0
        if addresses is None or is_dual or n_dispatch_modes() or is_pre_dispatch():
            tensors = as_contiguous(tensors)
            if self._by_operators is None:
                self._by_operators = CpuLayout(tensors, flat=True)
            self._by_operators.dtype = self.dtype
            return self._by_operators.bind(tensors, addresses)
        return NativeBatch(tensors, self, addresses)


class NativeBatch(HostBatch):
    """Verbs by addresses; see :class:`tritonclip.backends.interface.Batch`.

    Versions count before a write, so that an interrupt leaves none that autograd does not see.
    """

    layout: NativeLayout

    def __init__(self, tensors: list[Tensor], layout: NativeLayout, addresses: list[int]) -> None:
        self.tensors, self.layout, self.dtype = tensors, layout, layout.dtype
        threads = torch.get_num_threads() if layout.is_shared else 1
        self._list = addresses, layout.packed_sizes, layout.code, threads

    def _for_operators(self) -> list[Tensor]:
        return as_contiguous(self.tensors)

    def norm(self, norm_type: float, out: Tensor | None, *, per_gradient: bool) -> PartialNorms:
        """Measures the gradients."""
        measured: PartialNorms
        if norm_type not in ORDERS:
            operators = TorchBatch(self._for_operators(), self.dtype)
            measured = operators.norm(norm_type, None, per_gradient=per_gradient)
        elif per_gradient:
            measured = loops.norms(*self._list, norm_type)
        else:
            measured = [loops.norm(*self._list, norm_type)]
        if norm_type == 2.0 and self.layout.wide == torch.float64:
            self._measure_extremes_(measured, per_gradient)
        return measured if out is None else out.copy_(as_tensor(measured))

    def _measure_extremes_(self, norms: list[float], per_gradient: bool) -> None:
        """Measures anew where squares of float64 may have overflowed or lost digits."""
        for i, norm in enumerate(norms):
            if norm and not _LEAST <= norm < _LARGEST:
                tensors, sizes = self.tensors, self.layout.sizes
                if per_gradient:
                    tensors, sizes = [tensors[i]], [sizes[i]]
                norms[i] = float(cpu_norm.two_norm(as_contiguous(tensors), sizes, flat=True))

    def _coefficients(
        self, norms: list[float], numbers: Numbers, max_norm: float, eps: float
    ) -> tuple[list[float], float]:
        found: tuple[list[float], float] = loops.coefficients(
            norms, max_norm, eps, self.dtype == torch.float64
        )
        return found

    def _multiply_(self, multiplier: float) -> None:
        increment_version(self.tensors)
        loops.multiply_(*self._list, multiplier)

    def _multiply_each_(
        self,
        multipliers: list[float],
        coefficients: list[float],
        factors: Numbers,
        least: float,
        scale: float = 1.0,
    ) -> None:
        if self.layout.holds(multipliers, coefficients, least):
            self._multiply_chosen_(multipliers)
        else:
            multiply_each_exactly_(self._for_operators(), self.layout, coefficients, scale)

    def _multiply_by_tensors_(self, changed: list[int], factors: list[Tensor]) -> None:
        if are_products(factors):
            multiply_by_products_(self._for_operators(), factors, changed)
        else:
            self._multiply_chosen_(factors[0].to(self.layout.wide).tolist())

    def _multiply_chosen_(self, factors: list[float]) -> None:
        """Multiplies each gradient, but not where its factor is 1."""
        changed = self.tensors
        if 1.0 in factors:
            changed = [t for t, f in zip(changed, factors, strict=True) if f != 1]
        increment_version(changed)
        loops.multiply_each_(*self._list, factors)

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients, and writes none where all are within the bounds."""
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(self._for_operators(), low, high, grad_scale)
        else:
            increment_version(self.tensors)
            loops.clamp_(*self._list, low, high)
