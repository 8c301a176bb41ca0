"""The three policies for NaN and inf, for each of the three rules."""

import pytest
import torch

import tritonclip
from helpers.cases import CHUNK, each_rule, normal, parameter, parameters

RULES = each_rule(1.0, 0.5)


def spoiled(device, bad, dtype=torch.float32):
    """Three gradients, of which the middle one has one bad element, in its second chunk."""
    grads = [normal(5, dtype, device), normal(CHUNK + 9, dtype, device), normal(9, dtype, device)]
    grads[1][CHUNK + 2] = bad
    return grads


@pytest.mark.parametrize("rule", RULES[:2])
def test_zero_of_a_norm_that_overflows_while_every_element_is_finite(device, rule):
    """The norm of 6e38 does not fit float32, and every gradient of the call becomes 0."""
    grads = [torch.ones(2, device=device), torch.full((4,), 3e38, device=device)]
    measured = tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert measured.flatten()[-1].item() == torch.inf
    assert all(not grad.any() for grad in grads)


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
