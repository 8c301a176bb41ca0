"""Pieces on a CPU: of the fastest of several sizes, and smaller for a while after a late one."""

from functools import partial

import pytest
import torch
from cases import grad_of, normal, parameters

import tritonclip
from tritonclip.backends import cpu_pace, cpu_wide
from tritonclip.backends.cpu_pace import LATE, LATE_EACH, SERIAL, TRIED, Pace
from tritonclip.backends.cpu_wide import CONVERTED
from tritonclip.engine.planner import plans

pytestmark = pytest.mark.usefixtures("operators")


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


# Nanoseconds of a piece that is late, and of one in one thread.
TOO_LONG, ALONE = LATE + LATE_EACH * CONVERTED + 1, 10_000
# Pieces in one thread that take as long as the late one.
N_ALONE = -(-TOO_LONG // ALONE)


def test_pieces_are_for_one_thread_until_they_took_as_long_as_the_late_one(clock):
    pace, spans = Pace(CONVERTED), []
    for start, stop in pace.spans(80 * CONVERTED):
        spans.append((start, stop))
        n_large = sum(stop - start == CONVERTED for start, stop in spans)
        is_late = stop - start == CONVERTED and n_large <= 2
        clock.now += TOO_LONG if is_late else ALONE
    sizes = [stop - start for start, stop in spans]
    assert sizes[: N_ALONE + 2] == [CONVERTED, *[SERIAL] * N_ALONE, CONVERTED]
    assert sizes[: 2 * N_ALONE + 2].count(SERIAL) == 2 * N_ALONE
    assert set(sizes[2 * N_ALONE + 2 : -1]) == {CONVERTED}
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
    assert (spans[0][0], spans[-1][1]) == (0, 80 * CONVERTED)


def test_late_pieces_are_followed_by_others_where_one_thread_was_slower(clock):
    """The second comes after so many in time that all together were faster than one thread."""
    pace, sizes = Pace(CONVERTED), []
    each = TOO_LONG * SERIAL // CONVERTED
    for start, stop in pace.spans(80 * CONVERTED):
        sizes.append(stop - start)
        if stop - start == SERIAL:
            clock.now += each
        elif sizes.count(CONVERTED) in (1, 10):
            clock.now += TOO_LONG
    n_alone = -(-TOO_LONG // each)
    assert sizes.count(SERIAL) == n_alone
    assert set(sizes[n_alone + 1 : -1]) == {CONVERTED}


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
    assert [way for *_, way in spans[:tried]] == [way for way in range(3) for _ in range(TRIED)]
    assert {way for *_, way in spans[tried:]} == {fastest}
    assert all(stop - start == sizes[way] for start, stop, way in spans[:-1])
    assert [start for start, *_ in spans] == [0, *(stop for _, stop, _ in spans[:-1])]
    assert spans[-1][1] == 10_000


def test_short_gradients_choose_a_size_too_but_the_shortest_do_not(clock):
    """Pieces shorter than half of the smallest size tell little of a size."""
    pace = Pace(400, 100)
    for _ in range(9):
        assert {way for *_, way in spans_of(pace, clock, 49, {0})} == {0}
    ways = [way for _ in range(9) for *_, way in spans_of(pace, clock, 50, {0})]
    assert ways == [0] * TRIED + [1] * (9 - TRIED)


def test_late_pieces_are_no_trials_and_the_next_size_goes_on(clock):
    pace, spans = Pace(2 * SERIAL, SERIAL), []
    too_long = LATE + 2 * LATE_EACH * 2 * SERIAL
    for start, stop in pace.spans(40 * SERIAL):
        spans.append((pace.way, pace.is_serial))
        clock.now += too_long if len(spans) == 1 else 2 * (stop - start)
    n_alone = -(-too_long // (2 * SERIAL))
    assert spans[: n_alone + 1] == [(0, False), *[(1, True)] * n_alone]
    tried = [(1, False)] * TRIED + [(0, False)] * TRIED
    assert spans[n_alone + 1 :][: 2 * TRIED] == tried


def test_nothing_has_no_pieces():
    assert list(Pace(100).spans(0)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [1.0, 1e9])
@pytest.mark.parametrize("way", [0, 1], ids=["in place", "converted"])
def test_ways_and_threads_change_no_bit(dtype, limit, way, clock, monkeypatch):
    monkeypatch.setattr(cpu_wide, "LARGE", 1)
    monkeypatch.setattr(cpu_wide, "IN_PLACE", 3 * SERIAL)
    monkeypatch.setattr(cpu_pace, "TRIED", 0)
    plans.clear()
    sizes = [CONVERTED + 3 * SERIAL + 77, 9, *[SERIAL + 5] * 40, CONVERTED - 1, 9000]
    results = []
    for chosen, is_serial in ((0, False), (way, False), (way, True)):
        grads = [normal(n, dtype, seed=n) for n in sizes]
        params = parameters(grads)
        monkeypatch.setattr(cpu_wide, "Pace", partial(pace_with, chosen))
        monkeypatch.setattr(Pace, "is_serial", is_serial)
        norm = tritonclip.clip_(params, limit)
        results.append([norm, *(grad_of(param) for param in params)])
    plans.clear()
    for result in zip(*results, strict=True):
        assert all(torch.equal(result[0], other) for other in result[1:])
