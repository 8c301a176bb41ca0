"""Samples are taken in turn, each round with every call once."""

import gc
from functools import partial

import pytest
import torch

from bench import samples
from bench.samples import Timed

CPU = torch.device("cpu")


def test_clipped_calls_are_prepared_before_each_and_others_run_in_batches():
    order: list[str] = []
    call, prepare = (lambda: order.append("call")), (lambda: order.append("prepare"))
    samples.sample(Timed(call, prepare), CPU, 2)
    assert order == ["prepare", "call"] * 2
    order.clear()
    samples.sample(Timed(call, None), CPU, 3)
    assert order == ["call"] * 3


def test_every_round_has_each_call_once():
    order: list[int] = []
    timed = [Timed(partial(order.append, i), None) for i in range(3)]
    found = samples.interleaved(timed, CPU, 4, 0.0, most_calls=1)
    rounds = torch.tensor(order[-12:]).view(4, 3)
    assert rounds.sort().values.tolist() == [[0, 1, 2]] * 4
    assert [len(one.walls) for one in found] == [4, 4, 4]


def test_each_call_has_as_many_in_a_sample_as_its_own_time_allows(monkeypatch):
    order: list[str] = []
    walls = {"short": 300.0, "long": 2000.0, "shortest": 0.1}
    timed = [Timed(partial(order.append, name), None) for name in walls]

    def sample(one, device, n_calls=1):
        for _ in range(n_calls):
            one.call()
        return walls[order[-1]], walls[order[-1]]

    monkeypatch.setattr(samples, "sample", sample)
    found = samples.interleaved(timed, CPU, 2, 0.0)
    assert [one.n_calls for one in found] == [4, 1, samples.MOST_CALLS]
    # Four rounds of single calls find out how many fit.
    assert [order[12:].count(name) for name in walls] == [8, 2, 2 * samples.MOST_CALLS]
    assert [one.walls for one in found] == [[wall] * 2 for wall in walls.values()]


@pytest.mark.parametrize("collects", [True, False], ids=["on", "off"])
def test_garbage_collection_is_as_before_also_after_an_error(collects):
    seen = []

    def call():
        seen.append(gc.isenabled())
        if len(seen) > 5:
            raise KeyboardInterrupt

    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(KeyboardInterrupt):
            samples.interleaved([Timed(call)], CPU, 4, 0.0)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(seen)
