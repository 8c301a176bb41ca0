"""Clipping by unit with weights and gradients of any strides, and of two dtypes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

import tritonclip
from helpers.cases import bits, grad_of, named, normal
from helpers.units import check_clip, make, wide
from tritonclip import ClipByUnitNorm
from tritonclip.backends import choose

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore:tritonclip's kernels read")
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
def test_clip_by_unit_takes_any_strides(device, grad_layout, weight_layout):
    weight = torch.nn.Parameter(LAYOUTS[weight_layout](normal((6, 5, 4, 3), device=device)))
    weight.grad = LAYOUTS[grad_layout](normal((6, 5, 4, 3), device=device, seed=1))
    assert weight.stride() != weight.grad.stride() or grad_layout == weight_layout
    check_clip([weight], ClipByUnitNorm())


@pytest.mark.filterwarnings("ignore:tritonclip's kernels")
@pytest.mark.parametrize("weight_dtype", named((torch.bfloat16, torch.float64)))
def test_clip_by_unit_takes_weights_of_another_dtype(device, weight_dtype):
    if not hasattr(torch.nn.Parameter, "grad_dtype"):
        pytest.skip("this torch keeps gradients in the dtype of their parameter")
    weight = torch.nn.Parameter(normal((70, 30), weight_dtype, device))
    weight.grad_dtype = None
    weight.grad = normal((70, 30), torch.float32, device, 1)
    check_clip([weight], ClipByUnitNorm())


@pytest.mark.filterwarnings("ignore:tritonclip's kernels")
def test_clip_by_unit_of_mixed_dtypes_keeps_the_order(device):
    dtypes = [torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.complex64] * 2
    parameters = [make([(3 + i, 5)], dtype, device)[0] for i, dtype in enumerate(dtypes)]
    sizes = [float(np.linalg.norm(wide(grad_of(p)))) for p in parameters]
    norms = check_clip(parameters, ClipByUnitNorm())
    assert norms.dtype == torch.float64
    np.testing.assert_allclose(norms.cpu().numpy(), sizes, rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 5), (7,), ()], ids=str)
def test_clip_by_unit_measures_complex_units_by_modulus(device, shape):
    check_clip(make([shape], torch.complex64, device), ClipByUnitNorm())


@pytest.mark.filterwarnings("ignore:tritonclip's kernels")
@pytest.mark.parametrize("is_complex", ["gradient", "weight"])
def test_clip_by_unit_takes_complex_gradients_of_real_weights(device, is_complex):
    """Half as many reals in one as in the other; a kernel read rows of the other's length."""
    parameters = make([(4, 5), (7,)], torch.float32, device)
    for i, parameter in enumerate(parameters):
        tensor = grad_of(parameter) if is_complex == "gradient" else parameter
        tensor.data = normal(parameter.shape, torch.complex64, device, seed=i)
    check_clip(parameters, ClipByUnitNorm(1.6))


@pytest.mark.filterwarnings("ignore:tritonclip's kernels")
def test_clip_by_unit_takes_lazily_conjugated_and_negated_gradients(device):
    for view in (torch.Tensor.conj, lambda x: x.conj().imag):
        grad = view(normal((6, 5), torch.complex64, device, 1))
        weight = torch.nn.Parameter(normal((6, 5), grad.dtype, device))
        weight.grad = grad
        check_clip([weight], ClipByUnitNorm())


def test_clip_by_unit_follows_weights_whose_layout_changed(device):
    (one,) = make([(6, 5, 4, 3)], device=device)
    grad = grad_of(one).clone()
    for change in (LAYOUTS["contiguous"], LAYOUTS["channels_last"], lambda x: x):
        one.data = change(one.data * 2)
        grad_of(one).copy_(grad)
        check_clip([one], ClipByUnitNorm())


def test_clip_by_unit_makes_layouts_once_for_weights_of_one_form(device):
    """Weights that moved have the form of the others; those of another form have new layouts."""
    (one,) = make([(6, 5, 4, 3)], device=device)
    made = Mock(wraps=choose.unit_layout_of)
    with patch("tritonclip.engine.units.unit_layout_of", made):
        for count, change in ((1, torch.clone), (1, torch.clone), (2, LAYOUTS["channels_last"])):
            one.data = change(one.data)
            tritonclip.clip_([one], ClipByUnitNorm())
            assert made.call_count == count


def test_clip_by_unit_refuses_sparse_gradients():
    layer = torch.nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"sparse gradients \(weight\).*sparse=False.*need_clip"):
        tritonclip.clip_(layer, ClipByUnitNorm())


@pytest.mark.parametrize("warm", [False, True])
def test_clip_by_unit_refuses_weights_of_another_shape(device, warm):
    (one,) = make([(4, 6)], device=device)
    if warm:
        tritonclip.clip_([one], ClipByUnitNorm())
    before = bits(grad_of(one))
    one.data = torch.ones(6, 4, device=device)
    with pytest.raises(ValueError, match=r"\[0\] has shape \(6, 4\) and its gradient \(4, 6\)"):
        tritonclip.clip_([one], ClipByUnitNorm(0.0))
    assert torch.equal(bits(grad_of(one)), before)


@pytest.mark.parametrize("warm", [False, True])
def test_clip_by_unit_refuses_weights_without_memory(warm):
    (one,) = make([(4, 6)])
    if warm:
        tritonclip.clip_([one], ClipByUnitNorm())
    one.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory: its storage was freed"):
        tritonclip.clip_([one], ClipByUnitNorm())


class Wrapper(torch.Tensor):
    """A tensor whose values lie in another one, and that has no memory."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return NotImplemented


def test_clip_by_unit_refuses_weights_that_wrap_others():
    weight = Wrapper(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"parameters\[0\] is a Wrapper, a tensor subclass"):
        tritonclip.clip_(weight, ClipByUnitNorm())
    assert torch.equal(weight.grad, torch.ones(2, 3))
