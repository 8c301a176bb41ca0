"""Clipping by FlatGradients.

The truth is `tests/helpers/reference.py` on copies of the gradients, as for gradients of their own.
"""

from __future__ import annotations

import math
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    FLOATS,
    NORM_TYPES,
    assert_norm,
    check_clip,
    copies,
    grad_of,
    normal,
    unchanged,
)
from helpers.views import SHAPES, grads_of, mixed, parameters_of
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, FlatGradients

RULES = [
    pytest.param(ClipByGlobalNorm(0.5), id="global"),
    pytest.param(ClipByNorm(0.5), id="by-norm"),
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [1e-2, 1e9], ids=["clipped", "within"])
def test_global_norm_equals_the_reference(backend, norm_type, dtype, max_norm):
    check_flat(
        parameters_of(SHAPES[:3], dtype, backend.device), ClipByGlobalNorm(max_norm, norm_type)
    )


def check_flat(params, rule, flat=None, **options):
    """A call by FlatGradients is right."""
    flat = flat or FlatGradients(params)
    return check_clip(grads_of(params), rule, flat, **options)


@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clipped", "within"])
def test_norm_by_gradient_equals_the_reference(backend, max_norm):
    params, rule = mixed(backend.device), ClipByNorm(max_norm)
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    for _ in range(2):
        norms = tritonclip.clip_(flat, rule)
        assert norms.dtype == torch.float64
        # Those of narrower gradients are right to the tolerance of float32.
        assert_norm(norms.float(), reference.norms(before))
        expected = reference.clipped(before, rule, norms)
        for ours, truth in zip(grads_of(params), expected, strict=True):
            torch.testing.assert_close(ours.cpu(), truth)
        before = copies(grads_of(params))


@pytest.mark.parametrize(
    "rule", [ClipByValue(0.5), ClipByValue(0.1, 0.2), ClipByValue(-9.0, 9.0)], ids=str
)
def test_value_equals_the_reference(backend, rule):
    assert check_flat(mixed(backend.device), rule) is None


def test_complex_gradients_are_clipped_by_modulus(backend):
    params = parameters_of(SHAPES[:3], torch.complex64, backend.device)
    flat = FlatGradients(params)
    check_flat(params, ClipByNorm(1e9, 1.0), flat)
    check_flat(params, ClipByGlobalNorm(1e9), flat)
    with pytest.raises(TypeError, match=r"cannot order complex gradients \(parameters\[0\]"):
        tritonclip.clip_(flat, ClipByValue(1.0))


def test_zero_policy_erases_every_gradient(backend):
    params = parameters_of(SHAPES[:3], device=backend.device)
    flat = FlatGradients(params)
    grad_of(params[1])[0] = math.nan
    norm = tritonclip.clip_(flat, 1.0, nonfinite="zero")
    assert math.isnan(norm)
    assert not any(g.any() for g in grads_of(params))


def test_nan_that_spread_is_gone_after_zero_grad(backend):
    """Nothing but gradients lies in a buffer: no place keeps the NaN."""
    params = parameters_of(device=backend.device)
    flat = FlatGradients(params)
    grad_of(params[0])[0] = math.nan
    tritonclip.clip_(flat, 1.0)
    torch.optim.SGD(params).zero_grad(set_to_none=False)
    assert tritonclip.clip_(flat, 1.0) == 0


@pytest.mark.parametrize("rule", RULES)
def test_error_names_the_parameter(backend, rule):
    layer = torch.nn.Linear(3, 2, device=backend.device)
    flat = FlatGradients(layer)
    grad_of(layer.bias)[0] = math.inf
    grads = grads_of([layer.weight, layer.bias])
    with unchanged(grads), pytest.raises(RuntimeError, match="bias"):
        tritonclip.clip_(flat, rule, nonfinite="error")


def test_grad_scale_is_taken_out(backend):
    check_flat(parameters_of(SHAPES[:3], device=backend.device), 1e9, grad_scale=4.0)


def test_functions_of_torch_take_it(backend):
    params = parameters_of(SHAPES[:3], device=backend.device)
    flat = FlatGradients(params)
    expected = reference.total_norm(copies(grads_of(params)))
    assert_norm(tritonclip.get_total_norm(flat), expected)
    assert_norm(tritonclip.clip_grad_norm_(flat, 1e9), expected)
    tritonclip.clip_grads_with_norm_(flat, 1e9, torch.tensor(expected))
    assert_norm(tritonclip.get_total_norm(flat), expected)
    tritonclip.clip_grad_value_(flat, 0.25)
    assert max(float(g.abs().max()) for g in grads_of(params)) == 0.25


@pytest.mark.parametrize(
    "rule", [ClipByGlobalNorm(0.1), ClipByNorm(0.1), ClipByValue(0.1)], ids=str
)
def test_writes_show_in_version_counters(backend, rule):
    params = parameters_of(SHAPES[:3], device=backend.device)
    flat = FlatGradients(params)
    before = [g._version for g in grads_of(params)]
    tritonclip.clip_(flat, rule)
    assert all(g._version > v for g, v in zip(grads_of(params), before, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_alias_of_a_view_serves_in_its_place(rule):
    """The same memory seen in the same way, while somebody keeps the view."""
    params = parameters_of([(2, 2), (3,)])
    flat = FlatGradients(params)
    kept = grad_of(params[0])
    params[0].grad = kept.view_as(kept)
    for _ in range(2):
        check_flat(params, rule, flat)


@pytest.mark.parametrize("part", ["all", "one"])
def test_buffers_that_move_into_shared_memory_stay_in_use(part):
    """All views move with their buffer, also where one of them was meant."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 2) for _ in range(40)))
    model[30:].bfloat16()
    flat = FlatGradients(model)
    for seed, param in enumerate(model.parameters()):
        grad_of(param).copy_(normal(param.shape, param.dtype, seed=seed))
    expected = reference.total_norm(copies(map(grad_of, model.parameters())))
    tritonclip.clip_(flat, 1e9)
    (model if part == "all" else model[35]).share_memory()
    assert_norm(tritonclip.clip_(flat, 1e9), expected)
    flat.check()
    assert flat.buffers[1].is_shared()
    assert flat.buffers[0].is_shared() == (part == "all")
    tritonclip.clip_(flat, ClipByValue(0.0, 0.5))
    assert all(
        0 <= float(g.min()) <= float(g.max()) <= 0.5 for g in map(grad_of, model.parameters())
    )
    flat.zero_()
    assert not any(grad_of(p).any() for p in model.parameters())


def test_buffers_are_planned_again_only_where_memory_moved(monkeypatch):
    """A plan has addresses, which kernels read."""
    model = torch.nn.Linear(3, 2)
    flat = FlatGradients(model)
    plan = Mock(side_effect=flat._plan)
    monkeypatch.setattr(flat, "_plan", plan)
    for n_plans in (1, 2):
        for _ in range(3):
            tritonclip.clip_(flat, 1.0)
        assert plan.call_count == n_plans
        model.share_memory()


def test_verification_agrees(backend):
    params = mixed(backend.device)
    flat = FlatGradients(params)
    with tritonclip.verify():
        for rule in (ClipByGlobalNorm(0.5), ClipByNorm(0.1), ClipByValue(0.01)):
            tritonclip.clip_(flat, rule)


def _calls_of(n_parameters: int, rule: Any) -> int:
    """Calls of Python and C functions in one clip of 1,200 elements in so many parameters."""
    params = parameters_of([(1200 // n_parameters,)] * n_parameters)
    flat = FlatGradients(params)
    tritonclip.clip_(flat, rule)
    seen = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        tritonclip.clip_(flat, rule)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.1), ClipByValue(0.1)], ids=str)
def test_work_on_the_host_does_not_grow_with_the_parameters(rule):
    assert _calls_of(400, rule) == _calls_of(40, rule)


@pytest.mark.parametrize("rule", RULES)
def test_calls_after_attach_clip_the_new_buffers(rule):
    params = parameters_of([(3,), (5,)])
    flat = FlatGradients(params)
    tritonclip.clip_(flat, rule)
    flat.attach_()
    for seed, param in enumerate(params):
        grad_of(param).copy_(normal(param.shape, seed=10 + seed))
    check_flat(params, rule, flat)


def test_call_asks_for_the_backend_of_its_block(monkeypatch):
    """A plan of another backend is not used."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    flat = FlatGradients(parameters_of([(3,)]))
    tritonclip.clip_(flat, 1.0)
    refused = pytest.raises(RuntimeError, match="the triton backend was asked for")
    with tritonclip.use_backend("triton"), refused:
        tritonclip.clip_(flat, 1.0)
