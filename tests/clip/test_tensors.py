"""`clip_tensors_` clips tensors themselves as `clip_` clips the gradients of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import assert_bits, assert_norm, normal, same_parameters, untouched
from tritonclip import ClipByNorm, ClipByOwnHistory, ClipByQuantile, ClipState, clip_tensors_


def test_clip_tensors_mixes_what_lists_of_gradients_mix(device):
    at, values = torch.tensor([[0, 3, 3]]), torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(at, values, (5,), device=device)
    tensors: list[Any] = [
        torch.full((2,), 3.0, dtype=torch.bfloat16, device=device),
        torch.full((2,), 2.0 + 1.0j, device=device),
        torch.tensor(4.0, device=device, dtype=torch.float64),
        sparse,
    ]
    dense = [x.to_dense() if x is sparse else x.clone() for x in tensors]
    norm = clip_tensors_(iter([None, *tensors, tensors[0]]), 1.0)
    assert norm.item() == pytest.approx(reference.total_norm(dense), rel=1e-6)
    for one, was in zip(tensors, dense, strict=True):
        expected = (was * (1.0 / norm.item())).to(one.dtype)
        found = one.to_dense() if one is sparse else one
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_clip_tensors_leaves_the_grad_of_a_tensor_as_it_is(device):
    tensor = torch.full((4,), 3.0, device=device)
    tensor.grad = torch.full((4,), 7.0, device=device)
    with untouched([tensor.grad]):
        clip_tensors_(tensor, 1.0)
    assert_norm(tensor.norm(), 1.0)


def test_clip_tensors_counts_versions(device):
    tensor = torch.full((4,), 3.0, device=device)
    before = tensor._version
    clip_tensors_([tensor], 1.0)
    assert tensor._version > before


def test_clip_tensors_clips_detached_weights():
    weight = torch.nn.Parameter(torch.full((4,), 3.0))
    clip_tensors_([weight.detach()], 1.0)
    assert_norm(weight.detach().norm(), 1.0)


@pytest.mark.parametrize("given", [[], [None, None], iter([]), (t for t in [None])])
def test_clip_tensors_of_nothing_does_not_warn(given):
    assert clip_tensors_(given, ClipByNorm(1.0)).shape == (0,)


@pytest.mark.parametrize("rule", [ClipByQuantile(0.5), ClipByOwnHistory(1.05, warmup=1)])
def test_clip_tensors_follows_a_state_as_clip_does(device, rule):
    states = [ClipState(), ClipState()]
    for step in range(4):
        grads = [normal(5, device=device, seed=step) * (step + 1), normal(3, device=device)]
        params = same_parameters(grad.clone() for grad in grads)
        expected = tritonclip.clip_(params, rule, state=states[0])
        # New tensors at every step, as pseudo-gradients are.
        assert_bits([clip_tensors_(grads, rule, state=states[1])], [expected])
        assert_bits(grads, [p.grad for p in params if p.grad is not None])
