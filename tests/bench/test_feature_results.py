"""Features beside other loops: all results are right."""

from __future__ import annotations

import pytest
import torch

from bench.test_features import FEATURES, difference
from tritonclip.samples import Timed


@pytest.mark.parametrize("feature", FEATURES)
def test_results_on_the_first_list_are_right(feature):
    made = FEATURES[feature].make(*FEATURES[feature].cases[0])
    assert set(made.calls) <= set(FEATURES[feature].providers)
    with made.files:
        for call in made.calls.values():
            timed = call if isinstance(call, Timed) else Timed(call)
            assert difference(timed.prepared()(), made.truth) <= made.tolerance


def test_difference_is_relative_to_the_largest_element():
    truth = [torch.tensor([1.0, -2.0], dtype=torch.float64)]
    assert difference([torch.tensor([1.0, -2.1])], truth) == pytest.approx(0.05)
    assert difference(None, []) == 0.0
