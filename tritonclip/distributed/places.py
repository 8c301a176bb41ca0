"""The gradients of a plan's group as pieces, and the places of their norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonclip.distributed.pieces import Piece
from tritonclip.grad_mode import outside_inference


class Places:
    """Positions of gradients among the parameters; on a device from the first use on."""

    __slots__ = ("_on", "positions")

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self._on: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        """The positions, 1-d."""
        if (device, dtype) not in self._on:
            # Never an inference tensor, which belongs to one mode.
            uploaded = outside_inference(torch.tensor)
            self._on[device, dtype] = uploaded(self.positions, dtype=dtype, device=device)
        return self._on[device, dtype]


@dataclass(slots=True, eq=False)
class Share:
    """The gradients of one of a plan's groups, as pieces.

    Attributes:
        piece: the weight and sums of each of them.
        places: theirs among the parameters.
        narrow: they are no float64.
    """

    piece: Piece
    places: Places
    narrow: bool
