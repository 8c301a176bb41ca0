"""Samples are taken in turn, and processes that spin meanwhile come to an end."""

from __future__ import annotations

import subprocess
from functools import partial

import torch
from bench_cases import CPU

from bench import timing
from bench.timing import Timed


def test_clipped_calls_are_prepared_before_each_and_others_run_in_batches():
    order: list[str] = []
    call, prepare = (lambda: order.append("call")), (lambda: order.append("prepare"))
    timing.sample(Timed(call, prepare), CPU, 2)
    assert order == ["prepare", "call"] * 2
    order.clear()
    timing.sample(Timed(call, None), CPU, 3)
    assert order == ["call"] * 3


def test_every_round_has_each_call_once():
    order: list[int] = []
    timed = [Timed(partial(order.append, i), None) for i in range(3)]
    samples = timing.interleaved(timed, CPU, 4, 0.0, most_calls=1)
    rounds = torch.tensor(order[-12:]).view(4, 3)
    assert rounds.sort().values.tolist() == [[0, 1, 2]] * 4
    assert [len(one.walls) for one in samples] == [4, 4, 4]


def test_each_call_has_as_many_in_a_sample_as_its_own_time_allows(monkeypatch):
    order: list[str] = []
    walls = {"short": 300.0, "long": 2000.0, "shortest": 0.1}
    timed = [Timed(partial(order.append, name), None) for name in walls]

    def sample(one, device, n_calls=1):
        for _ in range(n_calls):
            one.call()
        return walls[order[-1]], walls[order[-1]]

    monkeypatch.setattr(timing, "sample", sample)
    samples = timing.interleaved(timed, CPU, 2, 0.0)
    assert [one.n_calls for one in samples] == [4, 1, timing.MOST_CALLS]
    # Four rounds of single calls find out how many fit.
    assert [order[12:].count(name) for name in walls] == [8, 2, 2 * timing.MOST_CALLS]
    assert [one.walls for one in samples] == [[wall] * 2 for wall in walls.values()]


def test_busy_cores_are_given_back(monkeypatch):
    started = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with timing.busy_cores(2):
        assert [process.poll() for process in started] == [None, None]
    assert None not in [process.poll() for process in started]
