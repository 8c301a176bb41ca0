"""The body of every test of a refusal: the error, its message, and that nothing has changed."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch

from helpers.cases import bits, parameters
from tritonclip import ClipByGlobalNorm, ClippedOptimizer, ClipState, clip_

# An error, its message, and calls that end so.
Refused = tuple[Any, ...]
FOLLOWING = ClipByGlobalNorm(lambda step: 1.0)


class Fresh:
    """Weights that have been stepped on, with new gradients, and all that may remember them."""

    def __init__(self) -> None:
        self.grads = [torch.tensor([3.0, 4.0]), torch.full((3, 2), 2.0)]
        self.params: list[Any] = [one.requires_grad_() for one in parameters(self.grads)]
        groups = [{"params": [one]} for one in self.params]
        self.inner = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
        self.optimizer: Any = ClippedOptimizer(self.inner, 2.5)
        self.state = ClipState()
        self.works()

    def works(self) -> None:
        """Takes a step and a call as if nothing had been refused."""
        for one, grad in zip(self.params, self.grads, strict=True):
            one.grad = grad
        for group in self.optimizer.param_groups:
            group.pop("clip", None)
        self.optimizer.step()
        assert clip_(self.params, FOLLOWING, state=self.state).isfinite()

    def _seen(self) -> tuple[Any, ...]:
        tensors = [*self.params, *self.grads]
        saved = [self.optimizer.state_dict(), self.state.state_dict()]
        # Cases set rules of groups.
        saved[0].pop("param_groups")
        options = self.optimizer.clip, self.optimizer.nonfinite, len(self.optimizer.param_groups)
        versions = [one._version for one in tensors]
        values = [bits(one).tolist() for one in tensors]
        return options, versions, values, repr(deepcopy(saved)), {*vars(self.optimizer)}

    def check(self, call: Callable[[Any], object], error: type[Exception], message: str) -> None:
        """A call raises, has changed nothing, and spoils no later one."""
        before = self._seen()
        with pytest.raises(error, match=message):
            call(self)
        assert self._seen() == before
        self.works()


def each_refused(rows: Sequence[Refused]) -> Any:
    """Parameters for pytest: each call of a table, with its error and message."""
    cases = [
        pytest.param(call, error, message, id=f"{message} {number}")
        for error, message, *calls in rows
        for number, call in enumerate(calls)
    ]
    return pytest.mark.parametrize(("call", "error", "message"), cases)
