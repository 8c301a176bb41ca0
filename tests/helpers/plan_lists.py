"""Lists of gradients of many forms, and the plans that they get."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.cases import normal
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan_cache import PlanCache

SIZES = (5, 1, 24)


def contiguous() -> list[Tensor]:
    return [normal(n) for n in SIZES]


def mixed() -> list[Tensor]:
    return [normal(3), normal(4, dtype=torch.bfloat16), normal(3), normal(2, dtype=torch.float64)]


def channels_last() -> list[Tensor]:
    dense = normal(96).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return [normal(3), dense, normal(4, dtype=torch.float64), normal(15).view(3, 5).t()]


def negated() -> list[Tensor]:
    return [torch._neg_view(normal(3)), normal(3)]


def gaps() -> list[Tensor]:
    return [normal(6)[::2], normal(3)]


def complex_pairs() -> list[Tensor]:
    return [normal(3, dtype=torch.complex64), normal(3), normal(4, dtype=torch.complex64).conj()]


def partly_inference() -> list[Tensor]:
    with torch.inference_mode():
        last = normal(4)
    return [normal(3), normal(5), last]


LISTS = [
    pytest.param(make, id=make.__name__)
    for make in (contiguous, mixed, channels_last, negated, gaps, complex_pairs, partly_inference)
]


def planned(grads: list[Tensor], plans: PlanCache) -> Gradients:
    return Gradients(list(grads), grads[0].device, "tensors[{}]".format, cache=plans)


def described(gradients: Gradients) -> list[tuple[object, ...]]:
    assert gradients.plan is not None
    result: list[tuple[object, ...]] = []
    for group in gradients.plan.groups:
        tensors, addresses = gradients.of_group(group.indices)
        indices = range(len(tensors)) if group.indices is None else group.indices
        # Each call makes its own copies of staged gradients.
        read = [
            (0 if i in gradients.copies else t.data_ptr(), t.shape, t.stride(), t.is_neg(), t.dtype)
            for i, t in zip(indices, tensors, strict=True)
        ]
        assert addresses is None or addresses == [t.data_ptr() for t in tensors]
        result.append((read, group.device, group.dtype, group.pairs))
    return result
