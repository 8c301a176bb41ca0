"""Parameter groups with gradients and rules under a wrapped SGD, and their truth."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD

from helpers import reference
from helpers.cases import grad_of, normal, parameter
from tritonclip import ClippedOptimizer

ABSENT = object()


def grouped(groups, clips, rule: Any = 1.0, **options):
    """A wrapped SGD, one group a list of gradients; the rules of groups, ABSENT for no key."""
    dicts: list[dict[str, Any]] = []
    for grads, clip in zip(groups, clips, strict=True):
        dicts.append({"params": [parameter(grad.clone()) for grad in grads]})
        if clip is not ABSENT:
            dicts[-1]["clip"] = clip
    return ClippedOptimizer(SGD(dicts, lr=1.0), rule, **options)


def grads_of(optimizer, number=None):
    groups = optimizer.param_groups if number is None else [optimizer.param_groups[number]]
    return [grad_of(p) for group in groups for p in group["params"]]


def values_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def clipped(grads, max_norm, eps=1e-6):
    """What one norm over these gradients makes of them: the formula, by the reference."""
    wide = any(grad.dtype == torch.float64 for grad in grads)
    total = torch.tensor(reference.total_norm(grads)).to(torch.float64 if wide else torch.float32)
    coefficient = reference.coefficient(total, max_norm, eps)
    return [reference.scaled(grad, coefficient) for grad in grads]


def assert_close(actual, expected):
    """Equal but for a norm that is right to 1e-6, and a rounding that may turn the other way."""
    for ours, truth in zip(actual, expected, strict=True):
        rtol = 2e-6 + (torch.finfo(truth.dtype).eps if truth.dtype.itemsize == 2 else 0)
        torch.testing.assert_close(ours.detach().cpu(), truth, rtol=rtol, atol=0)


def three_groups(device="cpu"):
    return [
        [normal(5000, device=device, seed=1), normal((3, 7), device=device, seed=2)],
        [normal(70, device=device, seed=3)],
        [normal((2, 9), device=device, seed=4)],
    ]
