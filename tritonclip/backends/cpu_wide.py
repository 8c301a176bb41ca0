"""bfloat16 gradients that a CPU's cache does not hold: written in place, or through float32.

On some processors torch multiplies and clamps them in place at a fraction of the speed of memory,
which converting them piece by piece does not; on others in place is twice as fast. The first pieces
of a call are written in both ways, the others in the faster: the results are the same bits.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tritonclip.backends.cpu_pace import Pace

# Elements of a list from which its long gradients may be converted. On a Xeon lists of 16, 24, 32,
# 48 and 64M elements, 4M each, take 2.7, 4.9, 12.2, 20.4 and 31.8 ms multiplied in place, and
# clamped 3.1, 7.3, 19.1, 30.8 and 42.5; converted in pieces of 2^20 4.6, 7.1, 10.4, 15.9 and 21.7,
# and 4.7, 7.3, 10.5, 16.1 and 22.2. On an AMD EPYC 124M elements are multiplied in 13 to 17 ms in
# place, converted in 29 to 40. float16 takes a third of bfloat16's time in place on the Xeon.
# (torch 2.13, 2 threads.)
LARGE = 2**25
# Elements that are written in place at a time: while ways are tried, and then. On an AMD EPYC 48M
# are clamped in 7.4 ms in pieces of 2^20, and in 7.1 gradient by gradient. (torch 2.13, 2 threads.)
IN_PLACE, KEPT = 2**20, 2**24
# Elements that are converted at a time, into 1 MiB of scratch.
CONVERTED = 2**18
# Elements of a long gradient.
LONG = 2**18


def to_widen(tensors: Sequence[Tensor], sizes: Sequence[int], *, flat: bool) -> list[int]:
    """Indices of the gradients that may be converted.

    Args:
        tensors: of one dtype on a CPU; at least one.
        sizes: theirs.
        flat: each is contiguous.
    """
    if tensors[0].dtype != torch.bfloat16 or not flat or sum(sizes) < LARGE:
        return []
    return [i for i, n in enumerate(sizes) if n >= LONG and not tensors[i].is_neg()]


def write_widened_(
    tensors: Sequence[Tensor], places: Iterable[int], write_: Callable[[Tensor, int], Tensor]
) -> None:
    """Writes some gradients, contiguous and no dual numbers of forward AD.

    Args:
        tensors: all gradients.
        places: indices of those that are written.
        write_: an operator in place; takes a piece, and the index of its gradient.
    """
    scratch = torch.empty(CONVERTED, dtype=torch.float32, device="cpu")
    pace = Pace(IN_PLACE, CONVERTED)
    for i in places:
        whole = tensors[i].view(-1)
        for start, stop in pace.spans(len(whole)):
            piece = whole[start:stop]
            if pace.way == 0:
                write_(piece, i)
            else:
                piece.copy_(write_(_middle_of(scratch, len(piece)).copy_(piece), i))
        if pace.kept == 0 and not pace.is_serial:
            pace = Pace(KEPT)


def _middle_of(scratch: Tensor, n: int) -> Tensor:
    """The n elements in the middle of scratch.

    Each of two threads then meets the same half of scratch, however long pieces are. Memory that
    one thread wrote and another one read is slow to write again: bfloat16 pieces of 2^20, 589,824,
    720,896 and 2^18 elements at the start of scratch are converted and measured in 1.4 to 1.8 ms,
    in the middle in 0.3 to 0.5. (torch 2.13, AMD EPYC, when its cores probably shared no cache.)
    """
    start = (len(scratch) - n) // 2
    return scratch[start : start + n]
