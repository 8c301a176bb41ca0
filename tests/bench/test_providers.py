"""Every provider clips right, and says on which gradients it is not compared."""

from __future__ import annotations

import pytest
import torch
from bench_cases import CPU, NAMED, SMALL

from bench.accuracy import Gradients
from bench.speed import OUT_OF_PLACE, checked
from bench.workloads import DTYPES, RULES, Workload


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [name for name in NAMED if not name.endswith("compiled")])
def test_provider_clips_right(name, rule, dtype):
    provider, gradients = NAMED[name], Gradients(SMALL, dtype, CPU)
    absent = provider.why_absent(SMALL, dtype, "cpu")
    if absent or rule not in provider.passes:
        pytest.skip(absent or "does not serve this rule")
    for clipped in (False, True):
        entry, _ = checked(provider, gradients, rule, clipped)
        # A second call on the same gradients, refilled, gives the same.
        entry.refill()
        output = entry.call()
        limit = gradients.limit(rule, clipped) if provider.clips else None
        gradients.check(entry.result(output)[0], rule, limit, provider.tolerance)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("rule", RULES[:3])
@pytest.mark.parametrize("provider", OUT_OF_PLACE, ids=lambda provider: provider.name)
def test_functional_provider_clips_right_and_leaves_its_gradients(provider, rule, dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    absent = provider.why_absent(SMALL, dtype, "cpu")
    if absent or rule not in provider.passes:
        pytest.skip(absent or "does not serve this rule")
    for clipped in (False, True):
        checked(provider, gradients, rule, clipped)
        for given, fresh in zip(gradients.grads, gradients.fresh, strict=True):
            assert torch.equal(given, fresh)


def test_long_lists_are_not_compiled():
    long = Workload("long", "long", ((1,),) * 1001), "float32", "cpu"
    assert "minutes" in str(NAMED["torch compiled"].why_absent(*long))
    assert NAMED["torch"].why_absent(*long) is None


@pytest.mark.parametrize("name", ["tritonclip", "tritonclip wrapper", "torch"])
def test_a_step_clips_then_descends(name):
    gradients = Gradients(SMALL, "float32", CPU)
    checked(NAMED[name], gradients, "step", True)
    for parameter, fresh in zip(gradients.parameters, gradients.fresh, strict=True):
        torch.testing.assert_close(parameter.detach(), -1e-3 * fresh / 2, rtol=1e-4, atol=0)
