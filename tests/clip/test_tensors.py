"""`clip_tensors_` clips tensors themselves as `clip_` clips the gradients of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    FLOATS,
    assert_bits,
    assert_norm,
    check_clip,
    normal,
    of_sizes,
    same_parameters,
    untouched,
)
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByUnitNorm,
    ClipByValue,
    ClipState,
    clip_tensors_,
)

RULES = [
    pytest.param(ClipByGlobalNorm(0.5), id="global"),
    pytest.param(ClipByGlobalNorm(1e6), id="within"),
    pytest.param(ClipByNorm(0.5, norm_type=1.0), id="by-norm"),
    pytest.param(ClipByValue(-0.1, 0.3), id="by-value"),
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("grad_scale", [None, 8.0])
@pytest.mark.parametrize("rule", RULES)
def test_clip_tensors_follows_the_formula(device, rule, grad_scale, dtype):
    tensors = of_sizes((7, 0, 2049, 1), dtype, device)
    tensors.append(normal((6, 5), dtype, device).t())
    again = [tensor.clone() for tensor in tensors]
    measured = clip_tensors_(tensors, rule, grad_scale=grad_scale)
    expected = check_clip(again, rule, grad_scale=grad_scale)
    assert_bits(tensors, again)
    assert measured is expected is None or torch.equal(measured, expected)


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


@pytest.mark.parametrize("policy", ["zero", "propagate"])
def test_clip_tensors_has_the_policies_of_clip(device, policy):
    tensors = [torch.ones(3, device=device), torch.tensor([1.0, torch.nan], device=device)]
    clip_tensors_(tensors, 0.5, nonfinite=policy)
    expected = 0.0 if policy == "zero" else torch.nan
    assert_bits(tensors, [torch.full_like(x, expected) for x in tensors])


def test_clip_tensors_names_what_is_not_finite(device):
    tensors = [torch.ones(3, device=device), torch.tensor([1.0, torch.nan], device=device)]
    for given, match in (
        (zip(("first", "second"), tensors, strict=True), r"Non-finite gradients: second$"),
        ([None, *tensors], r"order 2.0 is non-.* gradients: tensors\[2\]$"),
    ):
        with untouched(tensors), pytest.raises(RuntimeError, match=match):
            clip_tensors_(given, 0.5, nonfinite="error")


def test_clip_tensors_counts_versions(device):
    tensor = torch.full((4,), 3.0, device=device)
    before = tensor._version
    clip_tensors_([tensor], 1.0)
    assert tensor._version > before


WEIGHTS = {
    "parameters": (lambda: torch.nn.Linear(2, 2).parameters(), r"tensors\[0\] is a parameter"),
    "named parameters": (lambda: torch.nn.Linear(2, 2).named_parameters(), "weight is a parameter"),
    "a frozen parameter": (
        lambda: [torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)],
        r"tensors\[1\] is a parameter",
    ),
    "a leaf": (lambda: torch.ones(2, requires_grad=True), r"tensors\[0\] requires grad"),
    "a result": (lambda: [torch.ones(2, requires_grad=True) * 2], r"tensors\[0\] requires grad"),
}


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("case", WEIGHTS)
def test_clip_tensors_refuses_to_clip_weights(case, grad_mode):
    make, message = WEIGHTS[case]
    given: Any = make()
    given = given if isinstance(given, torch.Tensor) else list(given)
    with torch.set_grad_enabled(grad_mode), pytest.raises(TypeError, match=message):
        clip_tensors_(given, 1e-3)
    for item in given:
        tensor = item[1] if isinstance(item, tuple) else item
        assert tensor.detach().norm() > 1e-2


def test_clip_tensors_clips_detached_weights():
    weight = torch.nn.Parameter(torch.full((4,), 3.0))
    clip_tensors_([weight.detach()], 1.0)
    assert_norm(weight.detach().norm(), 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.nn.Linear(2, 2), r"got Linear, a module; .* clip_\(module, 1.0\)"),
        ([torch.ones(2), 1.0], r"tensors\[1\] must be a tensor, got float"),
        ([("a", torch.ones(2)), torch.ones(2)], r"tensors\[1\] must be a \(name, tensor\) pair"),
        ([torch.ones(2, dtype=torch.int64)], r"tensors\[0\] has dtype torch.int64"),
    ],
)
def test_clip_tensors_refuses_what_is_no_tensor(given, message):
    with pytest.raises(TypeError, match=message):
        clip_tensors_(given, 1.0)


def test_clip_tensors_refuses_a_rule_that_needs_weights():
    with pytest.raises(TypeError, match="compares gradients with the weights"):
        clip_tensors_([torch.ones(2)], ClipByUnitNorm(0.01))


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


def test_clip_tensors_with_a_norm_of_each_needs_a_tensor_at_every_position():
    one, state = torch.ones(3), ClipState()
    for given in ([one, None], [one, one]):
        with pytest.raises(ValueError, match="1 tensors at 2 positions"):
            clip_tensors_(given, ClipByOwnHistory(1.05), state=state)
