"""Rows of gradients on a CPU: every element stands in one, wherever batches of them end."""

import math

import pytest
import torch
from cases import normal

from tritonclip.backends import cpu_norm, cpu_pace, cpu_rows
from tritonclip.backends.cpu_norm import two_norms_of_each
from tritonclip.backends.cpu_pace import CONVERTED as SIZES
from tritonclip.backends.cpu_pace import SERIAL, Pace
from tritonclip.backends.cpu_rows import (
    MEDIUM,
    ROW,
    SCRATCH,
    SLAB,
    SMALL,
    long_row_norms,
    row_norms_of,
)
from tritonclip.backends.cpu_squares import LONE

CONVERTED = SIZES[0]
# Elements of gradients of which so many fill scratch but for less than a row, or by less than one
# too many.
N_FILLING = 40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rest", [-ROW, 1 - ROW, -1, 0, 1, ROW - 1, ROW])
def test_a_batch_ends_before_scratch_does(dtype, rest):
    size, last = divmod(SCRATCH + rest, N_FILLING)
    sizes = [size] * (N_FILLING - 1) + [size + last] + [size] * 3
    assert all(SMALL < n <= MEDIUM for n in sizes)
    grads = [normal(n, dtype, seed=n + i) for i, n in enumerate(sizes)]
    rows = list(row_norms_of(grads, sizes))
    assert [grad.data_ptr() for sources, *_ in rows for grad in sources] == [
        grad.data_ptr() for grad in grads
    ]
    for sources, norms, _ in rows:
        truth = math.hypot(*(float(torch.linalg.vector_norm(g.double())) for g in sources))
        assert float(torch.linalg.vector_norm(norms.double())) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slab", [CONVERTED, 4 * CONVERTED], ids=["blocks", "one-block"])
@pytest.mark.parametrize("compared", [1, 2**40], ids=["all sizes", "one size"])
def test_every_row_of_a_long_gradient_is_measured(dtype, slab, compared, monkeypatch):
    """Converted ones piece by piece; of whatever length pieces are where cores are busy."""
    monkeypatch.setattr(cpu_rows, "COMPARED", compared)
    grad = normal(7 * CONVERTED + 3 * ROW, dtype)
    norms = torch.cat([norms for _, norms, _ in long_row_norms([grad], slab)])
    truth = torch.linalg.vector_norm(grad.double().view(-1, ROW), dim=1)
    torch.testing.assert_close(norms.double(), truth, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_a_slab_at_a_time_in_the_order_of_their_gradients(dtype):
    """A gradient longer than a slab is cut; shorter ones share a slab that holds them whole."""
    grads = [torch.full((n * ROW,), float(n), dtype=dtype) for n in (1, 3, 2, 9, 4)]
    slabs = list(long_row_norms(grads, 4 * ROW))
    assert [slab.counts for slab in slabs] == [[1, 3], [2], [4], [4], [1], [4]]
    expected = [float(n) for n in (1, 3, 2, 9, 4) for _ in range(n)]
    norms = torch.cat([slab.norms for slab in slabs]) / math.sqrt(ROW)
    assert norms.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("more", [0, ROW])
def test_pieces_of_several_sizes_are_tried_where_much_is_converted(dtype, more, monkeypatch):
    tried = []

    def pace_of(*sizes: int) -> Pace:
        tried.append(sizes)
        return Pace(*sizes)

    monkeypatch.setattr(cpu_rows, "Pace", pace_of)
    monkeypatch.setattr(cpu_rows, "COMPARED", 4 * CONVERTED)
    grads = [torch.ones(n, dtype=dtype) for n in (2 * CONVERTED, 2 * CONVERTED - ROW + more)]
    assert sum(len(norms) for _, norms, _ in long_row_norms(grads)) == sum(map(len, grads)) // ROW
    if dtype == torch.float32:
        assert tried == [(cpu_rows.SLAB,)]
    else:
        assert tried == [SIZES if more else SIZES[:1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_of_long_gradients_is_measured_whole(dtype):
    """Gradients of several slabs, of rows that are added up alone, together, and one by one."""
    sizes = [2 * SLAB + 3 * ROW + 5, LONE * ROW, LONE * ROW - 1, *[SMALL + 1] * 900, SMALL, 3, 0]
    grads = [torch.full((n,), 1.0 + i % 7, dtype=dtype) for i, n in enumerate(sizes)]
    truth = [(1.0 + i % 7) * math.sqrt(n) for i, n in enumerate(sizes)]
    norms = two_norms_of_each(grads, sizes, flat=True)
    assert norms.tolist() == pytest.approx(truth, rel=1e-6)
    grads[0][SLAB + 1] = torch.nan
    norms = two_norms_of_each(grads, sizes, flat=True)
    assert norms.isnan().nonzero().flatten().tolist() == [0]


def test_medium_gradients_are_measured_in_one_thread_after_a_late_batch(monkeypatch):
    """Norms of more elements are parallel regions, which wait where cores are busy."""
    now = 0
    measured: list[int] = []
    monkeypatch.setattr(cpu_pace, "perf_counter_ns", lambda: now)
    vector_norm = torch.linalg.vector_norm

    def late_norm(rows, *args, **kwargs):
        nonlocal now
        now += 10**9 if rows.numel() > SERIAL else 1
        measured.append(rows.numel())
        return vector_norm(rows, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", late_norm)
    each = SCRATCH // SERIAL
    grads = [torch.ones(SERIAL, dtype=torch.bfloat16) for _ in range(3 * each)]
    norms = torch.cat([norms for _, norms, _ in row_norms_of(grads, [SERIAL] * len(grads))])
    assert measured == [each * SERIAL, *[SERIAL] * 2 * each]
    assert float(norms.double().norm()) == pytest.approx(math.sqrt(3 * each * SERIAL), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_rows_cannot_square_costs_no_other_its_norm(dtype, monkeypatch):
    """Only that one is measured again, in float64, though all were measured in one memory."""
    again = []
    exact = cpu_norm._exact_norms

    def exact_norms(x):
        again.append(x.numel())
        yield from exact(x)

    sizes = [SERIAL + ROW, 3 * SERIAL, 2 * SERIAL + 5]
    grads = [torch.full((n,), 1.0, dtype=dtype) for n in sizes]
    grads[1][7] = 1e30
    monkeypatch.setattr(cpu_norm, "_exact_norms", exact_norms)
    truth = math.hypot(*(float(torch.linalg.vector_norm(g.double())) for g in grads))
    assert float(cpu_norm.two_norm(grads, sizes, flat=True)) == pytest.approx(truth, rel=1e-6)
    assert again[0] == sizes[1]
    assert max(again[1:]) < ROW
