"""A step that is interrupted before any of its bytecodes, and the steps that follow.

Parameters and state are those of before or of after the step, and the next step with new gradients
is right: that of a run without interruption, bit for bit. The same gradients are refused where a
loss scale may have been divided out of them, and else clipped once more. Interrupted is the code of
the wrapper and of GradScaler, not that of the wrapped optimizer.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

import tritonclip
from helpers.cases import copies, normal
from helpers.interrupts import InterruptAtBytecode
from helpers.training import state_of
from tritonclip import ClippedOptimizer

# In other code torch enters contexts, which Python can leave open where it is interrupted.
_TRACED = ("/tritonclip/optim/", torch.amp.GradScaler.step.__code__)
SCALE = 1024.0


class Run:
    """A program whose gradients are the same in every run."""

    def __init__(self, scaler: Any, *, rule: bool, **options: Any) -> None:
        self.params: list[Tensor] = [
            torch.nn.Parameter(normal(shape, seed=at)) for at, shape in enumerate([(3,), (2, 2)])
        ]
        own = {"clip": 0.25} if rule else {}
        groups: list[dict[str, Any]] = [
            {"params": self.params[:1]},
            {"params": self.params[1:], **own},
        ]
        nonfinite = options.pop("nonfinite", "propagate")
        self.optimizer = ClippedOptimizer(
            AdamW(groups, lr=0.1, **options),
            0.5,
            nonfinite=nonfinite,
        )
        self.scaler = scaler("cpu") if scaler else None

    def give_grads(self, step: int) -> None:
        self.optimizer.zero_grad()
        for at, param in enumerate(self.params):
            grad = normal(param.shape, seed=10 * step + at) * (SCALE if self.scaler else 1.0)
            param.grad = grad

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)

    def whole(self, step: int) -> None:
        if self.scaler is not None:
            self.scaler = type(self.scaler)("cpu", init_scale=SCALE)
            self.scaler.scale(torch.ones(()))
        self.give_grads(step)
        self.step()

    def values(self) -> list[Tensor]:
        return [*copies(self.params), *state_of(self.optimizer, self.params)]

    @torch.no_grad()
    def restore(self, values: list[Tensor]) -> None:
        states = [s for p in self.params for s in self.optimizer.state[p].values()]
        for tensor, value in zip([*self.params, *states], values, strict=True):
            tensor.copy_(value)


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


RUNS = [
    pytest.param(torch.amp.GradScaler, {"fused": True}, id="torch"),
    pytest.param(tritonclip.GradScaler, {"fused": True, "nonfinite": "skip"}, id="tritonclip"),
    pytest.param(None, {"foreach": True, "rule": True}, id="none"),
]


@pytest.mark.parametrize(("scaler", "options"), RUNS)
def test_step_interrupted_anywhere_leaves_before_or_after(scaler, options):
    run = Run(scaler, **{"rule": False, **options})
    run.whole(1)
    before = run.values()
    # Of gradients that take no part: a step to come must not find traces of them.
    run.whole(3)
    without = run.values()
    run.restore(before)
    run.whole(2)
    after = run.values()
    run.whole(3)
    finished = run.values()

    n_again = n_refused = n = 0
    ended = False
    while not ended:
        n += 1
        run.restore(before)
        if run.scaler is not None:
            run.scaler = scaler("cpu", init_scale=SCALE)
            run.scaler.scale(torch.ones(()))
        run.give_grads(2)
        try:
            with InterruptAtBytecode(n, *_TRACED):
                run.step()
            ended = True
        except KeyboardInterrupt:
            pass
        updated = _equal(run.values(), after)
        assert updated or _equal(run.values(), before), n
        # In turn: the same step once more, or the next one at once.
        if n % 2 and not updated:
            n_again += 1
            refusal = ""
            try:
                run.step()
            except RuntimeError as error:
                refusal = str(error)
            if refusal:
                assert "divided these gradients by the loss scale" in refusal
                n_refused += 1
                run.whole(2)
            if run.scaler:
                assert _equal(run.values(), after), n
            else:
                # A second clip divides a norm at the limit, 0.25 or 0.5, by itself plus 1e-6.
                torch.testing.assert_close(run.values(), after, rtol=1e-5, atol=1e-7)
        else:
            run.whole(3)
            assert _equal(run.values(), finished if updated else without), n
    assert n > 150
    assert 0 < n_refused < n_again if run.scaler else n_refused == 0 < n_again
