"""Gradients are the same on every run, and a wrong one is seen."""

from __future__ import annotations

import pytest
import torch

from bench.accuracy import Gradients, WrongResultError
from bench.providers import NAMED
from bench.speed import checked
from bench.workloads import DTYPES, RULES
from helpers.bench_cases import CPU, SMALL


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_equal_on_every_run(dtype):
    first, second = (Gradients(SMALL, dtype, CPU) for _ in range(2))
    for a, b in zip(first.grads, second.grads, strict=True):
        assert torch.equal(a, b)


def test_mixed_has_both_dtypes():
    dtypes = [g.dtype for g in Gradients(SMALL, "mixed", CPU).grads]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_pass_gives_the_first_gradients_in_new_memory(dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    old = gradients.grads
    torch._foreach_zero_(old)
    gradients.backward()
    assert all(map(torch.equal, gradients.grads, gradients.fresh))
    # The old ones are alive, so that no new one can have their memory.
    assert not {g.data_ptr() for g in old} & {g.data_ptr() for g in gradients.grads}


@pytest.mark.parametrize("rule", RULES)
def test_limit_clips_or_clips_nothing(rule):
    gradients = Gradients(SMALL, "float32", CPU)
    for clipped in (False, True):
        gradients.refill()
        checked(NAMED["torch"], gradients, rule, clipped)
        kept = all(map(torch.equal, gradients.grads, gradients.fresh))
        assert kept is not clipped


@pytest.mark.parametrize("limit", [1e-3, torch.inf])
def test_check_sees_nan_and_a_changed_element(limit):
    gradients = Gradients(SMALL, "float32", CPU)
    for spoil in (torch.nan, 1.0):
        grads = [f.clone() for f in gradients.fresh]
        torch._foreach_clamp_max_(grads, limit)
        torch._foreach_clamp_min_(grads, -limit)
        gradients.check(grads, "value", limit, 0.0)
        grads[3][100, 3] = spoil
        with pytest.raises(WrongResultError, match="gradient 3"):
            gradients.check(grads, "value", limit, 1e-3)
