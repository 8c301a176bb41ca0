"""On a GPU: nothing waits for the device, a graph captures the calls, and devices mix."""

from __future__ import annotations

import pytest
import torch

from helpers import reference
from helpers.cases import FLOATS, assert_bits, assert_norm, no_sync, normal
from tritonclip import functional

CALLS = {
    "value": lambda tree: functional.clip_by_value(tree, -0.1, 0.2),
    "norm": lambda tree: functional.clip_by_norm(tree, 0.5),
    "rows": lambda tree: functional.clip_by_norm(tree, 0.5, dim=1),
    "average": lambda tree: functional.clip_by_average_norm(tree, 0.01),
    "rms": lambda tree: functional.clip_by_rms(tree, 0.1),
    "global": lambda tree: functional.clip_by_global_norm(tree, 0.5)[0],
    "example": lambda tree: functional.clip_per_example(by_example(tree), 0.5)[0],
    "example-zero": lambda tree: functional.clip_per_example(
        by_example(tree), 0.5, nonfinite="zero"
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
    CALLS[name](tree)
    with no_sync():
        CALLS[name](tree)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_do_not_wait_for_the_device(cuda_backend, name):
    tree = [x.requires_grad_() for x in on_gpu()]
    sum(y.sum() for y in CALLS[name](tree)).backward()
    with no_sync():
        sum(y.sum() for y in CALLS[name](tree)).backward()


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
