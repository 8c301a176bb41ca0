"""Clipping by unit, compared with the paper's formula in NumPy and float64."""

from __future__ import annotations

import dataclasses
import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonclip
from helpers import reference
from helpers.cases import (
    FLOATS,
    INTERPRETED,
    NoHostRead,
    assert_bits,
    assert_norm,
    bits,
    copies,
    grad_of,
    normal,
    parameter,
)
from helpers.units import assert_clipped, check_clip, make, truths, wide
from tritonclip import ClipByUnitNorm


def test_rule_by_unit_has_the_papers_defaults():
    rule = ClipByUnitNorm()
    assert (rule.ratio, rule.eps) == (0.01, 1e-3)
    assert repr(rule) == "ClipByUnitNorm(ratio=0.01, eps=0.001)"


@pytest.mark.parametrize("argument", ["ratio", "eps"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(-1.0, ValueError), (math.nan, ValueError), (True, TypeError), ("big", TypeError)],
    ids=repr,
)
def test_rule_by_unit_refuses(argument, value, error):
    with pytest.raises(error, match=argument):
        ClipByUnitNorm(**{argument: value})


def test_rule_by_unit_refuses_an_infinite_eps():
    with pytest.raises(ValueError, match="eps must be finite"):
        ClipByUnitNorm(eps=math.inf)


def test_rule_by_unit_is_frozen_and_compares_by_value():
    rule = ClipByUnitNorm(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.ratio = 1.0  # type: ignore[misc]
    assert rule == ClipByUnitNorm(0.1) != ClipByUnitNorm(0.2)
    assert hash(rule) == hash(ClipByUnitNorm(0.1))


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ratio", [0.01, 0.5, 1e-4], ids="ratio={:g}".format)
def test_clip_by_unit_scales_by_the_papers_formula(device, dtype, ratio):
    parameters, rule = make(dtype=dtype, device=device), ClipByUnitNorm(ratio)
    norms = check_clip(parameters, rule)
    assert_norm(norms, [float(np.linalg.norm(wide(grad_of(p)))) for p in make(dtype=dtype)])


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


def test_clip_by_unit_clips_only_the_rows_over_their_limit(device):
    weight = torch.nn.Parameter(torch.ones(4, 100, device=device))
    weight.grad = torch.full((4, 100), 0.05, device=device)
    weight.grad[2] = 3.0
    (before,) = copies([weight.grad])
    tritonclip.clip_([weight], ClipByUnitNorm(0.1))
    assert_bits([weight.grad[[0, 1, 3]]], [before[[0, 1, 3]]])
    assert weight.grad[2].norm().item() == pytest.approx(1.0, rel=2e-6)


@pytest.mark.parametrize("ratio", [0.0, math.inf])
def test_clip_by_unit_to_nothing_and_to_infinity(device, ratio):
    parameters = make(device=device)
    before = copies(map(grad_of, parameters))
    tritonclip.clip_(parameters, ClipByUnitNorm(ratio, eps=0.0))
    after = [old.abs() if ratio else torch.zeros_like(old) for old in before]
    assert_bits([grad_of(parameter).abs() for parameter in parameters], after)


def test_clip_by_unit_twice_is_clip_by_unit_once(device):
    parameters, rule = make(device=device), ClipByUnitNorm()
    tritonclip.clip_(parameters, rule)
    once = copies(map(grad_of, parameters))
    tritonclip.clip_(parameters, rule)
    for one, first in zip(parameters, once, strict=True):
        torch.testing.assert_close(grad_of(one).cpu(), first, rtol=3e-7, atol=0)


LOGARITHMS = st.floats(-30, 30)


@given(st.integers(0, 40), st.integers(0, 60), LOGARITHMS, LOGARITHMS, st.integers(0, 9))
def test_clip_by_unit_never_exceeds_the_limit(device, rows, length, weights, grads, seed):
    weight = torch.nn.Parameter(normal((rows, length), device=device, seed=seed) * 10**weights)
    weight.grad = normal((rows, length), device=device, seed=seed + 1) * 10**grads
    check_clip([weight], ClipByUnitNorm(0.3))


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_clip_by_unit_keeps_nan_and_inf_within_their_unit(device, value):
    parameters = make([(5, 8), (3, 700), (6,)], device=device)
    grad_of(parameters[0])[1, 2] = value
    grad_of(parameters[1])[2, 650] = value
    check_clip(parameters, ClipByUnitNorm())
    hit = grad_of(parameters[0])[1].cpu()
    others = torch.arange(8) != 2
    assert hit[2].isnan()
    assert (hit[others].isnan() if math.isnan(value) else hit[others] == 0).all()


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


def test_clip_by_unit_zeroes_everything_where_a_norm_is_not_finite(device):
    parameters = make([(5, 8), (3, 700), (70,)], device=device)
    grad_of(parameters[1])[2, 5] = math.inf
    tritonclip.clip_(parameters, ClipByUnitNorm(), nonfinite="zero")
    assert not any(grad_of(one).any() for one in parameters)
    parameters = make([(5, 8)], device=device)
    check_clip(parameters, ClipByUnitNorm(), nonfinite="zero")


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("in_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_unit_divides_by_the_loss_scale_first(device, dtype, in_tensor):
    scale = torch.tensor(8.0, device=device) if in_tensor else 8.0
    parameters = make(dtype=dtype, device=device)
    norms = check_clip(parameters, ClipByUnitNorm(0.5), grad_scale=scale)
    assert_norm(norms, [float(np.linalg.norm(wide(grad_of(p)))) / 8 for p in make(dtype=dtype)])


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


def test_clip_by_unit_clips_a_gradient_met_twice_once(device):
    (one,) = make([(5, 8)], device=device)
    assert check_clip([one, one], ClipByUnitNorm()).shape == (1,)


def test_clip_by_unit_follows_weights_and_gradients_that_moved(device):
    """The second list has the form of the first, and other memory."""
    for factor in (1.0, 30.0):
        parameters = make([(5, 8), (3, 700)], device=device, weight_scale=factor)
        check_clip(parameters, ClipByUnitNorm())


def test_clip_by_unit_of_an_empty_list(device):
    norms = tritonclip.clip_([torch.nn.Parameter(torch.ones(2, device=device))], ClipByUnitNorm())
    assert norms.shape == (0,)


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


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("kind", ["normal", "nan", "inf", "zero"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_verify_agrees_with_clip_by_unit(device, policy, kind, dtype):
    parameters = make([(5, 8), (3, 700), (70,), (6, 5, 4, 3), ()], dtype, device)
    if kind == "zero":
        grad_of(parameters[0])[2] = 0
    elif kind != "normal":
        grad_of(parameters[0])[2, 1] = float(kind)
    rule = ClipByUnitNorm()
    with tritonclip.verify():
        tritonclip.clip_(parameters, rule, nonfinite=policy)
        tritonclip.clip_(parameters, rule, nonfinite=policy, grad_scale=4.0)


def test_verify_finds_a_wrong_unit(backend, monkeypatch):
    """Units that have the norms of others."""
    if backend.name == "torch":
        pytest.skip("the reference has the faults of the torch backend")
    module = importlib.import_module(f"tritonclip.backends.{backend.module}_units")
    units = module.TritonUnits if backend.name == "triton" else module.NativeUnits
    parameters = make([(5, 8)], device=backend.device)
    real = units.measure
    monkeypatch.setattr(units, "measure", lambda batch: real(batch).flip(1))
    with tritonclip.verify(), pytest.raises(tritonclip.VerificationError, match=r"parameters\[0\]"):
        tritonclip.clip_(parameters, ClipByUnitNorm())


def test_clip_by_unit_leaves_out_what_needs_no_clipping(device):
    parameters = make([(5, 8), (3, 7)], device=device)
    parameters[0].need_clip = False  # type: ignore[attr-defined]
    before = copies(map(grad_of, parameters))
    assert tritonclip.clip_(parameters, ClipByUnitNorm(0.0)).shape == (1,)
    assert_bits([grad_of(parameters[0])], before[:1])
    assert not grad_of(parameters[1]).any()
