"""Statistics by name: norm, largest magnitude and share of zeros of each gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import tritonclip
from helpers.cases import CHUNK, FLOATS, INTERPRETED, assert_norm, normal, parameters
from tritonclip.named_norms import GradientStatistics


def expected_of(grads: list[Tensor]) -> tuple[float, float, float]:
    """Norm, largest magnitude and share of zeros of some gradients, in float64."""
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
    wide = [g.to(torch.complex128 if g.is_complex() else torch.float64).cpu() for g in dense]
    elements = torch.cat([g.abs().flatten() for g in wide])
    if not len(elements):
        return 0.0, 0.0, 1.0
    zeros = float((elements == 0).double().mean())
    return float(elements.norm()), float(elements.max()), zeros


def assert_statistics(found: GradientStatistics, grads: list[Tensor]) -> None:
    norm, largest, zeros = expected_of(grads)
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    assert {one.dtype for one in found} == {torch.float64 if wide else torch.float32}
    assert {one.shape for one in found} == {()}
    assert_norm(found.norm, norm)
    assert float(found.largest) == pytest.approx(largest, rel=1e-7, nan_ok=True)
    assert float(found.zeros) == pytest.approx(zeros, rel=1e-7)


def with_zeros(n: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """A gradient whose first, last and every third element is 0 or -0."""
    grad = normal(n, dtype, device, seed)
    grad[::3] = 0.0
    grad[1::6] = -0.0
    grad[-1:] = 0.0
    return grad


@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_are_those_of_each_gradient(device, dtype):
    sizes = (0, 1, 7, 2049, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)
    grads = [with_zeros(n, dtype, device, seed) for seed, n in enumerate(sizes)]
    grads.append(torch.zeros(CHUNK + 3, dtype=dtype, device=device))
    found = tritonclip.statistics_by_name(parameters(grads))
    assert list(found) == [f"parameters[{i}]" for i in range(len(grads))]
    for one, grad in zip(found.values(), grads, strict=True):
        assert_statistics(one, [grad])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_smallest_numbers_are_no_zeros(backend, device, dtype):
    if backend.name == "triton" and INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter makes subnormal numbers of bfloat16 zeros")
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    grad = torch.tensor([least, -least, 0.0, -0.0], dtype=dtype, device=device)
    found = tritonclip.statistics_by_name(parameters([grad]))["parameters[0]"]
    assert float(found.zeros) == 0.5
    if dtype != torch.float64:
        assert float(found.largest) == least


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_stay_with_their_gradient(device, dtype, value):
    grads = [with_zeros(n, dtype, device) for n in (5, CHUNK + 9)]
    grads[1][CHUNK + 2] = value
    first, second = tritonclip.statistics_by_name(parameters(grads)).values()
    assert_statistics(first, grads[:1])
    assert_statistics(second, grads[1:])


def test_dtypes_complex_sparse_and_strided_gradients_mix(device):
    real = with_zeros(40, torch.float32, device)
    grads = [
        with_zeros(36, torch.float32, device).view(9, 4).t(),
        with_zeros(40, torch.bfloat16, device, 1),
        with_zeros(15, torch.float64, device, 2),
        # Of pairs, the largest magnitude and the number of zeros are others.
        torch.complex(real, real.roll(1) * 2),
        torch.tensor(-2.0, device=device),
        torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, -4.0]], device=device).to_sparse(1),
        with_zeros(30, torch.float32, device)[::2],
    ]
    found = tritonclip.statistics_by_name(parameters(grads))
    for one, grad in zip(found.values(), grads, strict=True):
        norm, largest, zeros = expected_of([grad])
        assert one.norm.dtype == torch.float64
        assert [*map(float, one)] == pytest.approx([norm, largest, zeros], rel=1e-6)


def test_groups_have_the_statistics_of_all_their_elements(device):
    grads = [with_zeros(n, torch.float32, device, n) for n in (1, 50, 7)]
    named = list(zip(("a.x", "a.y", "b"), parameters(grads), strict=True))
    found = tritonclip.statistics_by_name(named, group_of=lambda name: name[0])
    assert_statistics(found["a"], grads[:2])
    assert_statistics(found["b"], grads[2:])


def test_no_gradient_is_all_zeros():
    model = nn.Linear(3, 2)
    model.bias.grad = torch.tensor([0.0, 2.0])
    found = tritonclip.statistics_by_name(model)
    assert [*map(float, found["weight"])] == [0.0, 0.0, 1.0]
    assert [*map(float, found["bias"])] == [2.0, 2.0, 0.5]
    model.bias.grad = None
    assert [*map(float, tritonclip.statistics_by_name(model)["bias"])] == [0.0, 0.0, 1.0]
    assert tritonclip.statistics_by_name([torch.ones(2)]) == {}


def test_a_group_counts_parameters_without_a_gradient_as_zeros():
    model = nn.Linear(3, 2)
    model.bias.grad = torch.tensor([0.0, 2.0])
    found = tritonclip.statistics_by_name(model, group_of=lambda name: "all")["all"]
    assert [*map(float, found)] == pytest.approx([2.0, 2.0, 7 / 8])


def test_the_loss_scale_divides_magnitudes(device):
    grads = [with_zeros(9, torch.float16, device)]
    scale = torch.tensor(8.0, device=device)
    (found,) = tritonclip.statistics_by_name(parameters(grads), grad_scale=scale).values()
    norm, largest, zeros = expected_of([grads[0] / 8])
    assert [*map(float, found)] == pytest.approx([norm, largest, zeros], rel=1e-3)
