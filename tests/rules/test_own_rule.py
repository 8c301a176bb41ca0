"""Rules of users: the contract of docs/own_rule.md, and the errors for what breaks it."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import grad_of, parameter
from tritonclip import AdaptiveRule, ClipByGlobalNorm, ClippedOptimizer, ClipState, Rule
from tritonclip.rules import Measured


@dataclass(frozen=True)
class Smooth(Rule):
    """Brings every norm below `max_norm`."""

    max_norm: float = 1.0

    def limit(self, measured: Measured) -> Tensor:
        return self.max_norm / (1 + self.max_norm / measured.norm())


@dataclass  # Not frozen, and so without a hash.
class Mean(AdaptiveRule):
    """A multiple of the mean of the norms before."""

    ratio: float = 2.0

    def start(self) -> tuple[float, float]:
        return (0.0, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        total, n = state.unbind(-1)
        limit = torch.where(n > 0, self.ratio * total / n, torch.inf)
        return limit, torch.stack([total + norm, n + 1], dim=-1)


def three_four(device: torch.device | None = None) -> Tensor:
    return parameter(torch.tensor([3.0, 4.0], device=device))


@pytest.mark.parametrize(
    ("norm", "after"), [(4.0, 0.8), (0.0, 0.0), (math.inf, 0.0), (math.nan, math.nan)]
)
def test_norm_type_and_eps_have_defaults_that_pass_nan_and_zero(device, norm, after):
    weight = parameter(torch.tensor([norm, 0.0], device=device))
    tritonclip.clip_(weight, Smooth())
    finite = grad_of(weight)[0 if math.isfinite(norm) else 1].cpu()
    torch.testing.assert_close(finite, torch.tensor(after), equal_nan=True)


def test_a_mutable_rule_follows_norms(device):
    state, weight = ClipState(), three_four(device)
    for _ in range(2):
        weight.grad = torch.tensor([3.0, 4.0], device=device)
        tritonclip.clip_(weight, Mean(0.1), state=state)
    assert float(grad_of(weight).norm()) == pytest.approx(0.5)


class HalfOfLimit(ClipByGlobalNorm):
    def limit(self, measured: Measured) -> Any:
        return 0.5 * self.max_norm  # type: ignore[operator]


class Halving:
    def limit(self, measured: Measured) -> Any:
        return 0.5 * measured.norm()


class LimitOne:
    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(norm), state


class HalfByMixin(Halving, ClipByGlobalNorm):
    pass


class OneByMixin(LimitOne, tritonclip.ClipByZScore):
    pass


class Nothing(Rule):
    def limit(self, measured: Measured) -> Any:
        return 0


@pytest.mark.parametrize(
    ("rule", "after"),
    [(HalfOfLimit(1.0), 0.5), (HalfByMixin(100.0), 2.5), (OneByMixin(), 1.0), (Nothing(), 0.0)],
    ids=["limit of a subclass", "limit of a mixin", "advance of a mixin", "zero"],
)
def test_a_method_that_is_overridden_is_asked(device, rule, after):
    weight = three_four(device)
    tritonclip.clip_(weight, rule, state=ClipState() if isinstance(rule, AdaptiveRule) else None)
    assert float(grad_of(weight).norm()) == pytest.approx(after)


def _own(parent: type[Rule] = Rule, **members: Any) -> Any:
    """A rule of a class with these members."""
    return type("Own", (parent,), members)()


def _limiting(result: Any) -> Any:
    return _own(limit=lambda self, measured: result)


def _advancing(start: Any, advance: Any, *, each: bool = False) -> Any:
    members = {"start": lambda self: start, "advance": advance, "per_gradient": each}
    return _own(AdaptiveRule, **members)


WRONG = [
    pytest.param(_own(), NotImplementedError, "expected a method limit", id="no-limit"),
    pytest.param(_own(AdaptiveRule), NotImplementedError, "expected a method start", id="no-start"),
    pytest.param(_limiting(None), TypeError, "limit of Own must be a number", id="none"),
    pytest.param(_limiting("1"), TypeError, "limit of Own must be a number", id="text"),
    pytest.param(_limiting(-1.0), ValueError, "0 or more, got -1.0", id="negative"),
    pytest.param(
        _limiting([1.0, 2.0]),
        ValueError,
        r"or one element, got shape \(2,\); .* set per_gradient = True",
        id="too-many",
    ),
    pytest.param(_advancing(0.0, None), TypeError, r"such as \(0.0, 0.0\), got 0.0", id="start"),
    pytest.param(
        _advancing((0.0,), lambda self, state, norm: norm),
        TypeError,
        "two tensors",
        id="one-result",
    ),
    pytest.param(
        _advancing((0.0,), lambda self, state, norm: (state, norm), each=True),
        TypeError,
        r"a state of shape \(1, 1\) as the state; got \[\(1, 1\), \(1,\)\]",
        id="swapped",
    ),
]


@pytest.mark.parametrize(("rule", "error", "message"), WRONG)
def test_a_wrong_rule_raises_and_changes_nothing(backend, rule, error, message):
    weight = three_four(backend.device)
    with pytest.raises(error, match=message):
        tritonclip.clip_(weight, rule, state=ClipState())
    assert grad_of(weight).tolist() == [3.0, 4.0]


def test_checkpoints_have_the_numbers_of_a_rule_and_groups_the_rule():
    def wrapper() -> ClippedOptimizer:
        groups: list[dict[str, Any]] = [
            {"params": [three_four()], "clip": Smooth()},
            {"params": [three_four()]},
        ]
        return ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), Mean(0.1))

    def loaded(content: Any) -> Any:
        file = io.BytesIO()
        torch.save(content, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    first, second = wrapper(), wrapper()
    first.step()
    second.load_state_dict(loaded(first.state_dict()))
    second.step()
    # The first step had no limit, the second a tenth of its norm.
    assert float(second.stats.last_limit) == pytest.approx(0.5)

    with torch.serialization.safe_globals([Smooth]):
        assert loaded([group["clip"] for group in first.param_groups[:1]]) == [Smooth()]


def test_torch_compile_runs_the_call_eagerly():
    clip = torch.compile(lambda weight: tritonclip.clip_(weight, Smooth()), backend="eager")
    weight = three_four()
    assert clip(weight) == 5.0
    assert float(grad_of(weight).norm()) == pytest.approx(5 / 6)
