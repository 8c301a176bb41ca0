"""The behaviour that the tests of ZClip, AutoClip, Levanter, OLMo-core and optax show, here."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import FLOATS, assert_bits, copies, grad_of, parameters, same_parameters
from helpers.training import give_grads, sgd, wrapped
from helpers.units import SHAPES, assert_clipped, make, unit_norms, wide
from tritonclip import ClipByQuantile, ClipByRMS, ClipByUnitNorm, ClipByZScore, ClipState, Outlier


def after(rule: Any, state: ClipState, size: float) -> float:
    """The norm after clipping a gradient of this norm."""
    (weight,) = same_parameters([torch.tensor([0.0, size], dtype=torch.float64)])
    tritonclip.clip_(weight, rule, state=state)
    return float(grad_of(weight).norm())


def warmed(rule: Any, sizes: list[float]) -> ClipState:
    """A state that remembers these norms."""
    state = ClipState()
    for size in sizes:
        after(rule, state, size)
    return state


NORMAL = [1.0, 1.2, 0.8, 1.1, 0.9] * 5


def test_zclip_clips_a_spike_to_the_adaptive_threshold():
    """ZClip: test_zscore_clipping, test_adaptive_scaling_threshold."""
    state = warmed(ClipByZScore(), NORMAL)
    mean, std = 1.0, math.sqrt(0.02)
    for spike in (5.0, 50.0):
        z = (spike - mean) / (std + 1e-6)
        expected = mean + 2.5 * std / (z / 2.5)
        assert after(ClipByZScore(), copy.deepcopy(state), spike) == pytest.approx(expected)


def test_zclip_leaves_a_norm_below_the_threshold():
    rule = ClipByZScore()
    assert after(rule, warmed(rule, NORMAL), 1.2) == 1.2


def test_zclip_clips_nothing_in_its_warmup_but_to_max_norm():
    assert after(ClipByZScore(), warmed(ClipByZScore(), NORMAL[:24]), 50.0) == 50.0
    bounded = ClipByZScore(max_norm=1.0)
    assert after(bounded, warmed(bounded, NORMAL[:24]), 50.0) == pytest.approx(1.0)


def test_zclip_is_not_moved_by_the_spike_itself():
    """The average takes the norm after clipping: the next spike meets nearly the same limit."""
    rule = ClipByZScore()
    state = warmed(rule, NORMAL)
    first = after(rule, state, 50.0)
    assert after(rule, state, 50.0) == pytest.approx(first, rel=0.05)


def test_autoclip_clips_to_the_percentile_of_all_norms_so_far():
    rule = ClipByQuantile(0.5, 1000)
    state = warmed(rule, [1.0, 2.0, 3.0, 4.0])
    # The median of 1, 2, 3, 4 and 100.
    assert after(rule, state, 100.0) == pytest.approx(3.0)


def test_autoclip_clips_after_a_checkpoint_was_loaded():
    """PyPI autoclip: test_clip_after_state_dict_load."""
    params, optimizer = wrapped(sgd, ClipByQuantile(0.5, 9))
    for number in range(5):
        give_grads(params, number)
        optimizer.step()
    twins, other = wrapped(sgd, ClipByQuantile(0.5, 9))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, owner in ((params, optimizer), (twins, other)):
        give_grads(each, size=50.0)
        owner.step()
    assert float(other.stats.last_limit) == float(optimizer.stats.last_limit)
    assert float(other.stats.last_coefficient) < 1


def test_autoclip_takes_a_parameter_group_that_is_added():
    """PyPI autoclip: test_add_param_group."""
    params, optimizer = wrapped(sgd, ClipByQuantile(0.5, 9))
    give_grads(params)
    optimizer.step()
    added = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added]})
    give_grads([*params, added], size=50.0)
    optimizer.step()
    assert float(optimizer.stats.last_coefficient) < 1


def test_levanter_skips_nothing_before_it_has_enough_norms():
    """Levanter: test_update_fn_initial_phase_not_enough_data."""
    params, optimizer = wrapped(sgd, skip_above=Outlier(6.0, 8))
    for size in (1.0, 1.1, 1.0, 500.0):
        give_grads(params, size=size)
        optimizer.step()
    assert int(optimizer.stats.skipped_steps) == 0


def test_levanter_forgets_the_norms_before_its_window():
    """Levanter: test_update_fn_circular_buffer_and_count_cap."""
    rule = Outlier(6.0, 4)
    state = torch.tensor(rule.start(), dtype=torch.float64)
    for size in (9.0, 9.0, 1.0, 2.0, 3.0, 4.0):
        _, state = rule.advance(state, torch.tensor(size, dtype=torch.float64))
    limit, _ = rule.advance(state, torch.tensor(1.0, dtype=torch.float64))
    assert float(limit) == pytest.approx(2.5 + 6.0 * math.sqrt(5 / 3))


def test_levanter_loads_a_checkpoint_that_skipped_nothing():
    """Levanter: test_skip_step_state_serialization_can_load_non_skip."""
    params, optimizer = wrapped(sgd)
    give_grads(params)
    optimizer.step()
    twins, other = wrapped(sgd, skip_above=Outlier(6.0, 8))
    other.load_state_dict(optimizer.state_dict())
    give_grads(twins)
    other.step()
    assert int(other.stats.steps) == 2


def test_olmo_goes_on_after_a_norm_that_is_nan():
    """One NaN makes OLMo-core skip until it leaves the window."""
    params, optimizer = wrapped(sgd, nonfinite="skip", skip_above=Outlier(6.0, 8))
    for number in range(8):
        give_grads(params, number)
        optimizer.step()
    give_grads(params, bad=math.nan)
    optimizer.step()
    give_grads(params)
    optimizer.step()
    assert (int(optimizer.stats.steps), int(optimizer.stats.skipped_steps)) == (9, 1)


def test_bitsandbytes_clips_each_tensor_by_its_own_percentile():
    """bitsandbytes 0.49: test_percentile_clipping, of a full window, without its interpolation."""
    random = np.random.default_rng(0)
    rule, state = tritonclip.ClipByOwnQuantile(0.05), ClipState()
    history: list[np.ndarray] = []
    for _ in range(120):
        norms = np.exp(random.normal(size=2)) * (1.0, 100.0)
        history.append(norms)
        weights = same_parameters([torch.tensor([norm]) for norm in norms])
        tritonclip.clip_(weights, rule, state=state)
        window = np.sort(history[-100:], axis=0)
        if len(window) == 100:
            after = np.array([float(grad_of(weight)) for weight in weights])
            assert (np.minimum(window[4], norms) <= after * (1 + 1e-6)).all()
            assert (after <= np.minimum(window[5], norms) * (1 + 1e-6)).all()


def blocks() -> list[Tensor]:
    return [torch.tensor([3.0, 4.0]), torch.tensor([[0.1, -0.2]])]


def test_optax_clip_by_block_rms_bounds_each_block():
    """optax: ClippingTest.test_clip_by_block_rms."""
    weights = parameters(blocks())
    tritonclip.clip_(weights, ClipByRMS(1.0))
    expected = blocks()[0] / torch.tensor(12.5).sqrt()
    torch.testing.assert_close(grad_of(weights[0]), expected, rtol=1e-6, atol=0)
    assert_bits([grad_of(weights[1])], copies(blocks()[1:]))


def test_optax_adaptive_grad_clip():
    """After each of 50 steps with a lower ratio every norm is within it; clipping again agrees."""
    weights = [torch.nn.Parameter(torch.tensor(w)) for w in ([1.0, 2.0], [3.0, 4.0])]
    first = [torch.tensor([500.0, 5.0]), torch.tensor([300.0, 3.0])]
    for weight, grad in zip(weights, first, strict=True):
        weight.grad = grad.clone()
    for i in range(1, 51):
        rule = ClipByUnitNorm(1 / i)
        tritonclip.clip_(weights, rule)
        again = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
        for weight, twin, grad in zip(weights, again, first, strict=True):
            assert grad_of(weight).norm() - weight.norm() / i < 1e-6
            twin.grad = grad.clone()
        tritonclip.clip_(again, rule)
        for weight, twin in zip(weights, again, strict=True):
            torch.testing.assert_close(grad_of(weight), grad_of(twin), rtol=1e-6, atol=1e-6)


def test_optax_adaptive_grad_clip_with_axis():
    """A 5-d kernel and a matrix: within the limit after clipping, unchanged where it was below."""
    for shape, value in (((4, 3, 2, 2, 2), 2.0), ((6, 5), 3.0)):
        weight = torch.nn.Parameter(torch.ones(shape))
        weight.grad = torch.full(shape, value)
        tritonclip.clip_([weight], ClipByUnitNorm(0.5))
        own, limit = (unit_norms(wide(x)) for x in (grad_of(weight), weight))
        assert (own <= 0.5 * limit + 1e-6).all()
    weight = torch.nn.Parameter(torch.ones(4, 3, 2, 2, 2))
    weight.grad = torch.full_like(weight, 0.1)
    tritonclip.clip_([weight], ClipByUnitNorm(2.0))
    assert (weight.grad == 0.1).all()


def test_optax_matrix_of_one_column_is_one_unit_there_and_rows_here():
    weight = torch.nn.Parameter(torch.ones(4, 1))
    weight.grad = torch.tensor([[4.0], [0.1], [0.1], [0.1]])
    tritonclip.clip_([weight], ClipByUnitNorm(0.5))
    torch.testing.assert_close(weight.grad, torch.tensor([[0.5], [0.1], [0.1], [0.1]]))


def _timm_adaptive_clip_grad(parameters, ratio: float, eps: float) -> list[np.ndarray]:
    """Its result in float64: kept where the norm is below the limit, else scaled; floor of 1e-6."""
    result = []
    for one in parameters:
        grad, limit = wide(grad_of(one)), ratio * np.maximum(unit_norms(wide(one)), eps)
        own = unit_norms(grad)
        result.append(np.where(own < limit, grad, grad * (limit / np.maximum(own, 1e-6))))
    return result


@pytest.mark.parametrize("dtype", FLOATS)
def test_timm_adaptive_clip_grad(device, dtype):
    """Its clip_factor and eps are our ratio and eps, its units ours."""
    shapes = [shape for shape in SHAPES if 0 not in shape]
    parameters = make(shapes, dtype, device)
    expected_grads = _timm_adaptive_clip_grad(parameters, 0.02, 1e-3)
    tritonclip.clip_(parameters, ClipByUnitNorm(0.02, eps=1e-3))
    for parameter, truth in zip(parameters, expected_grads, strict=True):
        assert_clipped(grad_of(parameter), truth)


def test_timm_floor_of_gradient_norms_is_not_ours():
    """It divides by 1e-6 at least, so that tiny gradients over their limit shrink too much."""
    weight = torch.nn.Parameter(torch.full((1, 4), 1e-7))
    weight.grad = torch.full((1, 4), 2e-7)
    assert unit_norms(_timm_adaptive_clip_grad([weight], 1.0, 1e-9)[0]).item() < 1e-7
    tritonclip.clip_([weight], ClipByUnitNorm(1.0, eps=1e-9))
    torch.testing.assert_close(weight.grad, torch.full((1, 4), 1e-7))
