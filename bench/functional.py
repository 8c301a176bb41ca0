"""`python -m bench functional`: clipping out of place, beside the idioms of PyTorch and others.

Every provider returns new gradients and leaves the given ones. Nothing of torch.nn.utils clips out
of place: the baselines are what a user of PyTorch writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.accuracy import OURS, Gradients
from bench.baselines import Entry, Provider
from bench.frameworks import needs, optax, tensorflow
from bench.speed import CLIPS, Task
from tritonclip import functional

# What a provider measured: one norm, one for each gradient, or none.
Clipped = tuple[list[Tensor], Tensor | None]
CAPTION = "ratio: the best PyTorch idiom's time over this one's, median of paired samples"
PLAN = [
    *(Task(name, "float32", CLIPS) for name in ("small_1", "small_10", "small_100", "resnet20")),
    *(Task(name, "float32", CLIPS) for name in ("resnet50", "gpt2_124m", "tiny_10000", "odd")),
    *(Task(name, "bfloat16", CLIPS) for name in ("small_10", "resnet50", "gpt2_124m")),
]


class OutOfPlace(Entry):
    """An entry whose call returns new gradients, and what it measured."""

    def refill(self) -> None:
        """Nothing to do: no call writes to its gradients."""

    def grads(self, output: Any) -> list[Tensor]:
        """The new gradients."""
        return list(output[0])


def _entry(gradients: Gradients, call: Callable[[], Clipped]) -> Entry:
    def norms(output: Clipped) -> list[float]:
        measured = output[1]
        return [] if measured is None else measured.double().reshape(-1).tolist()

    return OutOfPlace(gradients, call, norms)


def _ours(gradients: Gradients, rule: str, limit: float) -> Entry:
    grads = gradients.grads
    calls: dict[str, Callable[[], Clipped]] = {
        "norm": lambda: functional.clip_by_global_norm(grads, limit),
        "value": lambda: (functional.clip_by_value(grads, -limit, limit), None),
        "gradient": lambda: (functional.clip_by_norm(grads, limit), None),
    }
    return _entry(gradients, calls[rule])


def _foreach(gradients: Gradients, rule: str, limit: float) -> Entry:
    """As someone writes it who knows torch's foreach functions."""
    grads = gradients.grads

    def by_norm() -> Clipped:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return list(torch._foreach_mul(grads, (limit / norm).clamp(max=1.0))), norm

    def by_value() -> Clipped:
        return list(torch._foreach_clamp_max(torch._foreach_clamp_min(grads, -limit), limit)), None

    def each() -> Clipped:
        norms = torch.stack(torch._foreach_norm(grads))
        factors = (limit / norms).clamp_(max=1.0)
        return list(torch._foreach_mul(grads, list(factors.unbind()))), norms

    return _entry(gradients, {"norm": by_norm, "value": by_value, "gradient": each}[rule])


def _loop(gradients: Gradients, rule: str, limit: float) -> Entry:
    """As someone writes it first: an expression for each gradient."""
    grads = gradients.grads

    def by_norm() -> Clipped:
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        coefficient = (limit / norm).clamp(max=1.0)
        return [grad * coefficient for grad in grads], norm

    def by_value() -> Clipped:
        return [grad.clamp(-limit, limit) for grad in grads], None

    def each() -> Clipped:
        return [grad * (limit / grad.norm()).clamp(max=1.0) for grad in grads], None

    return _entry(gradients, {"norm": by_norm, "value": by_value, "gradient": each}[rule])


# Measured, then read and written; clamping looks at nothing first.
PASSES: dict[str, int | None] = {"norm": 3, "value": 2, "gradient": 3}

PROVIDERS = (
    Provider("tritonclip", _ours, PASSES, tolerance=OURS, eps=0.0),
    Provider("torch foreach", _foreach, {**PASSES, "value": 4}, baseline=True, eps=0.0),
    Provider("torch loop", _loop, PASSES, baseline=True, eps=0.0),
    Provider(
        "tensorflow",
        tensorflow,
        {**PASSES, "value": 4},
        eps=0.0,
        absent=needs("tensorflow", mixed=False),
    ),
    Provider(
        "optax",
        partial(optax, donate=False),
        {"norm": 3, "value": 2},
        compiles=True,
        eps=0.0,
        absent=needs("jax", "optax", devices=("cpu", "cuda")),
    ),
)
