"""Numbers of rules as attributes of an optimizer: refused, with the place where they belong."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tritonclip

FIELDS = ("max_norm", "norm_type", "max_rms", "quantile")


def wrapped() -> tritonclip.ClippedOptimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    return tritonclip.ClippedOptimizer(torch.optim.SGD([weight], lr=0.1), 1.0)


@pytest.mark.parametrize("field", FIELDS)
def test_optimizer_refuses_a_number_of_a_rule(field):
    optimizer = wrapped()
    before = dict(vars(optimizer))
    expected = rf"{field} belongs to a rule, .*such as optimizer\.\w+ = .*got {field} = 2\.0"
    with pytest.raises(AttributeError, match=expected):
        setattr(optimizer, field, 2.0)
    assert vars(optimizer) == before


def test_optimizer_has_no_number_of_a_rule():
    with pytest.raises(AttributeError, match=r"expected optimizer\.clip, ClipByGlobalNorm\("):
        _ = wrapped().max_norm


def test_optimizer_takes_other_attributes():
    """Schedulers and trainers keep theirs on an optimizer."""
    optimizer = wrapped()
    optimizer.of_a_trainer = 3  # type: ignore[attr-defined]
    # Puts a function in the place of `step`.
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.of_a_trainer == 3  # type: ignore[attr-defined]
    assert int(optimizer.stats.steps) == 1


def test_a_subclass_keeps_attributes_of_its_own():
    class Warming(tritonclip.ClippedOptimizer):
        def __init__(self, *args):
            super().__init__(*args)
            self.warmup, self.eps, self.window = 5, 1e-3, 10

    optimizer = Warming(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), 1.0)
    assert (optimizer.warmup, optimizer.eps, optimizer.window) == (5, 1e-3, 10)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_refuses_them_too(copied):
    optimizer = copied(wrapped())
    assert optimizer.clip == tritonclip.ClipByGlobalNorm(1.0)
    with pytest.raises(AttributeError, match="max_norm belongs to a rule"):
        optimizer.max_norm = 2.0


def test_max_consecutive_skips_may_be_replaced():
    """As are skip_above and nonfinite; it was taken without effect."""
    optimizer = wrapped()
    optimizer.nonfinite = "skip"
    optimizer.max_consecutive_skips = 2
    assert optimizer.max_consecutive_skips == 2
    optimizer.param_groups[0]["params"][0].grad = torch.full((2,), torch.nan)
    optimizer.step()
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        optimizer.step()
    with pytest.raises(ValueError, match="max_consecutive_skips must be 1 or more"):
        optimizer.max_consecutive_skips = 0
    optimizer.nonfinite = "propagate"
    optimizer.max_consecutive_skips = None
    with pytest.raises(ValueError, match="no step is skipped: expected nonfinite='skip'"):
        optimizer.max_consecutive_skips = 2
    assert optimizer.max_consecutive_skips is None
