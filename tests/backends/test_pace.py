"""Pieces on a CPU: of the fastest of several sizes, and smaller for a while after a late one."""

from functools import partial

import pytest
import torch
from cases import grad_of, normal, parameters

import tritonclip
from tritonclip.backends import cpu_pace, cpu_wide
from tritonclip.backends.cpu_pace import (
    GROWTH,
    LATE,
    LATE_EACH,
    PENALTY,
    SERIAL,
    TRIED,
    Pace,
)
from tritonclip.backends.cpu_rows import ROW
from tritonclip.engine.planner import plans

CONVERTED = cpu_pace.CONVERTED[0]


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
    assert not pace.is_serial
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
    assert pace.is_serial
    assert next(pace.spans(CONVERTED)) == (0, SERIAL)


def pace_with(way, *sizes):
    """One that keeps to a way."""
    pace = Pace(*sizes)
    pace.way = min(way, len(sizes) - 1)
    return pace


def spans_of(pace, clock, n, slow):
    """The pieces of n elements, each of which takes 3 nanoseconds in some ways and 1 in others."""
    spans = []
    for start, stop in pace.spans(n):
        spans.append((start, stop, pace.way))
        clock.now += (3 if pace.way in slow else 1) * (stop - start)
    return spans


@pytest.mark.parametrize("fastest", range(3))
def test_each_size_is_tried_and_the_fastest_is_kept(clock, fastest):
    sizes = [400, 100, 200]
    pace = Pace(*sizes)
    assert pace.kept is None
    spans = spans_of(pace, clock, 10_000, set(range(3)) - {fastest})
    assert pace.kept == fastest
    tried = len(sizes) * TRIED
    assert [way for *_, way in spans[:tried]] == [0, 1, 2] * TRIED
    assert {way for *_, way in spans[tried:]} == {fastest}
    assert all(stop - start == sizes[way] for start, stop, way in spans[:-1])
    assert [start for start, *_ in spans] == [0, *(stop for _, stop, _ in spans[:-1])]
    assert spans[-1][1] == 10_000


def test_short_gradients_choose_a_size_too_but_the_shortest_do_not(clock):
    """Pieces shorter than the smallest size tell little of a size."""
    pace = Pace(400, 100)
    for _ in range(9):
        assert {way for *_, way in spans_of(pace, clock, 99, {0})} == {0}
    ways = [way for _ in range(9) for *_, way in spans_of(pace, clock, 100, {0})]
    assert ways == [0, 1] * TRIED + [1] * (9 - 2 * TRIED)


def test_late_pieces_are_no_trials_and_the_next_size_goes_on(clock):
    pace, ways = Pace(2 * SERIAL, SERIAL), []
    for start, stop in pace.spans((PENALTY + 20) * SERIAL):
        ways.append(pace.way)
        clock.now += stop - start
        if len(ways) == 1:
            clock.now += LATE + LATE_EACH * 2 * SERIAL
    assert ways[: PENALTY + 2 * TRIED + 1] == [0, *[1] * PENALTY] + [1, 0] * TRIED


def test_nothing_has_no_pieces():
    assert list(Pace(100).spans(0)) == []


def test_pieces_are_whole_rows():
    assert not any(size % ROW for size in (SERIAL, *cpu_pace.CONVERTED))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [1.0, 1e9])
@pytest.mark.parametrize("way", [0, 1], ids=["in place", "converted"])
def test_late_pieces_change_no_bit(dtype, limit, way, clock, monkeypatch):
    monkeypatch.setattr(cpu_wide, "LARGE", 1)
    monkeypatch.setattr(cpu_wide, "IN_PLACE", 3 * SERIAL)
    monkeypatch.setattr(cpu_pace, "TRIED", 0)
    monkeypatch.setattr(cpu_wide, "Pace", partial(pace_with, way))
    plans.clear()
    sizes = [CONVERTED + 3 * SERIAL + 77, 9, *[SERIAL + 5] * 40, CONVERTED - 1, 9000]
    results = []
    for late in (False, True):
        grads = [normal(n, dtype, seed=n) for n in sizes]
        params = parameters(grads)
        monkeypatch.setattr(cpu_pace, "LATE", -(10**9) if late else 10**18)
        norm = tritonclip.clip_(params, limit)
        results.append([norm, *(grad_of(param) for param in params)])
    plans.clear()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
