"""Pieces on a CPU become smaller after a late one, for a while; results are the same bits."""

import pytest
import torch
from cases import grad_of, normal, parameters

import tritonclip
from tritonclip.backends import cpu_pace, cpu_wide
from tritonclip.backends.cpu_pace import (
    CONVERTED,
    GROWTH,
    LATE,
    LATE_EACH,
    PENALTY,
    SERIAL,
    Pace,
)
from tritonclip.backends.cpu_rows import ROW
from tritonclip.engine.planner import plans


class Clock:
    """Tells a time that a test sets."""

    def __init__(self, monkeypatch):
        self.now = 0
        monkeypatch.setattr(cpu_pace, "perf_counter_ns", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_pieces_stay_as_large_while_none_is_late(clock):
    pace, sizes = Pace(100), []
    for start, stop in pace.spans(250):
        sizes.append(stop - start)
        clock.now += LATE + LATE_EACH * (stop - start)
    assert sizes == [100, 100, 50]


def test_pieces_are_for_one_thread_for_a_while_after_a_late_one(clock):
    pace, spans, late = Pace(CONVERTED), [], 0
    for start, stop in pace.spans(400 * CONVERTED):
        spans.append((start, stop))
        if stop - start == CONVERTED and late < 2:
            clock.now += LATE + LATE_EACH * CONVERTED + 1
            late += 1
    sizes = [stop - start for start, stop in spans]
    n_serial = PENALTY * (1 + GROWTH)
    assert sizes[: PENALTY + 2] == [CONVERTED, *[SERIAL] * PENALTY, CONVERTED]
    assert sizes[: n_serial + 3].count(SERIAL) == n_serial
    assert set(sizes[n_serial + 2 : -1]) == {CONVERTED}
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
    assert (spans[0][0], spans[-1][1]) == (0, 400 * CONVERTED)


def test_the_next_tensor_of_a_call_goes_on_in_one_thread(clock):
    pace = Pace(CONVERTED)
    for _ in pace.spans(CONVERTED):
        clock.now += LATE + LATE_EACH * CONVERTED + 1
    assert next(pace.spans(CONVERTED)) == (0, SERIAL)


def test_nothing_has_no_pieces():
    assert list(Pace(100).spans(0)) == []


def test_pieces_are_whole_rows():
    assert SERIAL % ROW == CONVERTED % ROW == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [1.0, 1e9])
def test_late_pieces_change_no_bit(dtype, limit, clock, monkeypatch):
    monkeypatch.setattr(cpu_wide, "LARGE", 1)
    plans.clear()
    n = CONVERTED + 3 * SERIAL + 77
    results = []
    for late in (False, True):
        grads = [normal(n, dtype), normal(9, dtype), normal(SERIAL + 5, dtype)]
        params = parameters(grads)
        monkeypatch.setattr(cpu_pace, "LATE", -(10**9) if late else 10**18)
        norm = tritonclip.clip_(params, limit)
        results.append([norm, *(grad_of(param) for param in params)])
    plans.clear()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
