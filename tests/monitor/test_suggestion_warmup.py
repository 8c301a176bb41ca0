"""The warm-up of a run: found and left out, or given as a number of steps."""

from __future__ import annotations

import numpy as np
import pytest

import tritonclip
from helpers.norm_series import norms_of


@pytest.mark.parametrize("high", [5.0, 1 / 5], ids=["above", "below"])
def test_warmup_is_found_and_left_out(high):
    norms = norms_of(n=2000, spikes=0.02)
    norms[:200] *= high ** np.linspace(1, 0, 200)
    suggestion = tritonclip.suggest_max_norm(norms)
    # The last quarter of the way is within the spread of the norms.
    assert 100 <= suggestion.warmup <= 220
    assert suggestion.steps == 2000 - suggestion.warmup


def test_no_warmup_where_the_run_begins_as_it_goes_on():
    assert tritonclip.suggest_max_norm([1.0] * 500).warmup == 0


def test_warmup_is_at_most_a_fifth():
    assert 150 <= tritonclip.suggest_max_norm(norms_of(drift=1e-4)).warmup <= 200


def test_warmup_that_is_given_counts():
    norms = norms_of(spikes=0.03)
    norms[:500] = 1000.0 + norms[:500]
    suggestion = tritonclip.suggest_max_norm(norms, warmup=500)
    assert (suggestion.warmup, suggestion.steps) == (500, 500)
    assert max(spike.norm for spike in suggestion.spikes) < 1000


@pytest.mark.parametrize("warmup", [-1, 1.5, True, "10"])
def test_warmup_that_is_no_number_of_steps_is_refused(warmup):
    with pytest.raises(ValueError, match="warmup must be a number of steps, 0 or more"):
        tritonclip.suggest_max_norm(norms_of(), warmup=warmup)
