"""A training step as users compile it: clipping and the update in one graph, five steps long.

Forward and backward run outside of the graph, which is called again and again on gradients that
were set to zero or made anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tritonclip
from helpers.cases import assert_bits, copies, grad_of, normal
from helpers.graphs import COMPILING
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, FlatGradients

pytestmark = COMPILING

STEPS = 5
RULES = pytest.mark.parametrize(
    "rule",
    [
        pytest.param(ClipByGlobalNorm(0.5), id="global"),
        pytest.param(ClipByNorm(0.2), id="by-norm"),
        pytest.param(ClipByValue(-0.05, 0.1), id="by-value"),
    ],
)


def by_hand(params: list[Tensor], momenta: list[Tensor]) -> None:
    """SGD with momentum, one parameter at a time."""
    for param, momentum in zip(params, momenta, strict=True):
        momentum.mul_(0.9).add_(grad_of(param))
        param.sub_(momentum, alpha=0.1)


def foreach(params: list[Tensor], momenta: list[Tensor]) -> None:
    """SGD with momentum, all parameters at once."""
    torch._foreach_mul_(momenta, 0.9)
    torch._foreach_add_(momenta, [grad_of(p) for p in params])
    torch._foreach_add_(params, momenta, alpha=-0.1)


UPDATES = pytest.mark.parametrize("update", [by_hand, foreach])
TARGETS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "parameters": lambda model: list(model.parameters()),
    "named": lambda model: list(model.named_parameters()),
    "flat": FlatGradients,
}


class Training:
    """A small model, and one step of clipping and update that may be compiled."""

    def __init__(
        self, device: torch.device, rule: Any, target: str, update: Any, **options: Any
    ) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.params = list(self.model.parameters())
        self.momenta = [torch.zeros_like(param) for param in self.params]
        self.target = TARGETS[target](self.model)
        self.device = device
        self.counter = CompileCounterWithBackend("aot_eager")

        @torch.no_grad()
        def step(grad_scale: Tensor | None = None) -> Any:
            measured = tritonclip.clip_(self.target, rule, grad_scale=grad_scale, **options)
            update(self.params, self.momenta)
            return measured

        self.step: Any = step

    def compiled(self) -> Training:
        self.step = torch.compile(self.step, backend=self.counter, fullgraph=True)
        return self

    def backward(self, turn: int, factor: float = 1.0) -> None:
        # Some steps are far beyond every limit, some within.
        batch = normal((4, 6), device=self.device, seed=turn) * (1e-3 if turn == 2 else 2.0)
        (self.model(batch).square().sum() * factor).backward()

    def zero_grad(self, *, set_to_none: bool) -> None:
        torch.optim.SGD(self.params).zero_grad(set_to_none)

    def run(self, *, set_to_none: bool = False) -> list[Tensor]:
        """All that was measured."""
        measured = []
        for turn in range(STEPS):
            self.backward(turn)
            result = self.step()
            measured.append(torch.zeros(()) if result is None else result)
            self.zero_grad(set_to_none=set_to_none)
        return measured


def assert_equal(ours: Training, eager: Training) -> None:
    """The clip is the same code; what torch makes of the update may round elsewhere."""
    torch.testing.assert_close(ours.params, eager.params, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.momenta, eager.momenta, rtol=1e-6, atol=1e-7)


@pytest.mark.covering(1)
@RULES
@UPDATES
@pytest.mark.parametrize("target", TARGETS)
def test_compiled_step_equals_eager(device, rule, update, target):
    """In one graph, which is compiled once."""
    ours = Training(device, rule, target, update).compiled()
    eager = Training(device, rule, target, update)
    torch.testing.assert_close(ours.run(), eager.run(), rtol=1e-6, atol=1e-7)
    assert_equal(ours, eager)
    assert ours.counter.frame_count == 1


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize("target", ["parameters", "named"])
def test_compiled_step_takes_gradients_made_anew(device, rule, target):
    """After `zero_grad(set_to_none=True)`, the default, `backward` makes new gradients."""
    ours = Training(device, rule, target, by_hand).compiled()
    eager = Training(device, rule, target, by_hand)
    measured, expected = (one.run(set_to_none=True) for one in (ours, eager))
    torch.testing.assert_close(measured, expected, rtol=1e-6, atol=1e-7)
    assert_equal(ours, eager)
    assert ours.counter.frame_count == 1


@pytest.mark.covering(1)
@RULES
def test_compiled_step_leaves_out_gradients_that_are_none(device, rule):
    """Which gradients there are is part of the graph: another set is compiled once more."""

    def update(params: list[Tensor], momenta: list[Tensor]) -> None:
        for param in params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)

    ours = Training(device, rule, "parameters", update).compiled()
    eager = Training(device, rule, "parameters", update)
    for turn in range(4):
        results = []
        for one in (ours, eager):
            one.backward(turn)
            if turn % 2:
                one.params[1].grad = None
            results.append(one.step())
            one.zero_grad(set_to_none=True)
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    assert_equal(ours, eager)
    assert ours.counter.frame_count == 2


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize("target", TARGETS)
def test_compiled_step_divides_by_the_scale_of_each_step(device, rule, target):
    """A loss scale in a tensor changes without another compilation."""
    ours = Training(device, rule, target, foreach).compiled()
    eager = Training(device, rule, target, foreach)
    for turn in range(STEPS):
        scale = 2.0 ** (3 + turn)
        results = []
        for one in (ours, eager):
            one.backward(turn, factor=scale)
            results.append(one.step(torch.tensor(scale, device=device)))
            one.zero_grad(set_to_none=False)
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    assert_equal(ours, eager)
    assert ours.counter.frame_count == 1


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_compiled_step_meets_a_gradient_of_nan_as_eager_does(device, rule, target, nonfinite):
    """In the same graph as the steps before and after it."""
    ours = Training(device, rule, target, by_hand, nonfinite=nonfinite).compiled()
    eager = Training(device, rule, target, by_hand, nonfinite=nonfinite)
    for factor in (1.0, math.nan, 1.0):
        results = []
        for one in (ours, eager):
            one.backward(0)
            grad_of(one.params[1]).mul_(factor)
            results.append(one.step())
            one.zero_grad(set_to_none=False)
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7, equal_nan=True)
    for mine, theirs in ((ours.params, eager.params), (ours.momenta, eager.momenta)):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert ours.params[1].isfinite().all() == (nonfinite == "zero")
    assert ours.counter.frame_count == 1


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize("target", TARGETS)
def test_compiled_step_that_raises_has_updated_nothing(device, rule, target):
    """The update stands behind the clip in the graph; the next finite step is as any other."""
    ours = Training(device, rule, target, by_hand, nonfinite="error").compiled()
    ours.backward(0)
    ours.step()
    ours.zero_grad(set_to_none=False)
    ours.backward(1)
    grad_of(ours.params[1])[0] = math.nan
    tensors = [*ours.params, *ours.momenta, *(grad_of(p) for p in ours.params)]
    before = copies(tensors)
    blamed = "0.bias" if target != "parameters" else r"gradients\[1\]"
    with pytest.raises(RuntimeError, match=blamed):
        ours.step()
    assert_bits(tensors, before)
    ours.zero_grad(set_to_none=False)
    ours.backward(1)
    ours.step()
    now = copies(ours.params)
    assert not any(torch.equal(*pair) for pair in zip(now, before[: len(now)], strict=True))
    assert ours.counter.frame_count == 1
