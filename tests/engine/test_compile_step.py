"""A training step as users compile it: clipping and the update in one graph, five steps long.

Forward and backward run outside of the graph, which is called again and again on gradients that
were set to zero or made anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tritonclip
from helpers.cases import copies, grad_of, normal, unchanged
from helpers.graphs import COMPILING
from tritonclip import ClipByGlobalNorm, ClipByValue

pytestmark = COMPILING

STEPS = 5
RULES = pytest.mark.parametrize(
    "rule",
    [
        pytest.param(ClipByGlobalNorm(0.5), id="global"),
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
        def step() -> Any:
            measured = tritonclip.clip_(self.target, rule, **options)
            update(self.params, self.momenta)
            return measured

        self.step: Any = step

    def compiled(self) -> Training:
        self.step = torch.compile(self.step, backend=self.counter, fullgraph=True)
        return self

    def backward(self, turn: int) -> None:
        # Some steps are far beyond every limit, some within.
        batch = normal((4, 6), device=self.device, seed=turn) * (1e-3 if turn == 2 else 2.0)
        self.model(batch).square().sum().backward()

    def zero_grad(self, *, set_to_none: bool) -> None:
        torch.optim.SGD(self.params).zero_grad(set_to_none)


def run_both(
    both: Iterable[Training],
    prepare: Callable[[Training, int], Any] = Training.backward,
    n: int = STEPS,
    *,
    graphs: int = 1,
    set_to_none: bool = False,
    nan: bool = False,
) -> None:
    """Steps have equal results, in so many graphs.

    The clip is the same code; what torch makes of the update may round elsewhere.
    """
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7, equal_nan=nan)
    ours, eager = both
    ours.compiled()
    for turn in range(n):
        results = []
        for one in (ours, eager):
            prepare(one, turn)
            results.append(one.step())
            one.zero_grad(set_to_none=set_to_none)
        close(*results)
    close(ours.params, eager.params)
    close(ours.momenta, eager.momenta)
    assert ours.counter.frame_count == graphs


@pytest.mark.covering(1)
@RULES
@UPDATES
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("set_to_none", [False, True], ids=["set to zero", "made anew"])
def test_compiled_step_equals_eager(device, rule, update, target, set_to_none):
    """In one graph, which is compiled once."""
    both = (Training(device, rule, target, update) for _ in range(2))
    run_both(both, set_to_none=set_to_none)


@pytest.mark.covering(1)
@RULES
def test_compiled_step_leaves_out_gradients_that_are_none(device, rule):
    """Which gradients there are is part of the graph: another set is compiled once more."""

    def update(params: list[Tensor], momenta: list[Tensor]) -> None:
        for param in params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)

    def prepare(one: Training, turn: int) -> None:
        one.backward(turn)
        if turn % 2:
            one.params[1].grad = None

    both = (Training(device, rule, "parameters", update) for _ in range(2))
    run_both(both, prepare, 4, graphs=2, set_to_none=True)


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_compiled_step_meets_a_gradient_of_nan_as_eager_does(device, rule, target, nonfinite):
    """In the same graph as the steps before and after it."""

    def prepare(one: Training, turn: int) -> None:
        one.backward(0)
        grad_of(one.params[1]).mul_((1.0, math.nan, 1.0)[turn])

    both = [Training(device, rule, target, by_hand, nonfinite=nonfinite) for _ in range(2)]
    run_both(both, prepare, 3, nan=True)
    assert both[0].params[1].isfinite().all() == (nonfinite == "zero")


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
    blamed = "0.bias" if target != "parameters" else r"parameters\[1\]"
    tensors = [*ours.params, *ours.momenta, *map(grad_of, ours.params)]
    with unchanged(tensors), pytest.raises(RuntimeError, match=blamed):
        ours.step()
    before = copies(ours.params)
    ours.zero_grad(set_to_none=False)
    ours.backward(1)
    ours.step()
    assert not any(map(torch.equal, copies(ours.params), before))
    assert ours.counter.frame_count == 1
