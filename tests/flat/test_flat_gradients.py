"""FlatGradients: gradients as views of one buffer for each dtype, and copies of it."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import FLOATS, assert_bits, copies, grad_of
from helpers.views import SHAPES, assert_views, backward, grads_of, mixed, parameters_of
from tritonclip import ClipByValue, FlatGradients


@pytest.mark.parametrize("dtype", [*FLOATS, pytest.param(torch.complex64, id="complex64")])
def test_constructor_makes_views_without_gaps_and_keeps_gradients(dtype):
    params = parameters_of(dtype=dtype)
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    assert len(flat.buffers) == 1
    assert_views(flat, params)
    assert_bits(grads_of(params), before)
    flat.check()


def test_constructor_makes_a_buffer_for_each_dtype():
    params = mixed("cpu")
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    assert [b.dtype for b in flat.buffers] == [torch.float32, torch.bfloat16, torch.float64]
    assert_views(flat, params)
    assert_bits(grads_of(params), before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_constructor_aligns_what_can_be_aligned(dtype):
    params = parameters_of(dtype=dtype)
    FlatGradients(params)
    whole = [g for g in grads_of(params) if g.numel() * g.element_size() % 16 == 0]
    assert len(whole) > 2
    assert all(g.data_ptr() % 16 == 0 for g in whole)


def test_constructor_keeps_the_strides_that_autograd_would_give():
    dense = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    channels_last, gapped = map(torch.nn.Parameter, (dense, torch.zeros(6, 4)[:, :3]))
    FlatGradients([channels_last, gapped])
    assert grad_of(channels_last).stride() == channels_last.stride()
    assert grad_of(gapped).is_contiguous()


def test_constructor_fills_missing_gradients_with_zeros():
    param = torch.nn.Parameter(torch.ones(3))
    FlatGradients(param)
    assert grad_of(param).tolist() == [0.0, 0.0, 0.0]


def test_constructor_takes_each_parameter_once_and_leaves_some_out():
    params = parameters_of()
    params[1].requires_grad_(False)
    params[2].need_clip = False  # type: ignore[attr-defined]
    left_out = [p.grad for p in params[1:3]]
    flat = FlatGradients([*params, params[0]])
    assert [*map(id, flat.parameters)] == [*map(id, (params[0], *params[3:]))]
    assert [*map(id, left_out)] == [id(p.grad) for p in params[1:3]]


@pytest.mark.parametrize(
    ("form", "n"),
    [
        (lambda layer: layer, 2),
        (lambda layer: layer.named_parameters(), 2),
        (lambda layer: layer.weight, 1),
        (lambda layer: layer.parameters(), 2),
    ],
    ids=["module", "named", "tensor", "generator"],
)
def test_constructor_takes_what_clip_takes(form, n):
    flat = FlatGradients(form(torch.nn.Linear(3, 2)))
    assert len(flat) == n
    flat.check()


class _Subclass(Tensor):
    pass


def _of_subclass():
    return torch.zeros(2).as_subclass(_Subclass).requires_grad_()


def _computed():
    return [torch.ones(2, requires_grad=True) * 2]


def _sparse():
    param = torch.nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.ones(4, 2).to_sparse_coo()
    return param


REFUSED: dict[str, Any] = {
    "empty": (list, ValueError, "expected at least one parameter that requires a gradient"),
    "frozen": (lambda: [torch.zeros(2)], ValueError, "got none among 1;"),
    "number": (lambda: 3, TypeError, "expected an iterable of tensors"),
    "numbers": (lambda: [3], TypeError, r"parameters\[0\] must be a tensor, got int"),
    "subclass": (
        _of_subclass,
        TypeError,
        r"parameters\[0\] is a _Subclass; expected a plain tensor",
    ),
    "computed": (_computed, ValueError, r"parameters\[0\] is computed from other tensors"),
    "sparse": (
        _sparse,
        TypeError,
        r"gradient of parameters\[0\] has layout .*dense gradients only",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_constructor_refuses(make, error, message):
    with pytest.raises(error, match=message):
        FlatGradients(make())


def test_backward_accumulates_into_the_buffers():
    params = parameters_of()
    flat = FlatGradients(params)
    flat.zero_()
    backward(params)
    backward(params)
    flat.check()
    assert all(bool((g == 2).all()) for g in grads_of(params))
    assert float(flat.buffers[0].sum()) == 2 * sum(p.numel() for p in params)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("compiled", "sparse"), [(False, False), (False, True), (True, False)])
def test_zero_sets_gradients_of_parameters_that_are_not_clipped(compiled, sparse):
    """In place of zero_grad: else they would add up for ever."""
    params = parameters_of()
    params[2].need_clip = False  # type: ignore[attr-defined]
    if sparse:
        params[2].grad = grad_of(params[2]).to_sparse()
    params[1].grad = None
    params[1].need_clip = False  # type: ignore[attr-defined]
    flat = FlatGradients(params)
    compiled_by = partial(torch.compile, backend="aot_eager", fullgraph=True)
    zero_ = compiled_by(flat.zero_) if compiled else flat.zero_
    zero_()
    assert not any(bool(grad_of(p).to_dense().any()) for p in (params[0], *params[2:]))
    assert params[1].grad is None


def test_zero_sets_gradients_of_parameters_that_were_frozen_at_first():
    params = parameters_of()
    params[2].need_clip = False  # type: ignore[attr-defined]
    params[2].requires_grad_(False)
    flat = FlatGradients(params)
    params[2].requires_grad_(True)
    flat.zero_()
    assert not grad_of(params[2]).any()


@pytest.mark.parametrize("leaf", [False, True])
def test_zero_leaves_no_graph_behind(leaf):
    """As zero_grad of torch's optimizers: else the graph would grow in every step."""
    params = parameters_of()
    params[2].need_clip = False  # type: ignore[attr-defined]
    flat = FlatGradients(params)
    given = grad_of(params[2]).requires_grad_()
    params[2].grad = given if leaf else given * 1.0
    flat.zero_()
    assert not grad_of(params[2]).requires_grad
    assert not grad_of(params[2]).any()


def test_zero_sets_every_gradient():
    params = mixed("cpu")
    flat = FlatGradients(params)
    flat.zero_()
    flat.check()
    assert not any(g.any() for g in grads_of(params))


def test_shallow_copy_is_refused():
    params = parameters_of()
    flat = FlatGradients(params)
    with pytest.raises(TypeError, match=r"expected copy\.deepcopy"):
        copy.copy(flat)
    flat.check()


def test_made_in_inference_mode_it_takes_gradients_outside():
    params = parameters_of()
    with torch.inference_mode():
        flat = FlatGradients(params)
    flat.zero_()
    backward(params)
    flat.check()


COPIED = pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)


@COPIED
def test_copy_has_buffers_of_its_own(again):
    """Set to 0: copies of parameters, as torch makes them, have no gradients."""
    params = parameters_of()
    flat = FlatGradients(params)
    before = copies(grads_of(params))
    twins, other = again((params, flat))
    other.check()
    assert_views(other, twins)
    tritonclip.clip_(other, ClipByValue(0.5, 1.0))
    assert all(bool((g == 0.5).all()) for g in grads_of(twins))
    flat.check()
    assert_bits(grads_of(params), before)


@COPIED
def test_copy_leaves_out_what_the_original_left_out(again):
    params = parameters_of(SHAPES[:3])
    params[1].need_clip = False  # type: ignore[attr-defined]
    twins, other = again((params, FlatGradients(params)))
    assert [getattr(p, "need_clip", True) for p in twins] == [True, False, True]
    assert twins[1].grad is None or again is not copy.deepcopy
    other.check()
    assert len(other) == 2


def test_repr_says_what_it_holds():
    flat = FlatGradients(parameters_of([(2, 3), (4,)]))
    assert repr(flat) == "FlatGradients(2 parameters: 10 of torch.float32 on cpu)"
