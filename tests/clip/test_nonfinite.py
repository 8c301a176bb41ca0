"""The three policies for NaN and inf, for each of the three rules."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    FLOATS,
    assert_bits,
    bits,
    copies,
    each_rule,
    normal,
    parameter,
    parameters,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

RULES = each_rule(1.0, 0.5)
BAD = [
    pytest.param(torch.nan, id="nan"),
    pytest.param(torch.inf, id="inf"),
    pytest.param(-torch.inf, id="-inf"),
]


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
    tritonclip.clip_(parameters(again), 1.0, nonfinite="propagate")
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


def test_propagate_by_norm_spoils_only_its_own_gradient(device):
    grads = spoiled(device, torch.nan)
    before = copies(grads)
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(1.0))
    assert norms.isnan().tolist() == [False, True, False]
    assert grads[1].isnan().all()
    for index in (0, 2):
        multiplier = reference.coefficient(norms[index], 1.0)
        assert_bits([grads[index]], [reference.scaled(before[index], multiplier)])


def test_propagate_by_value_keeps_nan_and_clips_the_rest(device):
    grads = spoiled(device, torch.nan)
    expected = [reference.clamped(grad, -0.5, 0.5) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(0.5), nonfinite="propagate")
    assert_bits(grads, expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", BAD)
def test_zero_zeroes_every_gradient_of_the_call(device, rule, bad):
    grads = spoiled(device, bad)
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    for grad in grads:
        assert torch.equal(grad.cpu(), torch.zeros(grad.shape))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", range(4), ids="bad={}".format)
def test_zero_reaches_every_dtype(device, rule, at):
    """Each dtype is a group of its own, and one bad group zeroes them all."""
    dtypes = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
    grads = [normal(11, dtype, device) for dtype in dtypes]
    grads[at][3] = torch.nan
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("limit", [0.0, torch.inf])
@pytest.mark.parametrize("kind", [ClipByGlobalNorm, ClipByNorm, ClipByValue])
def test_zero_holds_at_any_limit(device, kind, limit):
    grads = spoiled(device, torch.inf)
    tritonclip.clip_(parameters(grads), kind(limit), nonfinite="zero")
    assert all(not grad.any() for grad in grads)


def test_zero_is_not_clamped_to_bounds_that_exclude_it(device):
    grads = spoiled(device, torch.nan)
    tritonclip.clip_(parameters(grads), ClipByValue(0.25, 0.75), nonfinite="zero")
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("rule", RULES[:2])
def test_zero_of_a_norm_that_overflows_while_every_element_is_finite(device, rule):
    """The norm of 6e38 does not fit float32, and every gradient of the call becomes 0."""
    grads = [torch.ones(2, device=device), torch.full((4,), 3e38, device=device)]
    measured = tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert measured.flatten()[-1].item() == torch.inf
    assert all(not grad.any() for grad in grads)


def test_zero_returns_the_norm_as_it_was(device):
    assert tritonclip.clip_(parameters(spoiled(device, torch.inf)), 1.0, nonfinite="zero").isinf()
    norms = tritonclip.clip_(
        parameters(spoiled(device, torch.nan)), ClipByNorm(1.0), nonfinite="zero"
    )
    assert norms.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("policy", ["propagate", "error", "zero"])
@pytest.mark.parametrize("rule", RULES)
def test_finite_gradients_are_clipped_under_every_policy(device, rule, policy):
    grads, again = spoiled(device, 3.0), spoiled(device, 3.0)
    measured = tritonclip.clip_(parameters(grads), rule, nonfinite=policy)
    usual = tritonclip.clip_(parameters(again), rule)
    assert_bits(grads, again)
    assert grads[1][CHUNK + 2] < 3.0
    if usual is None:
        assert measured is None
    else:
        assert torch.equal(measured, usual)


@pytest.mark.parametrize("policy", ["error", "zero"])
@pytest.mark.parametrize("rule", RULES)
def test_huge_finite_values_are_not_taken_for_inf(device, rule, policy):
    """Their squares, and their sums in half precision, overflow; their norms do not."""
    grads = [
        torch.full((9,), 1e30, device=device),
        torch.full((9,), 6e4, dtype=torch.float16, device=device),
    ]
    tritonclip.clip_(parameters(grads), rule, nonfinite=policy)
    assert grads[0].all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", BAD)
def test_error_leaves_every_gradient_as_it_was(device, rule, bad):
    grads = spoiled(device, bad)
    before, versions = [bits(grad) for grad in grads], [grad._version for grad in grads]
    with pytest.raises(RuntimeError, match=r"non-?finite"):
        tritonclip.clip_(parameters(grads), rule, nonfinite="error")
    assert all(torch.equal(bits(grad), old) for grad, old in zip(grads, before, strict=True))
    assert [grad._version for grad in grads] == versions


@pytest.mark.parametrize("rule", RULES)
def test_error_names_the_parameters_of_pairs(device, rule):
    names = ["embed.weight", "head.weight", "head.bias"]
    pairs = zip(names, parameters(spoiled(device, torch.nan)), strict=True)
    with pytest.raises(RuntimeError) as raised:
        tritonclip.clip_(pairs, rule, nonfinite="error")
    assert "head.weight" in str(raised.value)
    assert "embed.weight" not in str(raised.value)
    assert "head.bias" not in str(raised.value)


def test_error_names_the_parameters_of_a_module(device):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).to(device)
    for name, one in module.named_parameters():
        one.grad = torch.ones_like(one)
        one.grad[-1] = {"0.bias": torch.inf, "1.weight": torch.nan}.get(name, 1.0)
    with pytest.raises(RuntimeError) as raised:
        tritonclip.clip_(module, 1.0, nonfinite="error")
    assert "0.bias" in str(raised.value)
    assert "1.weight" in str(raised.value)
    assert "0.weight" not in str(raised.value)


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
    before = copies(grads)
    with pytest.raises(RuntimeError, match=r"non-?finite"):
        tritonclip.clip_(parameters(grads), 1.0, nonfinite="error")
    assert_bits(grads, before)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["raise", "", None, True])
def test_an_unknown_policy_is_refused(device, rule, policy):
    grads = spoiled(device, 3.0)
    before = copies(grads)
    with pytest.raises((ValueError, TypeError), match="propagate"):
        tritonclip.clip_(parameters(grads), rule, nonfinite=policy)
    assert_bits(grads, before)


def test_error_of_clip_by_value_says_which_gradients_it_is_about():
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, torch.inf])
    with pytest.raises(RuntimeError, match=r"^The gradients of parameters\[0\] are non-finite"):
        tritonclip.clip_([param], ClipByValue(1.0), nonfinite="error")
    assert param.grad.tolist() == [3.0, torch.inf]


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1.0), ClipByNorm(1.0), ClipByValue(1.0)])
def test_zero_reaches_lazily_negated_gradients(device, rule):
    grads = [
        torch.tensor([torch.inf, 3.0], device=device),
        torch._neg_view(torch.ones(2, dtype=torch.float64, device=device)),
    ]
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("limit", [1.0, torch.inf])
def test_nan_norm_makes_every_gradient_nan_under_any_limit(device, limit):
    """As in torch; a limit of inf changes nothing but that."""
    grads = [torch.tensor([torch.nan], device=device), torch.ones(3, device=device)]
    assert tritonclip.clip_(parameters(grads), limit).isnan()
    assert all(grad.isnan().all() for grad in grads)
