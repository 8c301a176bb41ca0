"""Every provider clips right, and says on which gradients it is not compared."""

from __future__ import annotations

import pytest
import torch

from bench.accuracy import Gradients
from bench.providers import IN_PLACE, NAMED, OUT_OF_PLACE
from bench.speed import checked
from bench.workloads import DTYPES, Workload
from helpers.bench_cases import CPU, SMALL


def served(providers):
    """Each provider, rule and dtype that fit."""
    return [
        pytest.param(one, rule, dtype, id=f"{one.name}-{rule}-{dtype}")
        for one in providers
        for rule in one.passes
        for dtype in DTYPES
        if one.why_absent(SMALL, dtype, "cpu") is None
    ]


@pytest.mark.parametrize(("provider", "rule", "dtype"), served(IN_PLACE))
def test_provider_clips_right(provider, rule, dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    for clipped in (False, True):
        entry, _ = checked(provider, gradients, rule, clipped)
        # A second call on the same gradients, refilled, gives the same.
        entry.refill()
        output = entry.call()
        limit = gradients.limit(rule, clipped) if provider.clips else torch.inf
        gradients.check(entry.result(output)[0], rule, limit, provider.tolerance)


@pytest.mark.parametrize(("provider", "rule", "dtype"), served(OUT_OF_PLACE))
def test_functional_provider_clips_right_and_leaves_its_gradients(provider, rule, dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    for clipped in (False, True):
        checked(provider, gradients, rule, clipped)
        assert all(map(torch.equal, gradients.grads, gradients.fresh))


def test_long_lists_are_not_compiled():
    long = Workload("long", "long", ((1,),) * 1001), "float32", "cpu"
    compiled = NAMED["optax"]._replace(modules=())
    assert "minutes" in str(compiled.why_absent(*long))
    assert NAMED["torch"].why_absent(*long) is None


@pytest.mark.parametrize("name", ["tritonclip", "tritonclip wrapper", "torch"])
def test_a_step_clips_then_descends(name):
    gradients = Gradients(SMALL, "float32", CPU)
    checked(NAMED[name], gradients, "step", True)
    for parameter, fresh in zip(gradients.parameters, gradients.fresh, strict=True):
        torch.testing.assert_close(parameter.detach(), -1e-3 * fresh / 2, rtol=1e-4, atol=0)
