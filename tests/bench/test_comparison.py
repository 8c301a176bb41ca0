"""Calls take turns, and each hands its samples over."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import comparison
from bench.comparison import Comparison, Effort, hand_over, ratio
from bench.samples import Samples, Timed


def samples(*walls: float) -> Samples:
    return Samples(list(walls), [], 4)


def test_hand_over_gives_the_plugin_every_sample(benchmark, monkeypatch):
    """The fixture is pytest-benchmark's own; under pytest-xdist it is disabled."""
    given: list[Any] = []
    monkeypatch.setattr(benchmark, "disabled", False)
    monkeypatch.setattr(benchmark, "_add_stats", given.append)
    monkeypatch.setattr(benchmark, "name", "test_clip[norm-torch-clipped]")
    params = {"rule": "norm", "provider": "torch", "step": "clipped"}
    monkeypatch.setattr(benchmark, "params", params)
    benchmark.extra_info["ratio"] = 2.0
    hand_over(benchmark, samples(3.0, 5.0, 4.0))
    (found,) = (one.as_dict() for one in given)
    assert found["stats"]["data"] == pytest.approx([3e-6, 5e-6, 4e-6])
    assert found["stats"]["iterations"] == 4
    assert (found["group"], found["extra_info"]) == ("test_clip norm clipped", {"ratio": 2.0})


def test_ratio_is_to_the_fastest_baseline():
    known = {"tritonclip": samples(6, 6, 6), "torch": samples(9, 9, 9), "loop": samples(3, 3, 6)}
    found = ratio("tritonclip", known, ["torch", "loop", "absent"])
    assert (found["ratio"], found["baseline"], found["baseline_us"]) == (0.5, "loop", 3)
    assert ratio("tritonclip", known, ["absent"]) == {}


@pytest.fixture
def turns(monkeypatch):
    """Calls that were timed in turn; nothing is."""
    taken: list[list[Any]] = []

    def interleaved(calls, device, *_, **__):
        taken.append(calls)
        return [samples(1.0, 2.0) for _ in calls]

    monkeypatch.setattr(comparison, "interleaved", interleaved)
    return taken


def test_all_right_calls_are_timed_in_turn_once(turns, monkeypatch):
    given = []
    monkeypatch.setattr(comparison, "hand_over", lambda benchmark, own: given.append(own))
    calls = {name: Timed(lambda: None) for name in ("tritonclip", "torch", "wrong")}
    benchmark = SimpleNamespace(enabled=True, extra_info={})
    compared = Comparison(
        calls, Effort(), lambda name, _: {"name": name}, {"wrong": "gradient 0 is off"}
    )
    for name in ("torch", "tritonclip"):
        compared.hand_over(benchmark, name)
        assert benchmark.extra_info == {"name": name}
    assert turns == [[calls["tritonclip"], calls["torch"]]]
    assert given == [samples(1.0, 2.0)] * 2
