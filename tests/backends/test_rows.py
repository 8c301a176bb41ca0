"""Rows of gradients on a CPU: every element stands in one, wherever batches of them end."""

import math

import pytest
import torch
from cases import normal

from tritonclip.backends import cpu_norm
from tritonclip.backends.cpu_norm import two_norms_of_each
from tritonclip.backends.cpu_rows import (
    MEASURED,
    ROW,
    SLAB,
    SMALL,
    WIDE,
    RowSums,
    cut,
    long_row_sums,
    sums_of_rows,
)
from tritonclip.backends.cpu_squares import LONE

pytestmark = pytest.mark.usefixtures("operators")

HALF = [torch.float16, torch.bfloat16]


def norms_of(rows: RowSums) -> torch.Tensor:
    """The norm of each row, float64."""
    sums = rows.sums.double()
    return sums if rows.tensors[0].dtype in WIDE else sums.sqrt()


@pytest.mark.parametrize("dtype", MEASURED, ids=str)
@pytest.mark.parametrize("slab", [1, 7, SLAB], ids=["rows", "blocks", "one block"])
def test_every_row_of_a_long_gradient_is_measured(dtype, slab):
    grad = normal(100 * ROW, dtype).view(-1, ROW)
    norms = torch.cat([norms_of(rows) for rows in long_row_sums([grad], [100], slab)])
    truth = torch.linalg.vector_norm(grad.double(), dim=1)
    torch.testing.assert_close(norms, truth, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rest", [0, 1, ROW - 1])
def test_rows_and_remainder_are_all_elements_of_a_gradient_within_a_buffer(rest):
    """And no others: those around it are inf."""
    buffer = torch.full((SMALL + 5 * ROW,), math.inf)
    n = SMALL + ROW + rest
    grad = buffer[5 : 5 + n].copy_(torch.arange(n))
    rows, last = cut(grad, n)
    assert rows.shape == (n // ROW, ROW)
    assert (last is None) == (rest == 0)
    assert rows.data_ptr() == grad.data_ptr()
    found = rows.flatten() if last is None else torch.cat([rows.flatten(), last])
    torch.testing.assert_close(found, grad, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_a_slab_at_a_time_in_the_order_of_their_gradients(dtype):
    """A gradient longer than a slab is cut; shorter ones share a slab that holds them whole."""
    counts = [1, 3, 2, 9, 4]
    grads = [torch.full((n, ROW), float(n), dtype=dtype) for n in counts]
    slabs = list(long_row_sums(grads, counts, 4))
    assert [slab.counts for slab in slabs] == [[1, 3], [2], [4], [4], [1], [4]]
    expected = [float(n) for n in counts for _ in range(n)]
    norms = torch.cat([norms_of(slab) for slab in slabs]) / math.sqrt(ROW)
    assert norms.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("is_first", [False, True], ids=["each lane", "the first lane"])
def test_a_row_loses_no_more_than_its_bound(dtype, lanes, is_first):
    """1 comes first in a lane, or in each, and what is added then is half of its last digit."""
    row = torch.full((ROW,), 2.0**-12, dtype=dtype)
    if is_first:
        # Squares of another lane add up to half of the last digit.
        row.fill_(2.0**-12 / math.sqrt(ROW // lanes))
        row[::lanes] = 2.0**-12
    row[: 1 if is_first else lanes] = 1.0
    norm = float(sums_of_rows([row.view(1, ROW)], [1]).double().sqrt())
    truth = float(torch.linalg.vector_norm(row.double()))
    assert norm == pytest.approx(truth, rel=1e-6)
    assert norm < truth


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("n", [SMALL, SMALL + 5, 3 * SMALL])
@pytest.mark.parametrize("bad", [[math.inf], [math.inf, -math.inf], [-math.inf], [math.nan]])
def test_a_half_type_with_elements_that_are_not_finite_has_such_a_norm(dtype, n, bad):
    """Though sums over their rows are NaN whichever they are."""
    grad = normal(n, dtype)
    grad[7 : 7 + len(bad)] = torch.tensor(bad, dtype=dtype)
    fine = normal(n, dtype, seed=1)
    truth = float(torch.linalg.vector_norm(grad.double()))
    norm = float(cpu_norm.two_norm([fine, grad], [n, n], flat=True))
    assert norm == pytest.approx(truth, nan_ok=True)
    norms = two_norms_of_each([fine, grad], [n, n], flat=True).tolist()
    expected = [float(torch.linalg.vector_norm(fine.double())), truth]
    assert norms == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("value", [1e-7, 1e-30, 6e4, 1e30, 3e38])
def test_half_types_whose_squares_float32_does_not_hold_are_measured(dtype, value):
    filled = torch.full((3 * SMALL,), value, dtype=torch.float64).to(dtype)
    filled.nan_to_num_(nan=1.0, posinf=6e4)
    truth = float(torch.linalg.vector_norm(filled.double()))
    assert float(cpu_norm.two_norm([filled], [len(filled)], flat=True)) == pytest.approx(truth)
    norms = two_norms_of_each([filled], [len(filled)], flat=True)
    assert float(norms) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_threads_change_no_bit(dtype, set_threads):
    grads = [normal(n, dtype) for n in (SMALL, SMALL + 3, 40 * SMALL, 9)]
    sizes = [len(grad) for grad in grads]
    norms = []
    for n_threads in (1, 2, 3):
        set_threads(n_threads)
        norms.append(float(cpu_norm.two_norm(grads, sizes, flat=True)))
    assert norms[0] == norms[1] == norms[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_of_long_gradients_is_measured_whole(dtype):
    """Gradients of several slabs, of rows that are added up alone, together, and one by one."""
    sizes = [(2 * SLAB + 3) * ROW + 5, LONE * ROW, LONE * ROW - 1, *[SMALL + 1] * 900, SMALL, 3, 0]
    grads = [torch.full((n,), 1.0 + i % 7, dtype=dtype) for i, n in enumerate(sizes)]
    truth = [(1.0 + i % 7) * math.sqrt(n) for i, n in enumerate(sizes)]
    norms = two_norms_of_each(grads, sizes, flat=True)
    assert norms.tolist() == pytest.approx(truth, rel=1e-6)
    grads[0][SLAB * ROW + 1] = torch.nan
    norms = two_norms_of_each(grads, sizes, flat=True)
    assert norms.isnan().nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_rows_cannot_square_costs_no_other_its_norm(dtype, monkeypatch):
    """Only that one is measured again, in float64, though all were measured in one memory."""
    again = []
    exact = cpu_norm._exact_norms

    def exact_norms(x):
        again.append(x.numel())
        yield from exact(x)

    sizes = [SMALL + ROW, 3 * SMALL, 2 * SMALL + 5]
    grads = [torch.full((n,), 1.0, dtype=dtype) for n in sizes]
    grads[1][7] = 1e30
    monkeypatch.setattr(cpu_norm, "_exact_norms", exact_norms)
    truth = math.hypot(*(float(torch.linalg.vector_norm(g.double())) for g in grads))
    assert float(cpu_norm.two_norm(grads, sizes, flat=True)) == pytest.approx(truth, rel=1e-6)
    assert again[0] == sizes[1]
    assert max(again[1:]) < ROW
