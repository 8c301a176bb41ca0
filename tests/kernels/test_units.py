"""How many kernels a call by unit launches, and what the tables of rows say that reach them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonclip
from helpers.absent_gpu import kernel_module
from helpers.cases import CHUNK, grad_of
from helpers.units import check_clip, make
from tritonclip import ClipByUnitNorm

pytest.importorskip("triton", reason="tritonclip.kernels needs triton")

BOTH = ["unit_norms_kernel", "scale_units_kernel"]
MEDIUM, MEDIUM_ROWS = kernel_module("access").MEDIUM, kernel_module("access").MEDIUM_ROWS


def names(launches):
    return [launch.kernel for launch in launches]


@pytest.mark.parametrize("count", [1, 2, 60])
@pytest.mark.parametrize("policy", ["propagate", "error"])
def test_clip_by_unit_launches_two_kernels_for_any_list(device, launches, count, policy):
    parameters = make([(3, 1 + i % 5) for i in range(count)], device=device)
    tritonclip.clip_(parameters, ClipByUnitNorm())
    assert names(launches) == BOTH


def test_clip_by_unit_launches_two_kernels_for_channels_last(device, launches):
    (one,) = make([(6, 5, 4, 3)], device=device)
    one.data = one.data.contiguous(memory_format=torch.channels_last)
    one.grad = grad_of(one).contiguous(memory_format=torch.channels_last)
    check_clip([one], ClipByUnitNorm())
    assert names(launches) == BOTH


def test_clip_by_unit_launches_twice_more_to_write_zeros(device, launches):
    """Every norm, and whether weights are NaN, is known before the first gradient is written."""
    parameters = make([(3, 4), (5,)], device=device)
    tritonclip.clip_(parameters, ClipByUnitNorm(), nonfinite="zero")
    assert names(launches) == [*BOTH, *2 * ["scale_units_kernel"]]


def test_clip_by_unit_launches_once_more_for_weights_of_another_dtype(device, launches):
    if not hasattr(torch.nn.Parameter, "grad_dtype"):
        pytest.skip("this torch keeps gradients in the dtype of their parameter")
    (one,) = make([(3, 40)], torch.bfloat16, device)
    grad = grad_of(one).float()
    one.grad = None
    one.grad_dtype = None
    one.grad = grad
    check_clip([one], ClipByUnitNorm())
    assert names(launches) == [BOTH[0], *BOTH]


def test_clip_by_unit_falls_back_with_a_warning(device, launches):
    (one,) = make([(4, 6)], device=device)
    one.grad = grad_of(one).t().contiguous().t()
    with pytest.warns(UserWarning, match="kernels read units that are dense in memory"):
        check_clip([one], ClipByUnitNorm())
    assert names(launches) == []


def _table(counts: list[int], lengths: list[int]) -> Any:
    cpu = torch.device("cpu")
    tables = kernel_module("tables").UnitTables(cpu, [torch.float32] * 2, counts, lengths)
    return tables.table(list(range(16, 16 + 32 * len(counts), 16)))


@given(
    st.lists(
        st.tuples(
            st.integers(1, 600),
            st.one_of(st.integers(0, 700), st.integers(701, CHUNK), st.integers(CHUNK, 3 * CHUNK)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_pieces_have_every_element_once(one_multiprocessor, forms):
    """Also of tensors too large for this machine: tables depend on shapes alone."""
    counts, lengths = [rows for rows, _ in forms], [length for _, length in forms]
    table = _table(counts, lengths)
    addresses, shapes, pieces = table.arguments
    assert addresses.tolist() == list(range(16, 16 + 32 * len(forms), 16))
    assert len(pieces) == 4 * table.n_pieces
    chunks = [max(1, -(-length // CHUNK)) for length in lengths]
    norms = [rows * n for rows, n in zip(counts, chunks, strict=True)]
    starts = [[sum(sizes[:i]) for i in range(len(forms))] for sizes in (norms, counts)]
    rows_of = [list(row) for row in zip(counts, lengths, *starts, strict=True)]
    assert shapes.view(-1, 4).tolist() == rows_of
    assert (table.n_norms, table.n_units) == (sum(norms), sum(counts))
    seen = []
    for tensor, first, n_rows, chunk in pieces.view(-1, 4).tolist():
        in_tile = MEDIUM_ROWS * lengths[tensor] if lengths[tensor] <= MEDIUM else 0
        assert n_rows * min(lengths[tensor], CHUNK) <= max(CHUNK, in_tile)
        seen += [(tensor, row, chunk) for row in range(first, first + n_rows)]
    assert len(set(seen)) == len(seen)
    assert len(seen) == sum(norms)


def test_rows_beyond_two_to_the_31_elements_have_their_places(one_multiprocessor):
    table = _table([3, 2], [3 * 2**31, 2**32])
    tensor, row, n_rows, chunk = table.arguments[2].view(-1, 4)[-1].tolist()
    assert (tensor, row, n_rows, chunk) == (1, 1, 1, 2**32 // CHUNK - 1)
