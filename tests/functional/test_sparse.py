"""Sparse tensors are clipped as the dense ones that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from helpers.cases import normal
from tritonclip import functional

INDICES = torch.tensor([[1, 1, 3]])


def sparse(values):
    """Two rows of the values stand at one index."""
    return torch.sparse_coo_tensor(
        INDICES.to(values.device), values, (5, 2), check_invariants=False
    )


FUNCTIONS = {
    "value": lambda x: functional.clip_by_value(x, -0.5, 0.5),
    "value-least": lambda x: functional.clip_by_value(x, min=-0.5),
    "norm": lambda x: functional.clip_by_norm(x, 0.5),
    "rows": lambda x: functional.clip_by_norm(x, 0.5, dim=-1),
    "average": lambda x: functional.clip_by_average_norm(x, 0.01),
    "rms": lambda x: functional.clip_by_rms(x, 0.1),
    "global": lambda x: functional.clip_by_global_norm([x], 0.5)[0][0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sparse_tensors_are_clipped_as_dense_ones(device, name):
    x = sparse(normal((3, 2), device=device))
    y = FUNCTIONS[name](x)
    assert y.layout == torch.sparse_coo
    assert y.is_coalesced()
    torch.testing.assert_close(y.to_dense(), FUNCTIONS[name](x.to_dense()))


def test_global_norm_adds_values_at_one_index_up(device):
    """As no IndexedSlices do, whose duplicates TensorFlow measures apart."""
    x = sparse(torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 3.0]], device=device))
    assert float(functional.global_norm([x, None, torch.zeros(2, device=device)])) == 5.0


def test_sparse_tensors_share_no_memory(device):
    x = sparse(normal((3, 2), device=device)).coalesce()
    values, indices = x.values().clone(), x.indices().clone()
    for function in FUNCTIONS.values():
        y = function(x)
        y.values().fill_(9.0)
        y.indices().fill_(0)
    assert torch.equal(x.values(), values)
    assert torch.equal(x.indices(), indices)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_in_the_values_are_right(name):
    """torch's own operators make the tensors, once differentiable."""
    values = normal((3, 2), torch.float64).requires_grad_()
    gradcheck(lambda values: FUNCTIONS[name](sparse(values)).to_dense(), values)


def test_bounds_that_exclude_zero_are_refused():
    x = sparse(normal((3, 2)))
    for bounds in ((0.1, None), (-0.5, -0.1), (torch.zeros(2), None), (None, torch.ones(2))):
        with pytest.raises(ValueError, match="implicit zeros"):
            functional.clip_by_value(x, *bounds)


def test_sparse_dimensions_are_refused():
    x = sparse(normal((3, 2)))
    for dim in (0, (0, 1), -2):
        with pytest.raises(ValueError, match="dense dimensions of a sparse tensor, from 1 on"):
            functional.clip_by_norm(x, 1.0, dim=dim)
