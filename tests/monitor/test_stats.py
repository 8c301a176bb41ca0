"""Statistics of a run: one dict for a logger, their device, and their attributes."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch.optim import SGD

from helpers.clip_stats import COUNTS, KEYS, grouped
from helpers.serving import decided_on_device
from helpers.training import give_grads, new_params, sgd, wrapped
from tritonclip import ClipByQuantile, ClippedOptimizer, ClippingWarning, ClipStats


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


def stats_of_run(limit, before=None, steps=40, **options):
    """Statistics of gradients whose norms are about 3; `before` is another clip's limit."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(60)) for _ in range(3)]
    optimizer = ClippedOptimizer(SGD(weights, lr=0.1, **options), limit, nonfinite="skip")
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(60) * (1 + 0.5 * torch.rand(())) * 0.2
        if before is not None:
            torch.nn.utils.clip_grad_norm_(weights, before)
        optimizer.step()
    return optimizer.stats


CLIPPED_BEFORE = "steps had a norm at the limit, and none .* something else clips to the same limit"


@pytest.mark.parametrize("limit", [0.1, 1.0, 2.5])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_summary_warns_once_where_something_clips_first(limit, fused):
    with decided_on_device() if fused else nullcontext():
        stats = stats_of_run(limit, before=limit, fused=fused)
    with pytest.warns(ClippingWarning, match=CLIPPED_BEFORE) as caught:
        stats.summary()
    assert [warning.filename for warning in caught] == [__file__]
    stats.summary()


@pytest.mark.parametrize(
    ("limit", "before"),
    [(1.0, None), (2.9, None), (50.0, None), (2.0, 3.0), (3.0, 2.0)],
    ids=["clipped", "clipped-sometimes", "never", "looser-before", "tighter-before"],
)
def test_summary_does_not_warn_where_nothing_clips_to_the_same_limit_first(limit, before):
    stats_of_run(limit, before).summary()


def test_summary_does_not_warn_of_a_norm_at_the_limit_by_chance():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = ClippedOptimizer(sgd([weight]), 1.0)
    for step in range(100):
        weight.grad = torch.tensor([1.0 if step % 20 == 7 else 0.3])
        optimizer.step()
    assert optimizer.stats.summary()["clipped_steps"] == 5


def test_summary_does_not_warn_of_a_limit_that_follows_the_norms():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = ClippedOptimizer(sgd([weight]), ClipByQuantile(0.9, 10))
    for step in range(100):
        weight.grad = torch.tensor([1.0 + 1e-6 * step])
        optimizer.step()
    assert optimizer.stats.summary()["clipped_steps"] > 10


def test_summary_warns_no_more_after_a_checkpoint_was_loaded():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = ClippedOptimizer(sgd([weight]), 1.0)
    for _ in range(20):
        weight.grad = torch.ones(1)
        optimizer.step()
    with pytest.warns(ClippingWarning, match=CLIPPED_BEFORE):
        optimizer.stats.summary()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.stats.summary()


def test_summary_does_not_warn_of_statistics_of_an_earlier_version():
    saved = stats_of_run(1.0).state_dict()
    del saved["well_clipped_steps"]
    stats = ClipStats(torch.device("cpu"))
    stats.load_state_dict(saved)
    assert stats.summary()["clipped_steps"] == 40
