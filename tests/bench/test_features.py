"""Features beside other loops: wrong results are found and not timed, ratios are over the best."""

from __future__ import annotations

import pytest
import torch

from bench import features
from bench.features import FEATURES, Comparison
from tritonclip.samples import Samples, Timed

TRUTH = [torch.tensor([1.0, -2.0], dtype=torch.float64)]
WALLS = {"tritonclip": 4.0, "loop": 30.0, "best": 12.0}


def test_ratio_is_over_the_fastest_right_result(monkeypatch):
    def interleaved(timed, *_):
        assert len(timed) == len(WALLS)
        return [Samples([us, us + 1, us + 2], [], 1) for us in WALLS.values()]

    monkeypatch.setattr(features, "interleaved", interleaved)
    right = Timed(lambda: [torch.tensor([1.0, -2.0])])
    wrong = Timed(lambda: [torch.tensor([1.0, -2.1])])
    comparison = Comparison("two", {**dict.fromkeys(WALLS, right), "wrong": wrong}, TRUTH)
    rows = {row.case["provider"]: row for row in features.rows_of("sleep", comparison)}
    assert rows["tritonclip"].get("baseline") == "best"
    assert rows["tritonclip"].get("ratio") == 13.0 / 5.0
    assert rows["loop"].get("wall_us") == 31.0
    assert rows["wrong"].correct is False
    assert not rows["wrong"].values


@pytest.mark.parametrize("feature", FEATURES)
def test_results_on_the_first_list_are_right(feature):
    # It may hold files open until it is closed.
    comparisons = FEATURES[feature]()
    comparison = next(comparisons)
    assert "tritonclip" in comparison.providers
    for timed in comparison.providers.values():
        assert features.is_right(timed.prepared()(), comparison)
