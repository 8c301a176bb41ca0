"""The three policies for NaN and inf, for each of the three rules."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers.cases import (
    CHUNK,
    FLOATS,
    assert_bits,
    check_clip,
    each_rule,
    normal,
    parameter,
    parameters,
    untouched,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

RULES = each_rule(1.0, 0.5)
BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])


def spoiled(device, bad, dtype=torch.float32):
    """Three gradients, of which the middle one has one bad element, in its second chunk."""
    grads = [normal(5, dtype, device), normal(CHUNK + 9, dtype, device), normal(9, dtype, device)]
    grads[1][CHUNK + 2] = bad
    return grads


@pytest.mark.parametrize("dtype", FLOATS)
def test_propagate_spreads_nan_over_every_gradient(device, dtype):
    grads = spoiled(device, torch.nan, dtype)
    norm = tritonclip.clip_(parameters(grads), 1.0)
    assert norm.isnan()
    assert all(grad.isnan().all() for grad in grads)


def test_propagate_is_the_default(device):
    grads, again = spoiled(device, torch.inf), spoiled(device, torch.inf)
    tritonclip.clip_(parameters(grads), 1.0)
    check_clip(again, 1.0, nonfinite="propagate")
    assert_bits(grads, again)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_propagate_of_inf_zeroes_what_is_finite(device, bad):
    """The coefficient is 1 / inf = 0, and inf times 0 is NaN, as in torch."""
    grads = spoiled(device, bad)
    norm = tritonclip.clip_(parameters(grads), 1.0)
    assert norm.item() == torch.inf
    assert grads[1][CHUNK + 2].isnan()
    grads[1][CHUNK + 2] = 0.0
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("rule", [ClipByNorm(1.0), ClipByValue(0.5)], ids=["by-norm", "by-value"])
def test_propagate_spoils_no_other_gradient(device, rule):
    """By value, no other element."""
    grads = spoiled(device, torch.nan)
    norms = check_clip(grads, rule, nonfinite="propagate")
    if norms is not None:
        assert norms.isnan().tolist() == [False, True, False]
        assert grads[1].isnan().all()


@pytest.mark.parametrize("rule", RULES)
@BAD
def test_zero_zeroes_every_gradient_of_the_call(device, rule, bad):
    grads = spoiled(device, bad)
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert_bits(grads, map(torch.zeros_like, grads))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", range(4), ids="bad={}".format)
def test_zero_reaches_every_dtype(device, rule, at):
    """Each dtype is a group of its own, and one bad group zeroes them all."""
    dtypes = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
    grads = [normal(11, dtype, device) for dtype in dtypes]
    grads[at][3] = torch.nan
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize(
    "rule",
    [
        *(
            kind(x)
            for kind in (ClipByGlobalNorm, ClipByNorm, ClipByValue)
            for x in (0.0, torch.inf)
        ),
        ClipByValue(0.25, 0.75),
    ],
    ids=repr,
)
def test_zero_holds_at_any_limit(device, rule):
    """Also beside bounds that exclude it."""
    grads = spoiled(device, torch.inf)
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("rule", RULES[:2])
def test_zero_of_a_norm_that_overflows_while_every_element_is_finite(device, rule):
    """The norm of 6e38 does not fit float32, and every gradient of the call becomes 0."""
    grads = [torch.ones(2, device=device), torch.full((4,), 3e38, device=device)]
    measured = tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert measured.flatten()[-1].item() == torch.inf
    assert all(not grad.any() for grad in grads)


def test_zero_returns_the_norm_as_it_was(device):
    params = [parameters(spoiled(device, torch.inf)) for _ in range(2)]
    assert tritonclip.clip_(params[0], 1.0, nonfinite="zero").isinf()
    norms = tritonclip.clip_(params[1], ClipByNorm(1.0), nonfinite="zero")
    assert norms.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("policy", ["propagate", "error", "zero"])
@pytest.mark.parametrize("rule", RULES)
def test_finite_gradients_are_clipped_under_every_policy(device, rule, policy):
    grads = spoiled(device, 3.0)
    check_clip(grads, rule, nonfinite=policy)
    assert grads[1][CHUNK + 2] < 3.0


@pytest.mark.parametrize("policy", ["error", "zero"])
@pytest.mark.parametrize("rule", RULES)
def test_huge_finite_values_are_not_taken_for_inf(device, rule, policy):
    """Their squares, and their sums in half precision, overflow; their norms do not."""
    grads = [torch.full((9,), 1e30), torch.full((9,), 6e4, dtype=torch.float16)]
    grads = [grad.to(device) for grad in grads]
    tritonclip.clip_(parameters(grads), rule, nonfinite=policy)
    assert grads[0].all()


@pytest.mark.parametrize("rule", RULES)
@BAD
def test_error_leaves_every_gradient_as_it_was(device, rule, bad):
    grads = spoiled(device, bad)
    with untouched(grads), pytest.raises(RuntimeError, match=r"non-?finite"):
        tritonclip.clip_(parameters(grads), rule, nonfinite="error")


@pytest.mark.parametrize("rule", RULES)
def test_error_names_the_parameters_of_pairs(device, rule):
    names = ["embed.weight", "head.weight", "head.bias"]
    pairs = zip(names, parameters(spoiled(device, torch.nan)), strict=True)
    with pytest.raises(RuntimeError, match=r"(gradients:|of) head\.weight( are|$)"):
        tritonclip.clip_(pairs, rule, nonfinite="error")


def test_error_names_the_parameters_of_a_module(device):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).to(device)
    for name, one in module.named_parameters():
        one.grad = torch.ones_like(one)
        one.grad[-1] = {"0.bias": torch.inf, "1.weight": torch.nan}.get(name, 1.0)
    with pytest.raises(RuntimeError, match=r"gradients: 0\.bias, 1\.weight$"):
        tritonclip.clip_(module, 1.0, nonfinite="error")


@pytest.mark.parametrize("rule", RULES)
def test_error_gives_the_position_where_there_is_no_name(device, rule):
    """The position in what was passed, with those that have no gradient or are left out."""
    left_out = parameter(torch.ones(2, device=device))
    left_out.need_clip = False  # type: ignore[attr-defined]
    params = [parameter(None, device), left_out, *parameters(spoiled(device, torch.nan))]
    with pytest.raises(RuntimeError) as raised:
        tritonclip.clip_(params, rule, nonfinite="error")
    assert "parameters[3]" in str(raised.value)
    assert "parameters[2]" not in str(raised.value)


def test_error_of_a_norm_that_overflows_while_every_element_is_finite(device):
    grads = [torch.full((4,), 3e38, device=device), torch.ones(2, device=device)]
    with untouched(grads), pytest.raises(RuntimeError, match=r"non-?finite"):
        tritonclip.clip_(parameters(grads), 1.0, nonfinite="error")


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@pytest.mark.parametrize("rule", RULES)
def test_zero_reaches_lazily_negated_gradients(device, rule):
    negated = torch._neg_view(torch.ones(2, dtype=torch.float64, device=device))
    grads = [torch.tensor([torch.inf, 3.0], device=device), negated]
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("limit", [1.0, torch.inf])
def test_nan_norm_makes_every_gradient_nan_under_any_limit(device, limit):
    """As in torch; a limit of inf changes nothing but that."""
    grads = [torch.tensor([torch.nan], device=device), torch.ones(3, device=device)]
    assert tritonclip.clip_(parameters(grads), limit).isnan()
    assert all(grad.isnan().all() for grad in grads)
