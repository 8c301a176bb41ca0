"""Clipping by unit in cases that random lists do not meet."""

from __future__ import annotations

import importlib
import math
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    FLOATS,
    NoHostRead,
    assert_bits,
    assert_norm,
    bits,
    copies,
    grad_of,
    named,
    normal,
    parameter,
)
from helpers.units import assert_clipped, check_clip, make, truths, wide
from tritonclip import ClipByUnitNorm, ClippedOptimizer
from tritonclip.backends import choose


def test_rule_by_unit_has_the_papers_defaults():
    rule = ClipByUnitNorm()
    assert (rule.ratio, rule.eps) == (0.01, 1e-3)
    assert repr(rule) == "ClipByUnitNorm(ratio=0.01, eps=0.001)"


def test_clip_by_unit_without_eps_sets_the_gradient_of_zero_weights_to_zero(device):
    weight = parameter(torch.ones(2, 3, device=device))
    tritonclip.clip_([weight], ClipByUnitNorm(0.5, eps=0.0))
    assert grad_of(weight).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_unit_leaves_units_within_the_limit_bit_for_bit(device, dtype):
    parameters = make(dtype=dtype, device=device)
    before = copies(map(grad_of, parameters))
    tritonclip.clip_(parameters, ClipByUnitNorm(1e4, eps=1.0))
    assert_bits(map(grad_of, parameters), before)


MAGNITUDES = [
    pytest.param(dtype, magnitude, id=f"{str(dtype).removeprefix('torch.')}-{magnitude:g}")
    for dtype, magnitudes in {
        torch.float32: (1e30, 1e-30),
        torch.bfloat16: (1e30, 1e-30),
        torch.float16: (6e4, 1e-6),
        torch.float64: (1e200, 1e-200),
    }.items()
    for magnitude in magnitudes
]


@pytest.mark.parametrize(("dtype", "magnitude"), MAGNITUDES)
def test_clip_by_unit_neither_overflows_nor_underflows(device, dtype, magnitude):
    shapes = [(40, 30), (3, 600), (2000,)]
    parameters = []
    for seed, shape in enumerate(shapes):
        one = torch.nn.Parameter(torch.full(shape, magnitude, dtype=dtype, device=device))
        sign = torch.where(normal(shape, torch.float64, device, seed) < 0, -1.0, 1.0)
        one.grad = (sign.double() * magnitude).to(dtype)
        parameters.append(one)
    # Also where the norm itself does not fit the dtype.
    rule = ClipByUnitNorm(0.25, eps=0.0)
    before = copies(map(grad_of, parameters))
    assert_norm(tritonclip.clip_(parameters, rule), reference.norms(before))
    for one in parameters:
        quarter = torch.full_like(one, magnitude).cpu().double() / 4
        assert_clipped(grad_of(one).abs(), quarter.numpy())


def test_clip_by_unit_leaves_zero_gradients_alone(device):
    parameters = make([(5, 8), (3, 700), (6,)], device=device)
    for one in parameters:
        one.data.zero_()
        grad_of(one).zero_()
    norms = tritonclip.clip_(parameters, ClipByUnitNorm(eps=0.0))
    assert norms.tolist() == [0.0] * 3
    assert not any(grad_of(one).any() for one in parameters)


def test_clip_by_unit_makes_the_gradient_of_nan_weights_nan(device):
    weight = torch.nn.Parameter(torch.tensor([[1.0, math.nan], [3.0, 4.0]], device=device))
    weight.grad = torch.full((2, 2), 0.01, device=device)
    tritonclip.clip_([weight], ClipByUnitNorm())
    assert weight.grad.isnan().tolist() == [[True, True], [False, False]]


def test_clip_by_unit_names_gradients_that_are_not_finite(device):
    parameters = make([(5, 8), (3, 700)], device=device)
    grad_of(parameters[1])[2, 5] = math.nan
    before = [bits(grad_of(p)) for p in parameters]
    names = zip(("first", "second"), parameters, strict=True)
    with pytest.raises(RuntimeError, match=r"norms of order 2\.0 of second are non-finite"):
        tritonclip.clip_(names, ClipByUnitNorm(), nonfinite="error")
    assert all(map(torch.equal, map(bits, map(grad_of, parameters)), before))


def test_clip_by_unit_divides_by_a_loss_scale_whose_quotient_is_denormal(device):
    parameters, rule = make(device=device, grad_scale=2.0**100), ClipByUnitNorm(2.0**-40)
    expected_grads = truths(parameters, rule, 2.0**100)
    before = [wide(grad_of(p)) for p in parameters]
    with tritonclip.verify():
        tritonclip.clip_(parameters, rule, grad_scale=2.0**100)
    for one, truth, old in zip(parameters, expected_grads, before, strict=True):
        # The error of a factor below 2^-126 is half a unit in the last place, 2^-150.
        error = np.abs(wide(grad_of(one)) - truth)
        assert np.all(error <= np.abs(old) * 2.0**-150 + np.abs(truth) * 2.2e-6)


def test_clip_by_unit_is_visible_to_autograd(device):
    (one,) = make([(5, 8)], device=device)
    grad = grad_of(one)
    before = grad._version
    tritonclip.clip_([one], ClipByUnitNorm())
    assert grad._version > before
    assert one._version == 0


def test_clip_by_unit_writes_nothing_within_the_limits_on_a_cpu():
    (one,) = make([(5, 8)])
    grad, before = grad_of(one), grad_of(one)._version
    with tritonclip.use_backend("torch"):
        tritonclip.clip_([one], ClipByUnitNorm(1e9))
    assert grad._version == before


@pytest.mark.parametrize("policy", ["propagate", "zero"])
def test_clip_by_unit_waits_for_no_device(backend, device, policy):
    if backend.host_decides:
        pytest.skip("a CPU is not waited for")
    parameters = make(device=device)
    rule = ClipByUnitNorm()
    tritonclip.clip_(parameters, rule, nonfinite=policy)
    with NoHostRead():
        tritonclip.clip_(parameters, rule, grad_scale=4.0, nonfinite=policy)


def test_verify_finds_a_wrong_unit(backend, monkeypatch):
    """Units that have the norms of others."""
    if backend.name == "torch":
        pytest.skip("the reference has the faults of the torch backend")
    module = importlib.import_module(f"tritonclip.backends.{backend.module}")
    batch = module.TritonBatch if backend.name == "triton" else module.NativeBatch
    parameters = make([(5, 8)], device=backend.device)
    real = batch.norm
    monkeypatch.setattr(batch, "norm", lambda *args: real(*args).flip(1))
    with tritonclip.verify(), pytest.raises(tritonclip.VerificationError, match=r"parameters\[0\]"):
        tritonclip.clip_(parameters, ClipByUnitNorm())


def test_clip_by_unit_leaves_out_what_needs_no_clipping(device):
    parameters = make([(5, 8), (3, 7)], device=device)
    parameters[0].need_clip = False  # type: ignore[attr-defined]
    before = copies(map(grad_of, parameters))
    assert tritonclip.clip_(parameters, ClipByUnitNorm(0.0)).shape == (1,)
    assert_bits([grad_of(parameters[0])], before[:1])
    assert not grad_of(parameters[1]).any()


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
@pytest.mark.parametrize("is_complex", ["gradient", "weight"])
def test_clip_by_unit_takes_complex_gradients_of_real_weights(device, is_complex):
    """Half as many reals in one as in the other; a kernel read rows of the other's length."""
    parameters = make([(4, 50), (7,)], torch.float32, device)
    for i, one in enumerate(parameters):
        tensor = grad_of(one) if is_complex == "gradient" else one
        tensor.data = normal(one.shape, torch.complex64, device, seed=i)
    check_clip(parameters, ClipByUnitNorm(1.6))


def test_clip_by_unit_makes_layouts_once_for_weights_of_one_form(device):
    """Weights that moved have the form of the others; those of another form have new layouts."""
    (one,) = make([(6, 5, 4, 3)], device=device)
    grad, made = grad_of(one).clone(), Mock(wraps=choose.layout_of)
    with patch("tritonclip.engine.units.layout_of", made):
        for count, change in ((1, torch.clone), (1, torch.clone), (2, LAYOUTS["channels_last"])):
            one.data = change(one.data * 2)
            grad_of(one).copy_(grad)
            check_clip([one], ClipByUnitNorm())
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


@pytest.mark.parametrize("nonfinite", ["propagate", "error", "zero", "skip"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 20000), (5,)], ids=str)
def test_policies_act_on_weights_that_are_nan(backend, nonfinite, shape):
    """Only where the unit has a gradient: else nothing is clipped."""
    for used in (False, True):
        weights = make([(2, 3), shape], device=backend.device)
        with torch.no_grad():
            weights[1][0] = math.nan
            if not used:
                grad_of(weights[1])[0] = 0.0
                if len(shape) == 1:
                    grad_of(weights[1]).zero_()
        before = copies(map(grad_of, weights))
        inner = torch.optim.SGD(weights, lr=0.0, fused=True)
        optimizer = ClippedOptimizer(inner, ClipByUnitNorm(0.1), nonfinite=nonfinite)
        if used and nonfinite == "error":
            with pytest.raises(RuntimeError, match=r"weights of .*\['params'\]\[1\] are NaN"):
                optimizer.step()
            with pytest.raises(RuntimeError, match=r"weights of parameters\[1\] are NaN"):
                tritonclip.clip_(weights, ClipByUnitNorm(0.1), nonfinite="error")
            assert_bits(map(grad_of, weights), before)
            continue
        optimizer.step()
        assert int(optimizer.stats.skipped_steps) == (used and nonfinite == "skip")
        if nonfinite == "zero":
            assert bool(any(grad_of(weight).any() for weight in weights)) != used
            tritonclip.clip_(weights, ClipByUnitNorm(0.1), nonfinite="zero")
        if not used:
            assert not grad_of(weights[1]).isnan().any()
