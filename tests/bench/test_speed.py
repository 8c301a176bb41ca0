"""Rows of speed: a wrong result is not timed, and figures follow from the samples."""

from __future__ import annotations

import pytest
import torch
from bench_cases import CPU, SMALL, elements, measured

from bench import speed
from bench.accuracy import Gradients, WrongResultError
from bench.providers import NAMED, SUMMED, Entry, Provider, in_place
from bench.speed import Effort, bytes_moved, checked
from bench.workloads import Workload
from tritonclip.samples import Samples


def wrong(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Clips to half of the limit, and returns no norm."""
    call = NAMED["torch"].make(gradients, rule, limit / 2).call

    def clip() -> None:
        call()

    return in_place(gradients, clip)


def lying(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Clips right and returns another norm."""
    call = NAMED["torch"].make(gradients, rule, limit).call
    return in_place(gradients, lambda: call() * 1.2)


@pytest.mark.parametrize("make", [wrong, lying])
def test_wrong_provider_is_refused_and_not_timed(make):
    gradients = Gradients(SMALL, "float32", CPU)
    calls: list[str] = []

    def counted(given, rule, limit):
        entry = make(given, rule, limit)

        def call():
            calls.append(rule)
            return entry.call()

        return entry._replace(call=call)

    provider = Provider("wrong", counted, {"norm": 3})
    with pytest.raises(WrongResultError):
        checked(provider, gradients, "norm", True)
    calls.clear()
    bad, good = measured(gradients, "norm", True, [provider, NAMED["torch"]])
    assert len(calls) == 1
    assert (bad.correct, bad.values) == (False, {})
    assert good.correct
    assert good.get("wall_us") is not None


def test_nothing_is_timed_where_every_result_is_wrong():
    provider = Provider("wrong", wrong, {"norm": 3})
    (row,) = measured(Gradients(SMALL, "float32", CPU), "norm", True, [provider])
    assert (row.correct, row.values) == (False, {})


def test_measure_fills_the_columns_of_a_cpu():
    gradients = Gradients(SMALL, "float32", CPU)
    ours, torchs = measured(gradients, "norm", False, [NAMED["tritonclip"], NAMED["torch"]])
    assert (ours.get("provider"), torchs.get("provider")) == ("tritonclip", "torch")
    assert (torchs.get("ratio"), ours.get("baseline")) == (1.0, "torch")
    assert ours.get("bytes_moved") == 4 * elements(SMALL.shapes)
    assert torchs.get("bytes_moved") == 3 * ours.get("bytes_moved")
    for name in ("wall_us", "ratio_lo", "extra_mb", "gb_per_s", "norm_error", "batch"):
        assert ours.get(name) is not None
    for name in ("host_us", "device_us", "graph_us", "launches", "sum_us"):
        assert ours.get(name) is None


def test_ratio_is_to_the_fastest_eager_torch(monkeypatch):
    walls = {"tritonclip": 6.0, "torch": 9.0, "torch foreach": 3.0, "torch compiled": 1.0}

    def interleaved(timed, *_):
        return [Samples([wall] * 2, [wall] * 2, 1) for wall in walls.values()]

    monkeypatch.setattr(speed, "interleaved", interleaved)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    rows = measured(Gradients(SMALL, "float32", CPU), "norm", True, [NAMED[n] for n in walls])
    assert [row.get("ratio") for row in rows] == [0.5, 1 / 3, 1.0, 3.0]
    assert {row.get("baseline") for row in rows} == {"torch foreach"}


def test_large_lists_stand_beside_a_sum_of_as_many_bytes():
    short, long = (Workload("one", "one", ((SUMMED // 4 + more,),)) for more in (0, 1))
    providers = [NAMED["tritonclip"], NAMED["torch sum"]]
    assert "over 8 MiB only" in str(NAMED["torch sum"].why_absent(short, "float32", "cpu"))
    ours, total = measured(Gradients(long, "float32", CPU), "value", False, providers)
    assert ours.get("sum_us") == total.get("wall_us")
    assert total.get("sum_share") == 1.0
    assert total.get("ratio") is None


def test_rows_of_busy_cores_say_so():
    gradients = Gradients(SMALL, "float32", CPU)
    effort = Effort(samples=2, seconds=0.0, busy=3)
    (row,) = measured(gradients, "value", False, [NAMED["torch"]], effort)
    assert row.case["busy"] == 3


def test_each_call_in_training_gets_gradients_that_a_backward_pass_made(monkeypatch):
    gradients = Gradients(SMALL, "float32", CPU)
    made, backward = [], gradients.backward

    def counted():
        made.append(True)
        backward()

    monkeypatch.setattr(gradients, "backward", counted)
    effort = Effort(samples=2, seconds=0.0, training=True)
    (row,) = measured(gradients, "norm", False, [NAMED["tritonclip"]], effort)
    assert row.case["after"] == "backward pass"
    assert len(made) >= row.get("batch") * row.get("repetitions")


def test_bytes_moved_follow_the_formula():
    size = 10_000
    gradients = Gradients(Workload("two", "two", ((size,), (8,))), "float32", CPU)
    n, ours, torchs = gradients.n_bytes, NAMED["tritonclip"], NAMED["torch"]
    assert bytes_moved(gradients, "norm", False, ours) == n
    assert bytes_moved(gradients, "norm", True, ours) == 3 * n
    # The limit is a quarter of the sum of both norms: the larger gradient alone is clipped.
    assert bytes_moved(gradients, "gradient", True, ours) == n + 2 * 4 * size
    assert bytes_moved(gradients, "value", False, ours) == n
    assert bytes_moved(gradients, "value", True, ours) == 2 * n
    assert bytes_moved(gradients, "value", True, torchs) == 4 * n
    assert bytes_moved(gradients, "norm", False, torchs) == 3 * n
    assert bytes_moved(gradients, "step", False, torchs) is None
