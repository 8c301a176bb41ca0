"""NaN and inf in one process: every process decides alike, and names the same gradients."""

import math
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard

import tritonclip
from helpers.processes import in_processes
from helpers.spread import assert_same_everywhere, grads_of, mesh_of, parameter, unchanged
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, Rule

BAD = [pytest.param(math.nan, id="nan"), pytest.param(math.inf, id="inf")]
RULES: list[Rule] = [ClipByGlobalNorm(0.5, p) for p in (2.0, math.inf, 8.0, 100.0)]
RULES += [ClipByNorm(0.5), ClipByNorm(0.5, math.inf), ClipByValue(0.5)]


def _bad_in_one(bad: float) -> dict[str, Any]:
    """Parameters with a bad element in the piece of `second` of one process, the second."""
    mesh = mesh_of(-1)
    named = {
        "first": parameter((8, 3), mesh, [Shard(0)], seed=1),
        "second": parameter((8, 3), mesh, [Shard(0)], seed=2),
        "third": parameter((5,), mesh, [Replicate()], seed=3),
    }
    if dist.get_rank() == 1:
        named["second"].grad.to_local().view(-1)[0] = bad
    return named


@pytest.mark.covering(2)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule", RULES, ids=str)
@in_processes(2, 4)
def test_clip_error_names_the_same_gradients_everywhere(bad: float, rule: Any) -> None:
    named = _bad_in_one(bad)
    if rule.per_gradient:
        where = ", ".join(map(str, range(dist.get_world_size())))
        message = rf"second \(on rank {where}\)"
    else:
        message = r"second \(on rank 1\)"
    with unchanged(grads_of(named.values())), pytest.raises(RuntimeError, match=message) as caught:
        tritonclip.clip_(named.items(), rule, nonfinite="error")
    assert "first" not in str(caught.value)


@pytest.mark.covering(2)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule", RULES, ids=str)
@in_processes(2, 4)
def test_clip_zero_is_decided_alike(bad: float, rule: Any) -> None:
    named = _bad_in_one(bad)
    tritonclip.clip_(named.values(), rule, nonfinite="zero")
    for one in named.values():
        assert not one.grad.to_local().any()


@in_processes(2)
def test_clip_by_norm_zero_counts_gradients_of_others() -> None:
    """The gradient that is NaN is None here."""
    named = _bad_in_one(math.nan)
    if dist.get_rank() == 0:
        named["second"].grad = None
    with pytest.raises(RuntimeError, match="second"):
        tritonclip.clip_(named.items(), ClipByNorm(0.5), nonfinite="error")
    tritonclip.clip_(named.values(), ClipByNorm(0.5), nonfinite="zero")
    assert not named["first"].grad.to_local().any()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("p", [2.0, math.inf, 8.0, 100.0])
@in_processes(2)
def test_clip_propagates_everywhere(p: float, bad: float) -> None:
    named = _bad_in_one(bad)
    norm = tritonclip.clip_(named.values(), ClipByGlobalNorm(0.5, p))
    assert_same_everywhere(norm)
    torch.testing.assert_close(float(norm), bad, equal_nan=True)
    if bad == math.inf:
        assert not named["first"].grad.to_local().any()
    else:
        assert all(one.grad.to_local().isnan().all() for one in named.values())


@pytest.mark.parametrize("p", [2.0, 1.0, 8.0, math.inf])
@in_processes(2)
def test_clip_grad_scale(p: float) -> None:
    plain, scaled = _bad_in_one(1.0), _bad_in_one(1.0)
    for one in scaled.values():
        one.grad.to_local().mul_(1024.0)
    for rule in (ClipByGlobalNorm(0.5, p), ClipByNorm(0.5, p)):
        ours = tritonclip.clip_(scaled.values(), rule, grad_scale=1024.0)
        torch.testing.assert_close(ours, tritonclip.clip_(plain.values(), rule), rtol=0, atol=0)
        for one, other in zip(plain.values(), scaled.values(), strict=True):
            assert torch.equal(one.grad.to_local(), other.grad.to_local())
            other.grad.to_local().mul_(1024.0)


@pytest.mark.parametrize("p", [2.0, math.inf])
@in_processes(2)
def test_clip_grad_norm_raises_everywhere(p: float) -> None:
    named = _bad_in_one(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        tritonclip.clip_grad_norm_(named.values(), 1.0, p, error_if_nonfinite=True)
    grads = [one.grad for one in named.values()]
    with pytest.raises(RuntimeError, match="non-finite"):
        tritonclip.get_total_norm(grads, p, error_if_nonfinite=True)
