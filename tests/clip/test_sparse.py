"""Sparse COO gradients: coalesced, then clipped by their values; the dense gradient is truth."""

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    FLOATS,
    assert_bits,
    assert_norm,
    each_rule,
    grad_of,
    normal,
    parameter,
    parameters,
    untouched,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

BOTH = pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "duplicates"])


def rows(device, coalesced, dtype=torch.float32):
    """As an embedding makes it: whole rows, one of them twice. Sums are exact in every dtype."""
    values = torch.tensor([[3.0, 0.5], [1.0, 0.0], [-2.0, 4.0]], dtype=dtype, device=device)
    index = torch.tensor([[4, 1, 4]], device=device)
    grad = torch.sparse_coo_tensor(index, values, (6, 2), check_invariants=True)
    return grad.coalesce() if coalesced else grad


def dense_of(one):
    return grad_of(one).to_dense().cpu().clone()


RULES = [*(ClipByGlobalNorm(0.5, p) for p in (1.0, 2.0, 3.0, torch.inf)), ClipByNorm(0.5)]


@pytest.mark.covering(2)
@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_sparse_gradient_is_measured_and_scaled_as_the_dense_one(device, coalesced, dtype, rule):
    one = parameter(rows(device, coalesced, dtype))
    before = dense_of(one)
    norm = tritonclip.clip_([one], rule)
    assert_norm(norm.reshape(()), reference.norm(before, rule.norm_type))
    by = reference.coefficient(norm.reshape(()), 0.5)
    assert grad_of(one).layout == torch.sparse_coo
    assert_bits([dense_of(one)], [reference.scaled(before, by)])


@BOTH
@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.5), ClipByNorm(0.5)], ids=repr)
def test_sparse_gradient_whose_values_are_read_from_a_copy(rule, coalesced):
    values = torch.tensor([[3.0, 0.5, 1.0], [-2.0, 4.0, 8.0]])[:, ::2]
    at = torch.tensor([[1, 4] if coalesced else [4, 4]])
    one = parameter(
        torch.sparse_coo_tensor(at, values, (6, values.shape[1]), is_coalesced=coalesced)
    )
    before = (values if coalesced else values.sum(0, keepdim=True)).clone()
    norm = tritonclip.clip_([one], rule)
    assert_norm(norm.reshape(()), reference.norm(before))
    by = reference.coefficient(norm.reshape(()), 0.5)
    assert grad_of(one).is_coalesced()
    assert_bits([grad_of(one)._values()], [reference.scaled(before, by)])


@BOTH
@pytest.mark.parametrize("bounds", [(-1.0, 0.75), (0.0, 1.0), (-torch.inf, 0.0)], ids=str)
def test_sparse_gradient_is_clamped_as_the_dense_one(device, coalesced, bounds):
    one = parameter(rows(device, coalesced))
    before = dense_of(one)
    tritonclip.clip_([one], ClipByValue(*bounds))
    assert_bits([dense_of(one)], [reference.clamped(before, *bounds)])


@pytest.mark.parametrize(
    ("coalesced", "detached"),
    [(True, False), (False, False), (True, True)],
    ids=["coalesced", "duplicates", "alias"],
)
def test_sparse_gradient_of_two_parameters_counts_once(device, coalesced, detached):
    """What is detached shares the values."""
    grad = rows(device, coalesced)
    expected = reference.norm(grad)
    both = parameters([grad, grad.detach() if detached else grad])
    assert_norm(tritonclip.clip_(both, 1.0), expected)
    assert [reference.norm(grad_of(one)) for one in both] == pytest.approx([1.0] * 2, rel=1e-5)


def test_sparse_gradients_without_entries_count_each(device):
    params = [parameter(torch.zeros(5, 2, device=device).to_sparse()) for _ in range(3)]
    params.append(parameter(torch.tensor([3.0, 4.0], device=device)))
    assert_norm(tritonclip.clip_(params, ClipByNorm(1.0)), [0.0, 0.0, 0.0, 5.0])


def test_sparse_gradient_that_shares_a_part_of_its_values_is_refused(device):
    sparse = rows(device, coalesced=True)
    overlaps = pytest.raises(ValueError, match="overlap in memory")
    with untouched([sparse._values()]), overlaps:
        tritonclip.clip_(parameters([sparse._values()[0], sparse]), 1.0)


@BOTH
@pytest.mark.parametrize("rule", each_rule(1.0, 1.0))
def test_sparse_gradient_with_nan_is_named_or_zeroed(device, coalesced, rule):
    grad = rows(device, coalesced)
    grad._values()[1, 0] = torch.nan
    params = parameters([normal(3, device=device), grad])
    before = [dense_of(one) for one in params]
    with pytest.raises(RuntimeError, match=r"parameters\[1\]"):
        tritonclip.clip_(params, rule, nonfinite="error")
    assert_bits(map(dense_of, params), before)
    tritonclip.clip_(params, rule, nonfinite="zero")
    assert_bits(map(dense_of, params), map(torch.zeros_like, before))


@BOTH
def test_sparse_gradient_carries_a_loss_scale(device, coalesced):
    one = parameter(rows(device, coalesced))
    before = dense_of(one)
    norm = tritonclip.clip_([one], 100.0, grad_scale=2.0)
    assert_norm(norm, reference.norm(before) / 2)
    assert_bits([dense_of(one)], [before / 2])


@BOTH
@pytest.mark.parametrize("rule", [ClipByValue(0.1, 1.0), ClipByValue(-2.0, -1.0)], ids=str)
def test_sparse_gradient_whose_zeros_matter_is_refused(device, coalesced, rule):
    params = parameters([torch.full((3,), 8.0, device=device), rows(device, coalesced)])
    sparse = dense_of(params[1])
    with untouched([grad_of(params[0])]), pytest.raises(ValueError, match="sparse"):
        tritonclip.clip_(params, rule)
    assert_bits([dense_of(params[1])], [sparse])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("rule", each_rule(1.0, 1.0))
def test_other_sparse_layouts_are_refused(device, rule):
    dense = torch.full((3,), 8.0, device=device)
    compressed = torch.eye(2, device=device).to_sparse_csr().requires_grad_()
    compressed.grad = torch.eye(2, device=device).to_sparse_csr()
    with untouched([dense]), pytest.raises(TypeError, match=r"(?i)csr|layout"):
        tritonclip.clip_([parameter(dense), compressed], rule)
