"""An in-place write is visible to autograd, and a call that only reads or refuses is not."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers.cases import CHUNK, each_rule, normal, of_sizes, parameter, parameters

RULES = each_rule(0.5, 0.1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_clip_moves_the_version_of_every_gradient(device, rule, dtype):
    grads = of_sizes((5, 40, CHUNK + 1), dtype, device)
    versions = [grad._version for grad in grads]
    tritonclip.clip_(parameters(grads), rule)
    assert all(grad._version > old for grad, old in zip(grads, versions, strict=True))


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@pytest.mark.parametrize("rule", RULES)
def test_clip_of_a_view_moves_the_version_of_its_base(device, rule):
    base = normal((6, 8), device=device)
    version = base._version
    tritonclip.clip_([parameter(base[:, 1:5])], rule)
    assert base._version > version


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("indices", [[0, 2, 5], [5, 0, 5]], ids=["coalesced", "uncoalesced"])
def test_clip_moves_the_version_of_a_sparse_gradient(device, rule, indices):
    grad = torch.sparse_coo_tensor(
        torch.tensor([indices], device=device),
        normal(3, device=device),
        (7,),
        check_invariants=True,
    )
    grad = grad.coalesce() if indices == [0, 2, 5] else grad
    version = grad._version
    tritonclip.clip_([parameter(grad)], rule)
    assert grad._version > version


@pytest.mark.parametrize("rule", RULES)
def test_backward_through_a_clipped_gradient_raises(device, rule):
    """autograd saved the gradient for the product, and it is no longer what it was."""
    grad = normal(9, device=device)
    factor = torch.ones(9, device=device, requires_grad=True)
    product = (factor * grad).sum()
    tritonclip.clip_([parameter(grad)], rule)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_clip_to_zero_by_the_policy_moves_the_version(device):
    grads = [torch.tensor([torch.nan], device=device), torch.ones(3, device=device)]
    versions = [grad._version for grad in grads]
    tritonclip.clip_(parameters(grads), 9.0, nonfinite="zero")
    assert all(grad._version > old for grad, old in zip(grads, versions, strict=True))


def test_get_total_norm_moves_no_version(device):
    grads = of_sizes((5, 40), torch.float32, device)
    versions = [grad._version for grad in grads]
    tritonclip.get_total_norm(grads)
    assert [grad._version for grad in grads] == versions


@pytest.mark.parametrize("rule", RULES)
def test_clip_records_no_graph(device, rule):
    """Gradients that autograd can differentiate are clipped outside of its graph."""
    weight = torch.nn.Parameter(normal(9, device=device))
    (grad,) = torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
    weight.grad = grad
    history, before = grad.grad_fn, grad.detach().clone()
    measured = tritonclip.clip_([weight], rule)
    assert weight.grad is grad
    assert grad.grad_fn is history
    assert not torch.equal(grad, before)
    assert measured is None or not measured.requires_grad


@pytest.mark.parametrize("rule", RULES)
def test_clip_leaves_parameters_alone(device, rule):
    one = parameter(normal(9, device=device))
    grad, version = one.grad, one._version
    tritonclip.clip_([one], rule)
    assert one.grad is grad
    assert one._version == version
    assert not one.any()
