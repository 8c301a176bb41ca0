"""Statistics of a run: one dict for a logger, their device, and their attributes."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from clip_stats import COUNTS, KEYS, grouped
from torch.optim import SGD
from training import give_grads, new_params, sgd, wrapped

from tritonclip import ClippedOptimizer, ClipStats


def test_statistics_follow_a_model_that_was_moved():
    """As trainers do it, after the optimizer was made; what stayed behind would be a transfer."""
    params = new_params(device="meta")
    for param in params:
        param.grad = torch.empty_like(param)
    optimizer = ClippedOptimizer(SGD(params), 1.0)
    optimizer.stats = ClipStats(torch.device("cpu"))
    optimizer.step()
    stats = optimizer.stats
    tensors = (stats.last_norm, stats.last_coefficient, stats.steps, stats.clipped_steps)
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("swapped", [False, True], ids=["replaced", "swapped"])
def test_statistics_of_a_model_made_on_meta_start_with_its_values(swapped):
    """`to_empty` replaces parameters, or gives them memory where the user asked for it."""
    layer = torch.nn.Linear(2, 1, bias=False, device="meta")
    optimizer = ClippedOptimizer(sgd(layer.parameters()), 1.0)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    try:
        layer.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()
    if swapped:
        assert optimizer.stats.summary()["norm"] == 5
        assert optimizer.stats.summary()["steps"] == 1
    else:
        with pytest.raises(RuntimeError, match=r"device meta.*make the optimizer after model\.to_"):
            optimizer.stats.summary()


def test_counts_are_on_the_device_of_the_parameters():
    """Made, kept and given back there; nothing can be read from the device meta."""
    param = torch.nn.Parameter(torch.empty(3, device="meta"))
    param.grad = torch.empty(3, device="meta")
    optimizer = ClippedOptimizer(sgd([param]), 1.0)
    optimizer.step()
    assert {value.device.type for value in optimizer.stats.state_dict().values()} == {"meta"}


def test_summary_before_the_first_step():
    summary = wrapped(sgd)[1].stats.summary()
    assert set(summary) == KEYS
    assert all(summary[name] == 0 for name in COUNTS)
    assert all(math.isnan(summary[name]) for name in KEYS - COUNTS)


def test_summary_is_of_plain_numbers():
    params = new_params()
    optimizer = grouped(params)
    give_grads(params)
    optimizer.step()
    types = {name: type(value) for name, value in optimizer.stats.summary().items()}
    assert {name for name, kind in types.items() if kind is int} == COUNTS
    assert {kind for name, kind in types.items() if name not in COUNTS} == {float}


def test_summary_is_not_changed_by_later_steps():
    params, optimizer = wrapped(sgd)
    give_grads(params)
    optimizer.step()
    summary = optimizer.stats.summary()
    kept = dict(summary)
    give_grads(params, size=5.0)
    optimizer.step()
    assert summary == kept
    assert optimizer.stats.summary() != kept


def test_repr_does_not_read_the_device():
    stats = ClipStats(torch.device("meta"))
    assert repr(stats) == "<ClipStats on meta; summary() reads it>"


@pytest.mark.parametrize("name", ["norm", "coefficient", "clipped_share", "fantasy"])
def test_stats_name_the_attributes_that_there_are(name):
    stats = ClipStats(torch.device("cpu"))
    expected = rf"no attribute '{name}'; expected one of .*\blast_norm, .*\bsummary\(\)"
    with pytest.raises(AttributeError, match=expected) as caught:
        getattr(stats, name)
    assert "record_" not in str(caught.value)
    assert not hasattr(stats, name)


def test_stats_that_name_their_attributes_are_copied():
    stats = copy.deepcopy(ClipStats(torch.device("cpu")))
    assert pickle.loads(pickle.dumps(stats)).summary()["steps"] == 0
    with pytest.raises(AttributeError, match=r"no attribute '_private'$"):
        _ = stats._private  # type: ignore[attr-defined]
