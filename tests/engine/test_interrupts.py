"""A call that is interrupted anywhere, and the calls that follow.

An interrupt in the middle of writing leaves some gradients clipped and others not, and within a
large one, or by value, some elements. Nothing else is left of the call: later ones are right.
"""

import sys
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import INTERPRETED, assert_bits, copies, each_rule, grad_of, normal, parameters
from helpers.interrupts import InterruptAtBytecode, InterruptAtCall
from helpers.serving import forget_plans
from tritonclip import ClipByOwnHistory, ClipByUnitNorm, ClippedOptimizer, ClipState

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="an interrupt leaves functions replaced in the interpreter of Triton"
)

RULES = [*each_rule(0.5, 0.3), pytest.param(ClipByUnitNorm(0.01), id="by-unit")]
SINGLE, HALF, DOUBLE = torch.float32, torch.float16, torch.float64
LISTS = {
    "packed": [((3,), SINGLE), ((4, 5), SINGLE), ((7,), SINGLE)],
    "large": [((70, 90), SINGLE), ((7,), SINGLE)],
    "mixed": [((7,), SINGLE), ((20,), HALF), ((9,), DOUBLE), ((3, 2), HALF)],
    "halves": [((20,), HALF), ((3, 2), HALF)],
}


class Arguments:
    """Parameters whose gradients are written anew before each call.

    Args:
        name: of a list.
        rule: to clip by.
        grad_scale: the loss scale that gradients carry.
        device: of the gradients.
    """

    def __init__(self, name: str, rule: Any, grad_scale: float = 1.0, device: Any = "cpu") -> None:
        forms = enumerate(LISTS[name])
        made = [normal(shape, dtype, device, seed=at) for at, (shape, dtype) in forms]
        self.params, self.rule, self.grad_scale = parameters(made), rule, grad_scale
        self.grads = [grad_of(param) for param in self.params]

    def fill(self, seed: int) -> list[Tensor]:
        """Writes the values of a seed; returns copies."""
        for at, grad in enumerate(self.grads):
            values = normal(grad.shape, torch.float64, grad.device, seed=100 * seed + at)
            grad.copy_(values if grad.dtype == HALF else values * self.grad_scale)
        return copies(self.grads)

    def clip(self) -> Any:
        scale = None if self.grad_scale == 1 else self.grad_scale
        return tritonclip.clip_(self.params, self.rule, grad_scale=scale)

    def assert_clips(self, seed: int, expected: tuple[Any, list[Tensor]]) -> None:
        self.fill(seed)
        norm, clipped = self.clip(), copies(self.grads)
        assert_bits(clipped, expected[1])
        assert norm is None or torch.equal(norm, expected[0])

    def result(self, seed: int) -> tuple[Any, list[Tensor]]:
        """What an undisturbed call gives for the values of a seed."""
        self.fill(seed)
        return self.clip(), copies(self.grads)


def ends(interrupt: Any, call: Any) -> bool:
    """Whether a call comes to its end."""
    with suppress(KeyboardInterrupt), interrupt:
        call()
        return True
    return False


def assert_between(grad: Tensor, before: Tensor, after: Tensor) -> None:
    """Each element is that of before or of after the call."""
    now = grad.cpu()
    same = (now == before) | (now == after)
    assert bool(same.all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LISTS)
def test_clip_interrupted_anywhere_leaves_no_trace(device, name, rule, known):
    forget_plans()
    ours = Arguments(name, rule, device=device)
    after = ours.result(1)[1]
    others = ours.result(2)
    before = ours.fill(1)
    # A list that is new takes many steps, most of them in loops over gradients.
    stride = 7 if known else 61
    n, ended = 1, False
    while not ended:
        ours.fill(1)
        if not known:
            forget_plans()
        ended = ends(InterruptAtBytecode(n, "/tritonclip/"), ours.clip)
        torch.set_grad_enabled(True)
        for grad, old, new in zip(ours.grads, before, after, strict=True):
            assert_between(grad, old, new)
        ours.assert_clips(2, others)
        n += stride
    assert n > 500


def test_clip_interrupted_anywhere_leaves_a_state_of_before_or_after():
    ours = Arguments("packed", ClipByOwnHistory(warmup=1))

    def clip(state: ClipState, seed: int) -> None:
        ours.fill(seed)
        tritonclip.clip_(ours.params, ours.rule, state=state)

    state = ClipState()
    clip(state, 2)
    before = state.state_dict()["values"]
    clip(state, 1)
    after = state.state_dict()["values"]
    assert before != after
    n, ended = 1, False
    while not ended:
        state = ClipState()
        # Not a state that was loaded, whose next call converts it.
        clip(state, 2)
        ours.fill(1)
        call = partial(tritonclip.clip_, ours.params, ours.rule, state=state)
        ended = ends(InterruptAtBytecode(n, "/tritonclip/"), call)
        assert state.state_dict()["values"] in (before, after)
        n += 7


class Still(torch.optim.Optimizer):
    """Updates nothing, and so turns nothing on or off."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


CALLS = {
    "clip_": lambda params, optimizer: tritonclip.clip_(params, 0.5),
    "by-unit": lambda params, optimizer: tritonclip.clip_(params, ClipByUnitNorm(0.01)),
    "get_total_norm": lambda params, optimizer: tritonclip.get_total_norm(params),
    "norms_by_name": lambda params, optimizer: tritonclip.norms_by_name(params),
    "step": lambda params, optimizer: optimizer.step(),
}


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="signals arrive before any bytecode of Python 3.10"
)
@pytest.mark.parametrize("cold", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_interrupt_leaves_autograd_on(call, cold):
    """Wherever a signal arrives, in PyTorch's code too: every other call is that of a new list."""
    params = parameters([torch.ones(3), torch.ones(2, 2)])
    optimizer = ClippedOptimizer(Still(params), 0.5, nonfinite="skip")
    n, ended = 1, False
    while not ended:
        if n % 2 == cold:
            forget_plans()
        for param in params:
            param.grad = torch.ones(param.shape, requires_grad=True)
        ended = ends(InterruptAtCall(n), partial(CALLS[call], params, optimizer))
        assert torch.is_grad_enabled(), n
        n += 1
    assert n > 30
