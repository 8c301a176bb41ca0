"""Units seen as rows: the tables of gradients and weights that are clipped row by row.

A piece is a run of whole rows, or where a row is longer than a chunk, a part of one row. The table
of pieces depends on shapes alone; only addresses are uploaded again, as for chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonclip.kernels.chunk_access import CHUNK, OCCUPANCY_2X128, Occupancy
from tritonclip.kernels.chunk_table import ChunkTables, on_cpu, upload
from tritonclip.kernels.launch import wave

# Rows in a piece at most: those of a few elements are measured 64 at a time.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class UnitTable:
    """Gradients and weights of one device, as kernels see them.

    Attributes:
        device: of gradients, weights and tables.
        dtype: of the gradients.
        weight_dtype: of the weights.
        n_tensors: gradients.
        n_pieces: pieces; one of no elements for a gradient without any.
        n_norms: partial norms: one a row, or one a chunk of a row.
        n_units: rows.
        arguments: addresses, int64[2, n_tensors], of gradients, then of weights, 0 for one without
            a limit; forms, int64[n_tensors, 4]: rows, their length, and the places of the first
            partial norm and of the first unit; pieces, int64[n_pieces, 4]: tensor, first row,
            number of rows, and chunk within the row.
        programs: that walk the pieces, one wave at most, by occupancy.
    """

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    n_tensors: int
    n_pieces: int
    n_norms: int
    n_units: int
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    programs: dict[Occupancy, int]


class UnitTables(ChunkTables):
    """The tables of gradients of one form: laid out once a stream, addresses as of the last call.

    Args:
        device: of the gradients.
        dtype: of the gradients.
        weight_dtype: of the weights.
        counts: rows of each gradient, at least one.
        lengths: elements of its rows.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        counts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        super().__init__(device, dtype, counts)
        self._weight_dtype, self._counts, self._lengths = weight_dtype, counts, lengths

    def _lay_out(self, addresses: list[int], capturing: bool) -> UnitTable:  # type: ignore[override]
        """Makes all tables, in one upload."""
        n = len(self._counts)
        counts, lengths = on_cpu(self._counts), on_cpu(self._lengths)
        chunks = ((lengths + CHUNK - 1) // CHUNK).clamp_min(1)
        most = (CHUNK // lengths.clamp_min(1)).clamp(1, MOST_ROWS)
        runs = (counts + most - 1) // most
        n_own, n_norms = runs * chunks, counts * chunks
        forms = torch.stack([counts, lengths, _starts(n_norms), _starts(counts)], 1)
        tensor = torch.repeat_interleave(torch.arange(n, device="cpu"), n_own)
        at = torch.arange(len(tensor), device="cpu") - _starts(n_own)[tensor]
        row = at // chunks[tensor] * most[tensor]
        n_rows = torch.minimum(counts[tensor] - row, most[tensor])
        pieces = torch.stack([tensor, row, n_rows, at % chunks[tensor]], 1)
        packed = torch.cat([on_cpu(addresses), forms.flatten(), pieces.flatten()])
        tables = upload(packed, self._device, capturing)
        n_pieces = len(tensor)
        return UnitTable(
            device=self._device,
            dtype=self._dtype,
            weight_dtype=self._weight_dtype,
            n_tensors=n,
            n_pieces=n_pieces,
            n_norms=sum(map(_count_norms, self._counts, self._lengths)),
            n_units=sum(self._counts),
            arguments=(tables[: 2 * n], tables[2 * n : 6 * n], tables[6 * n :]),
            programs={OCCUPANCY_2X128: min(n_pieces, wave(self._device, OCCUPANCY_2X128))},
        )


def _count_norms(count: int, length: int) -> int:
    return count * count_chunks(length)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """The sum of the counts before each."""
    return counts.cumsum(0) - counts


def count_chunks(length: int) -> int:
    """Chunks, and partial norms, of a row."""
    return max(1, -(-length // CHUNK))
