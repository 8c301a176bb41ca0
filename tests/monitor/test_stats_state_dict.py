"""Statistics in checkpoints: saved as copies, loaded, or started anew."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch.optim import SGD

from helpers import reference
from helpers.cases import assert_bits, assert_norm
from helpers.clip_stats import COUNTS, grouped
from helpers.training import give_grads, new_params, sgd, wrapped
from tritonclip import ClippedOptimizer


def trained(steps: int) -> ClippedOptimizer:
    params = new_params()
    optimizer = grouped(params)
    for step in range(steps):
        give_grads(params, size=10.0 if step % 2 else 1e-3, seed=step)
        optimizer.step()
    return optimizer


def test_state_dict_is_a_copy():
    optimizer = trained(2)
    saved = optimizer.state_dict()["tritonclip"]
    kept = {name: value.clone() for name, value in saved.items()}
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 3.0)
    optimizer.step()
    assert_bits(saved.values(), kept.values())
    assert int(optimizer.stats.steps) == 3


def test_state_dict_comes_back_from_a_checkpoint_and_counts_on():
    saved = trained(3)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loaded = grouped(new_params())
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert_bits(loaded.stats.state_dict().values(), saved.stats.state_dict().values())
    give_grads(loaded.param_groups[1]["params"], size=10.0)
    loaded.step()
    summary = loaded.stats.summary()
    assert (summary["steps"], summary["clipped_steps"]) == (4, 2)
    assert int(saved.stats.steps) == 3


def test_state_dict_does_not_share_memory_with_what_loads_it():
    saved = trained(3).stats.state_dict()
    kept = {name: value.clone() for name, value in saved.items()}
    loaded = grouped(new_params())
    loaded.stats.load_state_dict(saved)
    loaded.stats.last_norm.zero_()
    loaded.stats.steps.zero_()
    assert_bits(saved.values(), kept.values())


def test_state_dict_keeps_the_norm_of_float64():
    params, twins = new_params(dtype=torch.float64), new_params(dtype=torch.float64)
    saved, loaded = ClippedOptimizer(sgd(params), 1.0), ClippedOptimizer(sgd(twins), 1.0)
    norm = reference.total_norm(give_grads(params))
    saved.step()
    loaded.load_state_dict(saved.state_dict())
    assert_norm(loaded.stats.last_norm, norm)
    assert loaded.stats.last_norm.dtype == torch.float64


def test_load_without_statistics_starts_them_anew():
    """From a bare optimizer's checkpoint; group entries are those of the run before, too."""
    optimizer = trained(3)
    bare = SGD([{"params": [param]} for param in new_params()], lr=0.1)
    optimizer.load_state_dict(bare.state_dict())
    summary = optimizer.stats.summary()
    assert all(summary[name] == 0 for name in COUNTS)
    assert all(math.isnan(summary[name]) for name in set(summary) - COUNTS)


def test_load_forgets_the_group_entries_of_the_run_before():
    """A checkpoint has none, and those that are there belong to steps that it does not know."""
    optimizer, other = trained(3), trained(1)
    optimizer.load_state_dict(other.state_dict())
    assert math.isnan(optimizer.stats.summary().get("group1_norm", math.nan))


def test_load_of_statistics_that_are_none_changes_nothing():
    optimizer = trained(2)
    before = optimizer.state_dict()
    broken = wrapped(sgd)[1].state_dict()
    broken["param_groups"][0]["lr"] = 7.0
    broken["tritonclip"] = {"steps": torch.zeros(3)}
    with pytest.raises(ValueError, match="steps of a saved state must be a count"):
        optimizer.load_state_dict(broken)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
