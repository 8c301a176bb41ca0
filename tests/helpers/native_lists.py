"""Lists of gradients for the loops of `native/`, which take addresses."""

import math
from array import array
from contextlib import contextmanager

import pytest
import torch

from tritonclip.backends.native import CODES, loops

# Elements of a block, bytes that are compared before a write, and bytes that are written together:
# as `native/` has them.
BLOCK, COMPARED, GROUP = 32768, 4096, 256
EDGES = [n // item + more for n in (GROUP, COMPARED) for item in (2, 4, 8) for more in (-1, 0, 9)]
LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 256, 257, *EDGES)
LONG = (BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
# Of norms that have loops, beside 2.
ORDERS = (1.0, math.inf)


def listed(tensors, threads=1):
    """The arguments that a list takes."""
    sizes = array("q", [tensor.numel() for tensor in tensors]).tobytes()
    return [tensor.data_ptr() for tensor in tensors], sizes, CODES[tensors[0].dtype], threads


def norm_of(tensors, threads=1, order=2.0):
    """The norm of a list."""
    return loops.norm(*listed(tensors, threads), order)


def norms_of(tensors, threads=1, order=2.0):
    """The norm of each gradient."""
    return loops.norms(*listed(tensors, threads), order)


def amid_canaries(tensor, offset):
    """A copy within memory of sevens, `offset` elements from an aligned address; and the memory."""
    memory = torch.full((tensor.numel() + 64,), 7.0, dtype=tensor.dtype)
    own = memory[16 + offset : 16 + offset + tensor.numel()]
    own.copy_(tensor)
    return own, memory


def assert_canaries(memory, own):
    start = own.storage_offset()
    assert bool((memory[:start] == 7).all())
    assert bool((memory[start + own.numel() :] == 7).all())


def every_half(dtype):
    """Every number of a half type, NaN and inf too."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


@contextmanager
def flushed():
    """Subnormal floats become 0 in this thread."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
