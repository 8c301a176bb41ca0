"""Training under a wrapper: parameters, gradients, the wrapped optimizers and their state."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import tritonclip
from helpers.cases import assert_bits, copies, grad_of, normal
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer

Make = Callable[[Any], Optimizer]

SHAPES = ((3,), (4, 5), ())
POLICIES = ["propagate", "error", "zero", "skip"]
SCALERS = [
    pytest.param(torch.amp.GradScaler, id="torch"),
    pytest.param(tritonclip.GradScaler, id="tritonclip"),
]
MODES: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Inner:
    """A function from parameters to an optimizer."""

    kind: Callable[..., Optimizer]
    options: dict[str, Any]
    # Whether the device decides if a step is taken; see tests/optim/conftest.py.
    on_device: bool = False

    def __call__(self, params: Any) -> Optimizer:
        return self.kind(params, **self.options)


def _inner(kind: Callable[..., Optimizer], options: dict[str, Any], name: str, mode: str) -> Any:
    if mode == "deferred":
        return pytest.param(Inner(kind, {**options, "fused": True}, True), id=f"{name}-{mode}")
    return pytest.param(Inner(kind, {**options, **MODES[mode]}), id=f"{name}-{mode}")


# In every mode that an optimizer has; two of them also as on an accelerator.
INNERS = [
    _inner(kind, {"lr": 0.1, **options}, name, mode)
    for name, kind, options, modes in (
        ("SGD", SGD, {}, MODES),
        ("momentum", SGD, {"momentum": 0.9}, (*MODES, "deferred")),
        ("Adam", Adam, {}, MODES),
        ("amsgrad", AdamW, {"amsgrad": True}, MODES),
        ("AdamW", AdamW, {}, (*MODES, "deferred")),
        ("Adagrad", Adagrad, {}, MODES),
        ("RMSprop", RMSprop, {"momentum": 0.9}, ("plain", "foreach")),
        ("NAdam", NAdam, {}, ("plain", "foreach")),
    )
    for mode in modes
]
PLAIN_AND_FUSED = [
    inner for inner in INNERS if inner.id in ("AdamW-plain", "AdamW-fused", "AdamW-deferred")
]
RULES = [
    pytest.param(ClipByGlobalNorm(1.0), id="global"),
    pytest.param(ClipByNorm(0.5), id="by-norm"),
    pytest.param(ClipByValue(-0.2, 0.3), id="by-value"),
]
NORM_TYPES = (math.inf, 1.0, 2.0)
RULES_OF_EVERY_TYPE = [
    *(pytest.param(ClipByGlobalNorm(1.0, p), id=f"global p={p}") for p in NORM_TYPES),
    *(pytest.param(ClipByNorm(1.0, p), id=f"each p={p}") for p in NORM_TYPES),
    pytest.param(ClipByValue(0.5), id="value"),
]


def sgd(params: Any) -> SGD:
    """An optimizer to which the length of a gradient matters."""
    return SGD(params, lr=0.1)


def new_params(
    shapes: Iterable[Sequence[int]] = SHAPES,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Parameters that start at the same values every time."""
    return [
        torch.nn.Parameter(normal(shape, dtype, device, seed=100 + at))
        for at, shape in enumerate(shapes)
    ]


def wrapped(
    make: Make, rule: Any = 1.0, device: torch.device | str = "cpu", **options: Any
) -> tuple[list[Tensor], ClippedOptimizer]:
    """New parameters, and an optimizer of theirs that clips."""
    params = new_params(device=device)
    return params, ClippedOptimizer(make(params), rule, **options)


def give_grads(
    params: Iterable[Tensor], seed: int = 0, *, size: float = 1.0, bad: Any = None, at: int = 1
) -> list[Tensor]:
    """Sets new gradients and returns copies; with `bad`, one element of the one `at` is that."""
    for place, param in enumerate(params):
        grad = size * normal(param.shape, param.dtype, seed=10 * seed + place)
        if bad is not None and place == at:
            grad.view(-1)[-1] = bad
        param.grad = grad.to(param.device)
    return grads_of(params)


def step_on(
    params: Iterable[Tensor], optimizer: Optimizer, seed: int = 0, **options: Any
) -> list[Tensor]:
    """Takes a step on new gradients, and returns copies of what they were."""
    grads = give_grads(params, seed, **options)
    optimizer.step()
    return grads


def closure_of(params: list[Tensor], optimizer: ClippedOptimizer, factors: list[float]) -> Any:
    """Its gradients are those of a distance, times each factor in turn."""
    left = iter(factors)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([((param - 1) ** 2).sum() for param in params]).sum()
        (loss * next(left)).backward()
        return loss

    return closure


@contextmanager
def unchanged(
    params: Sequence[Tensor], optimizer: Optimizer | None = None, *, grads: bool = False
) -> Iterator[None]:
    """Parameters, the state of an optimizer that has begun, and, if asked, gradients stay."""

    def values() -> list[Tensor]:
        state = [] if optimizer is None else state_of(optimizer, params)
        return [*copies(params), *state, *(grads_of(params) if grads else ())]

    before = values()
    try:
        yield
    finally:
        assert_bits(values(), before)


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Copies of the gradients."""
    return copies(grad_of(param) for param in params)


def count_readings(monkeypatch: pytest.MonkeyPatch, verbs: type[Any]) -> list[object]:
    """The batches that were measured from now on, once for each time."""
    readings: list[object] = []
    real = verbs.norm

    def counted(batch: Any, *arguments: Any, **options: Any) -> Any:
        readings.append(batch)
        return real(batch, *arguments, **options)

    monkeypatch.setattr(verbs, "norm", counted)
    return readings


def state_of(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """Copies of all of the optimizer's state, step counts included."""
    values = [value for param in params for value in optimizer.state.get(param, {}).values()]
    return copies(value for value in values if isinstance(value, Tensor))
