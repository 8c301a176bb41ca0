"""Every function gives the values of its formula, in new memory, on every backend."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.distributed.tensor import Shard

import tritonclip
from helpers import reference
from helpers.arena import Arena
from helpers.cases import (
    FLOATS,
    FUNCTIONS,
    NORM_TYPES,
    assert_bits,
    assert_norm,
    bounds_of,
    grad_of,
    no_sync,
    normal,
    parameters,
    unchanged,
)
from helpers.clips import CHOICES, clip_a_list, random_arena
from helpers.processes import in_processes
from helpers.spread import mesh_of, parameter
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByRMS, functional
from tritonclip.engine.plan_cache import plans

SHAPES = ((40,), (), (0,), (3, 700), (1,))
MIXED = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", [*FLOATS, pytest.param(None, id="mixed")])


def make(device, dtype=None):
    forms = zip(SHAPES, MIXED if dtype is None else [dtype] * len(SHAPES), strict=True)
    return [normal(*form, device, seed) for seed, form in enumerate(forms)]


class FunctionalArena(Arena):
    """Clipped into new memory, from which the gradients are then written."""

    has_options = False
    policies: Sequence[str] = ("propagate",)

    def accepts(self, rule: Any) -> bool:
        if isinstance(rule, ClipByGlobalNorm) and rule.norm_type != 2:
            return False
        return super().accepts(rule) and not rule.per_unit and (rule.clamps or rule.eps == 0)

    def call(self, rule: Any, **options: Any) -> Any:
        measured: Any = None
        kind = type(rule)
        if rule.per_gradient:
            twins = parameters([grad.clone() for grad in self.grads])
            measured = tritonclip.clip_(twins, ClipByNorm(math.inf, rule.norm_type))
        with unchanged([self.memory]):
            if kind is ClipByGlobalNorm:
                made, measured = functional.clip_by_global_norm(self.grads, rule.max_norm)
                wide = any(grad.dtype.to_real() == torch.float64 for grad in self.grads)
                assert measured.dtype == (torch.float64 if wide else torch.float32)
                assert measured.device == self.memory.device
            elif kind is ClipByNorm:
                limit, p = rule.max_norm, rule.norm_type
                made = functional.clip_by_norm(self.grads, limit, norm_type=p)
            elif kind is ClipByRMS:
                made = functional.clip_by_rms(self.grads, rule.max_rms)
            else:
                made = functional.clip_by_value(self.grads, *bounds_of(rule))
            for one, grad in zip(made, self.grads, strict=True):
                assert (one.dtype, one.shape, one.device) == (grad.dtype, grad.shape, grad.device)
        ours = self.memory.untyped_storage().data_ptr()
        assert all(one.untyped_storage().data_ptr() != ours for one in made)
        for one, grad in zip(made, self.grads, strict=True):
            grad.copy_(one)
        return measured


# Kernels read runs of memory; what has gaps goes to the torch backend, which is said once.
@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@given(choice=CHOICES)
def test_functions_on_a_random_list_are_right(backend, choice: random.Random):
    clip_a_list(choice, random_arena(choice, backend.device, [FunctionalArena]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_rms_and_average_norm_are_norms_over_counts(device, dtype):
    tensors = make(device, dtype)
    norms = torch.tensor(reference.norms(tensors), dtype=torch.float64)
    for function, over in (
        (functional.clip_by_average_norm, lambda n: max(n, 1)),
        (functional.clip_by_rms, lambda n: math.sqrt(max(n, 1))),
    ):
        for x, norm, y in zip(tensors, norms, function(tensors, 0.25), strict=True):
            coefficient = min(1.0, 0.25 * over(x.numel()) / max(float(norm), 1e-300))
            # Of a coefficient in float32 from a norm that is right to 1e-6, and of the product.
            torch.testing.assert_close(
                y.double(), x.double() * coefficient, rtol=1.2e-6 + torch.finfo(dtype).eps, atol=0
            )


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [0, -1, (0, 2), [1, 2]], ids=str)
def test_clip_by_norm_over_dimensions_measures_each_slice(device, dtype, dim):
    x = normal((3, 4, 5), dtype, device)
    check_slices(x, 1.5, dim, rtol=1.2e-6 + torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dim", [0, (0, 2), 1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=str)
def test_clip_by_norm_over_dimensions_of_a_large_tensor(dtype, dim):
    """In pieces, the last of which is shorter."""
    check_slices(
        normal((61, 67, 71), dtype), 7.0, dim, rtol=1.3e-6 + torch.finfo(dtype).eps, atol=1e-5
    )


def check_slices(x, limit, dim, **tolerance):
    """By the formula, and some are clipped."""
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    norms = torch.linalg.vector_norm(wide, dim=dim, keepdim=True)
    assert int((norms > limit).sum()) > 0
    y = functional.clip_by_norm(x, limit, dim)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.to(wide.dtype), wide * (limit / norms).clamp(max=1.0), **tolerance)


def test_slices_within_the_limit_keep_their_bits(device):
    x = torch.tensor([[-3.0, 0.0, 0.1], [4.0, 0.0, 12.0]], device=device)
    assert_bits([functional.clip_by_norm(x, 13.0, dim=1)], [x])


def test_clip_by_norm_takes_a_limit_for_each_slice(device):
    x = torch.ones(3, 4, device=device)
    limits = torch.tensor([[1.0], [2.0], [4.0]], device=device)
    assert functional.clip_by_norm(x, limits, dim=1)[:, 0].tolist() == [0.5, 1.0, 1.0]


@DTYPES
def test_limits_on_the_device_give_the_bits_of_numbers(device, dtype):
    """Nothing is read back: on a GPU kernels scale copies of half types."""
    tensors, limit = make(device, dtype), torch.tensor(1.7, device=device)
    ours, norm = functional.clip_by_global_norm(tensors, limit)
    expected, known = functional.clip_by_global_norm(tensors, float(limit))
    assert_bits([*ours, norm], [*expected, known])


def test_norms_are_measured_by_the_chosen_backend(backend):
    # For its gaps, neither is served by the loops in one call, which needs no plan.
    x = normal((3, 222), device=backend.device)[:, ::2]
    for measure in (functional.global_norm, lambda x: functional.clip_by_norm(x, 1.0)):
        plans.clear()
        measure(x)
        assert plans._last is not None
        plan = plans._last[0]
        assert type(plan.groups[0].layout).__module__.endswith(backend.module)


def test_no_limit_clips_nothing_of_an_infinite_norm(device):
    x = torch.tensor([1.0, math.inf], device=device)
    assert functional.clip_by_norm(x, math.inf).tolist() == [1.0, math.inf]
    assert functional.clip_by_norm(x[None], math.inf, dim=1).tolist() == [[1.0, math.inf]]
    assert functional.clip_by_global_norm([x], math.inf)[0][0].tolist() == [1.0, math.inf]


def test_limit_and_norm_of_zero_give_zero(device):
    x = torch.zeros(3, device=device)
    for y in (
        functional.clip_by_norm(x, 0.0),
        functional.clip_by_norm(x, torch.zeros((), device=device)),
        functional.clip_by_norm(x[None], 0.0, dim=1)[0],
        functional.clip_by_global_norm([x], 0.0)[0][0],
        functional.clip_by_rms(x, 0.0),
        functional.clip_by_average_norm(x, 0.0),
    ):
        assert y.tolist() == [0.0, 0.0, 0.0]


def test_limits_of_counts_may_be_tensors(device):
    x = normal(100, device=device)
    # The product of limit and count would not fit the limit's dtype.
    half = torch.tensor(1000.0, dtype=torch.float16, device=device)
    large = torch.full((100,), 2e4, device=device)
    assert_norm(functional.global_norm(functional.clip_by_average_norm(large, half)), 1e5)
    for function in (functional.clip_by_rms, functional.clip_by_average_norm):
        tensors, small = [x, x[:7]], torch.tensor(0.01, device=device)
        for ours, expected in zip(function(tensors, small), function(tensors, 0.01), strict=True):
            torch.testing.assert_close(ours, expected, rtol=3e-7, atol=0)


def test_a_tensor_met_twice_counts_twice(device):
    x = torch.tensor([3.0, 4.0], device=device)
    clipped, norm = functional.clip_by_global_norm([x, x, x[:0], x], 1.0)
    assert_norm(norm, math.sqrt(75.0))
    assert_bits([clipped[0], clipped[1]], [clipped[3], clipped[3]])


def test_tensors_that_share_a_part_of_their_memory_count_both(device):
    x = torch.arange(5.0, device=device)
    assert_norm(functional.global_norm([x[:3], x[1:]]), math.sqrt(5.0 + 30.0))


def test_expanded_tensors_are_measured(device):
    x = torch.tensor([[3.0]], device=device).expand(4, 4)
    assert_norm(functional.global_norm([x]), 12.0)
    assert_norm(functional.global_norm([functional.clip_by_norm(x, 6.0)]), 6.0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_complex_norms_over_dimensions_are_those_of_moduli(device, norm_type):
    x = normal((3, 5), torch.complex64, device)
    ours = functional.clip_by_norm(x, 0.3, dim=1, norm_type=norm_type)
    rows = [functional.clip_by_norm(row, 0.3, norm_type=norm_type) for row in x]
    torch.testing.assert_close(ours, torch.stack(rows))


def test_known_norm_is_used_and_returned(device):
    x = torch.tensor([3.0, 4.0], device=device)
    for known in (10.0, torch.tensor([10.0], device=device)):
        (y,), norm = functional.clip_by_global_norm([x], 1.0, use_norm=known)
        torch.testing.assert_close(y, x / 10)
        assert norm.shape == ()
        assert float(norm) == 10.0


@pytest.mark.parametrize(("limit", "coefficient"), [(0.0, 0.0), (1e-44, 1.0), (1.0, 1.0)])
def test_known_norm_of_zero_clips_to_a_limit_of_zero_alone(device, limit, coefficient):
    x, known = torch.ones(3, device=device), torch.zeros((), device=device)
    (y,), _ = functional.clip_by_global_norm([x], torch.tensor(limit, device=device), known)
    assert_bits([y], [x * coefficient])


@in_processes(2)
def test_known_norm_may_be_that_of_distributed_tensors():
    known = tritonclip.get_total_norm([parameter((8, 3), mesh_of(-1), [Shard(0)]).grad])
    (clipped,), norm = functional.clip_by_global_norm([torch.ones(3)], 1.0, known)
    assert_norm(norm, float(known))
    torch.testing.assert_close(clipped, torch.ones(3) / float(known))


def test_without_tensors_the_norm_is_zero():
    trees: tuple[Any, ...] = ([], [None, None], {})
    for tree in trees:
        clipped, norm = functional.clip_by_global_norm(tree, 1.0)
        assert clipped == tree
        assert float(norm) == 0.0
    assert functional.clip_by_norm([], 1.0) == []


CALLS = {
    **FUNCTIONS,
    "rows": lambda tree, limit: functional.clip_by_norm(tree, limit, dim=1),
    "example": lambda tree, limit: functional.clip_per_example(by_example(tree), limit)[0],
    "example-zero": lambda tree, limit: functional.clip_per_example(
        by_example(tree), limit, nonfinite="zero"
    )[0],
}


def by_example(tree):
    return [x.reshape(5, -1) for x in tree]


def on_gpu(dtype=torch.float32):
    return [normal(shape, dtype, "cuda", seed) for seed, shape in enumerate(((40, 3), (5, 700)))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_do_not_wait_for_the_device(cuda_backend, name, dtype):
    tree = on_gpu(dtype)
    # Compiles kernels, and makes a plan.
    CALLS[name](tree, 0.5)
    with no_sync():
        CALLS[name](tree, 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_do_not_wait_for_the_device(cuda_backend, name):
    tree = [x.requires_grad_() for x in on_gpu()]
    sum(y.sum() for y in CALLS[name](tree, 0.5)).backward()
    with no_sync():
        sum(y.sum() for y in CALLS[name](tree, 0.5)).backward()


@pytest.mark.gpu
def test_limits_on_the_device_are_not_waited_for(cuda_backend):
    tree, limit = on_gpu(torch.bfloat16), torch.tensor(0.5, device="cuda")
    functional.clip_by_global_norm(tree, limit)
    with no_sync():
        functional.clip_by_global_norm(tree, limit)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside the CPU")
def test_tensors_on_several_devices_have_one_norm():
    tensors = [*on_gpu(torch.float16), normal(90, torch.float32), normal(7, torch.float64)]
    clipped, norm = functional.clip_by_global_norm(tensors, 0.5)
    assert norm.device.type == "cuda"
    # Norms of narrower tensors are right to 1e-6, also in float64.
    assert_norm(norm.float(), reference.total_norm(tensors))
    by = reference.coefficient(norm, 0.5, eps=0.0)
    assert_bits(clipped, [reference.scaled(x, by) for x in tensors])
    assert [y.device for y in clipped] == [x.device for x in tensors]


NAN, INF, T = math.nan, math.inf, torch.tensor
# What NaN, inf, -inf and a few numbers become.
AT_BOUNDS: dict[str, tuple[Tensor, Any, Any, list[float]]] = {
    "no upper one": (T([-2.0, 0.5, 2.0, 9.0]), 1.0, None, [1.0, 1.0, 2.0, 9.0]),
    "no lower one": (T([-2.0, 0.5, 2.0, 9.0]), None, 1.0, [-2.0, 0.5, 1.0, 1.0]),
    "numbers": (T([NAN, INF, -INF]), -4.0, 4.0, [NAN, 4.0, -4.0]),
    "a tensor": (T([NAN, INF, -INF]), T(-4.0), 4.0, [NAN, 4.0, -4.0]),
    "that cross": (T([0.0, 2.0]), T([1.0, 3.0]), T([-1.0, 0.0]), [-1.0, 0.0]),
    "beyond the dtype": (T([INF, 1.0]).half(), None, 1e6, [65504.0, 1.0]),
    "below all": (torch.ones(2).half(), None, -INF, [-INF, -INF]),
    "above all": (torch.ones(2).half(), INF, None, [INF, INF]),
    "above all integers": (T([3], dtype=torch.uint8), INF, None, [255]),
    "infinite": (T([INF, -INF]), -INF, INF, [INF, -INF]),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("x", "low", "high", "expected"), AT_BOUNDS.values(), ids=AT_BOUNDS)
def test_values_at_bounds(x, low, high, expected, requires_grad):
    given = x.clone().requires_grad_(requires_grad and x.is_floating_point())
    y = functional.clip_by_value(given, min=low, max=high)
    assert_bits([y], [T(expected, dtype=x.dtype)])
    assert y.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_bounds_broadcast(requires_grad):
    x = normal((2, 3)).requires_grad_(requires_grad)
    low, high = torch.tensor([[-0.1], [-0.2]]), torch.tensor([0.1, 0.2, 0.3])
    expected = torch.minimum(torch.maximum(x, low), high)
    assert_bits([functional.clip_by_value(x, low, high)], [expected])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8], ids=str)
def test_integers_are_clamped_within_their_range(dtype):
    x = torch.tensor([1, 2, 3, 4, 5, 6], dtype=dtype)
    y = functional.clip_by_value(x, 2, 1e30)
    assert y.tolist() == [2, 2, 3, 4, 5, 6]
    assert y.dtype == dtype


def test_integer_bounds_are_exact_and_stay_in_range():
    large = 2**60 + 1
    assert functional.clip_by_value(torch.tensor([2**62]), max=large).tolist() == [large]
    x = torch.tensor([1, 200], dtype=torch.uint8)
    y = functional.clip_by_value(x, torch.tensor(-5), torch.tensor([300, 100]))
    assert y.tolist() == [1, 100]


BOUNDED_DTYPES = [torch.float16, torch.float32, torch.float64, torch.bfloat16]
BOUNDED_DTYPES += [torch.int16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", BOUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("tensors", ["neither", "min", "max", "both"])
def test_bounds_may_be_numbers_and_tensors_in_every_dtype(dtype, tensors):
    x = torch.arange(1, 7, dtype=dtype).reshape(2, 3)
    low = torch.tensor([[2, 2, 2], [3, 3, 3]], dtype=dtype)
    high = torch.full((2, 3), 5, dtype=dtype)
    bounds: Any = {"neither": (2, 5), "min": (low, 5), "max": (2, high), "both": (low, high)}
    y = functional.clip_by_value(x, *bounds[tensors])
    assert y.dtype == dtype
    assert y.tolist() == [[2, 2, 3], [4, 5, 5]]


def test_an_empty_tensor_stays_empty():
    empty, least = torch.zeros(7, 0), torch.tensor(1.0)
    for low, high in ((empty, empty), (1.0, 1.0), (empty, least), (least, empty)):
        assert functional.clip_by_value(empty, low, high).shape == (7, 0)


def test_a_hook_bounds_the_gradient_of_an_activation():
    """It clips what flows on into the layers below, as Paddle's ErrorClipByValue."""
    x = torch.tensor([1.0, -2.0, 0.1], requires_grad=True)
    hidden = x * 2
    hidden.register_hook(lambda gradient: functional.clip_by_value(gradient, -0.5, 0.5))
    (hidden * torch.tensor([3.0, -3.0, 0.25])).sum().backward()
    assert grad_of(x).tolist() == [1.0, -1.0, 0.5]
