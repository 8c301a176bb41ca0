"""Large tensors in pieces, so that what is computed beside them stays small."""

from collections.abc import Iterator

from torch import Tensor

# Elements of a piece that is copied to float64: 1 MiB a temporary.
PIECE = 131072


def flat_pieces(tensor: Tensor, size: int, *, writable: bool = False) -> Iterator[Tensor]:
    """Every element once, in pieces of at most `size` elements; none for an empty tensor.

    Pieces are 1-d: views where strides allow it, else copies. Writable pieces are always views, of
    any shape.
    """
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(size)
    elif tensor.numel() <= size:
        yield tensor if writable else tensor.reshape(-1)
    else:
        rows = max(1, size * tensor.shape[0] // tensor.numel())
        for part in tensor.split(rows) if tensor.shape[0] > 1 else tensor.unbind():
            yield from flat_pieces(part, size, writable=writable)
