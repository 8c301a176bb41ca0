"""Under nonfinite="error", a wrapper names the parameters with NaN and inf by group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD

from helpers.cases import assert_bits, copies, grad_of, normal, parameter
from helpers.param_groups import ABSENT, grads_of, values_of
from tritonclip import ClippedOptimizer


def with_nan(names):
    """Two groups, the second gradient of the second with a NaN; named parameters or not."""
    params = [parameter(normal(3, seed=i)) for i in range(4)]
    grad_of(params[3])[1] = math.nan
    labelled = list(zip(["a", "b", "c.weight", "c.bias"], params, strict=True))
    members: list[Any] = labelled if names else params
    groups: list[dict[str, Any]] = [{"params": members[:2]}, {"params": members[2:]}]
    return groups


@pytest.mark.parametrize("own", [ABSENT, 0.5, None], ids=["absent", "own", "None"])
@pytest.mark.parametrize("names", [True, False], ids=["named", "unnamed"])
def test_error_names_the_parameter(names, own):
    groups = with_nan(names)
    if own is not ABSENT:
        groups[1]["clip"] = own
    optimizer = ClippedOptimizer(SGD(groups, lr=1.0), 1.0, nonfinite="error")
    label = r"c\.bias$" if names else r"param_groups\[1\]\['params'\]\[1\]$"
    before = copies(grads_of(optimizer))
    with pytest.raises(RuntimeError, match=label):
        optimizer.step()
    assert_bits(grads_of(optimizer), before)
    assert all(not p.any() for p in values_of(optimizer))


@pytest.mark.parametrize("own", [0.5, None], ids=["own", "None"])
def test_error_says_why_a_norm_was_not_the_reason(own):
    """Only gradients under a rule have a norm to speak of."""
    groups = with_nan(True)
    groups[1]["clip"] = own
    optimizer = ClippedOptimizer(SGD(groups, lr=1.0), 1.0, nonfinite="error")
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert ("total norm" in str(caught.value)) == (own is not None)
    assert "Non-finite gradients: c.bias" in str(caught.value)


@pytest.mark.parametrize("own", [ABSENT, 0.5], ids=["absent", "own"])
def test_error_skips_parameters_without_gradient_when_it_counts(own):
    groups = with_nan(True)
    if own is not ABSENT:
        groups[1]["clip"] = own
    optimizer = ClippedOptimizer(SGD(groups, lr=1.0), 1.0, nonfinite="error")
    values_of(optimizer)[0].grad = values_of(optimizer)[2].grad = None
    with pytest.raises(RuntimeError, match=r": c\.bias$"):
        optimizer.step()


def test_error_names_a_parameter_that_was_added_by_hand():
    groups = with_nan(True)
    added = parameter(torch.full((2,), math.nan))
    optimizer = ClippedOptimizer(SGD(groups, lr=1.0), 1.0, nonfinite="error")
    optimizer.param_groups[1]["params"].append(added)
    with pytest.raises(RuntimeError, match=r"c\.bias, param_groups\[1\]\['params'\]\[2\]$"):
        optimizer.step()
