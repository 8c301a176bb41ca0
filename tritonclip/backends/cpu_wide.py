"""bfloat16 gradients that a CPU's cache does not hold: written through float32, in pieces.

torch multiplies and clamps them in place at a fraction of the speed of memory, which converting
them piece by piece does not: the results are the same bits.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tritonclip.backends.cpu_pace import CONVERTED, Pace

# Elements of a list from which its long gradients are converted. Lists of 16, 24, 32, 48 and 64M
# elements, 4M each, take 2.7, 4.9, 12.2, 20.4 and 31.8 ms multiplied in place, and clamped 3.1,
# 7.3, 19.1, 30.8 and 42.5; converted in pieces of 2^20 4.6, 7.1, 10.4, 15.9 and 21.7, and 4.7, 7.3,
# 10.5, 16.1 and 22.2. In pieces of CONVERTED 16 and 24M take 3.6 and 5.4 multiplied, in place on
# that day 2.7 and 4.1. float16 takes a third of that in place. (torch 2.13, Xeon, 2 threads.)
LARGE = 2**25
# Elements of a long gradient.
LONG = 2**18


def to_widen(tensors: Sequence[Tensor], sizes: Sequence[int], *, flat: bool) -> list[int]:
    """Indices of the gradients that are converted.

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
        write_: an operator in place; takes a piece in float32, and the index of its gradient.
    """
    scratch = torch.empty(CONVERTED, dtype=torch.float32, device="cpu")
    pace = Pace(CONVERTED)
    for i in places:
        whole = tensors[i].view(-1)
        for start, stop in pace.spans(len(whole)):
            piece = whole[start:stop]
            piece.copy_(write_(scratch[: len(piece)].copy_(piece), i))
