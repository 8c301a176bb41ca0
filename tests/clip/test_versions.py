"""An in-place write is visible to autograd, and a call that only reads or refuses is not."""

from contextlib import contextmanager

import pytest
import torch

import tritonclip
from helpers.cases import CHUNK, each_rule, normal, of_sizes, parameter, parameters, untouched

RULES = each_rule(0.5, 0.1)


@contextmanager
def moving(*tensors):
    """Every version moves on inside."""
    versions = [tensor._version for tensor in tensors]
    yield
    assert all(tensor._version > old for tensor, old in zip(tensors, versions, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_clip_moves_the_version_of_every_gradient(device, rule, dtype):
    grads = of_sizes((5, 40, CHUNK + 1), dtype, device)
    with moving(*grads):
        tritonclip.clip_(parameters(grads), rule)


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@pytest.mark.parametrize("rule", RULES)
def test_clip_of_a_view_moves_the_version_of_its_base(device, rule):
    base = normal((6, 8), device=device)
    with moving(base):
        tritonclip.clip_([parameter(base[:, 1:5])], rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "uncoalesced"])
def test_clip_moves_the_version_of_a_sparse_gradient(device, rule, coalesced):
    index = torch.tensor([[0, 2, 5] if coalesced else [5, 0, 5]], device=device)
    values = normal(3, device=device)
    grad = torch.sparse_coo_tensor(index, values, (7,), check_invariants=True)
    grad = grad.coalesce() if coalesced else grad
    with moving(grad):
        tritonclip.clip_([parameter(grad)], rule)


def test_clip_to_zero_by_the_policy_moves_the_version(device):
    grads = [torch.tensor([torch.nan], device=device), torch.ones(3, device=device)]
    with moving(*grads):
        tritonclip.clip_(parameters(grads), 9.0, nonfinite="zero")


def test_get_total_norm_moves_no_version(device):
    grads = of_sizes((5, 40), torch.float32, device)
    with untouched(grads):
        tritonclip.get_total_norm(grads)


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
