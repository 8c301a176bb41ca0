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
    samples, n_calls = timing.interleaved(timed, CPU, 4, 0.0)
    rounds = torch.tensor(order[-12 * n_calls :: n_calls]).view(4, 3)
    assert rounds.sort().values.tolist() == [[0, 1, 2]] * 4
    assert [len(one.walls) for one in samples] == [4, 4, 4]


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
