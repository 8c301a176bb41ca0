"""Corrects Triton's interpreter, where it differs from a device, while our kernels run.

It is imported only under TRITON_INTERPRET=1, where kernels run on CPU tensors in NumPy, one program
after another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl


def _cast_to_nearest(builder: Any, source: Any, dtype: Any) -> Any:
    """Rounds float32 to the nearest bfloat16, as every device does; the interpreter cuts bits."""
    if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), dtype.scalar)
    return _cast(builder, source, dtype)


@contextmanager
def as_device() -> Iterator[None]:
    """Makes the interpreter round as devices do, and compute inf and NaN without warnings."""
    InterpreterBuilder.cast_impl = _cast_to_nearest
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        InterpreterBuilder.cast_impl = _cast
