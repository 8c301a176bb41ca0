"""Rules of users: the contract of docs/clipping.md, and the errors for what breaks it."""

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
    pytest.param(_limiting(1j), TypeError, "must be a number, got 1j", id="complex"),
    pytest.param(_limiting(-1.0), ValueError, "0 or more, got -1.0", id="negative"),
    pytest.param(_limiting(math.nan), ValueError, "0 or more, got nan", id="nan"),
    pytest.param(_limiting(10**400), ValueError, "fit a float, got a larger", id="overflow"),
    pytest.param(_limiting([None]), TypeError, "must be a number, got None", id="list-of-none"),
    pytest.param(_limiting(torch.tensor([True, True])), TypeError, "torch.bool", id="booleans"),
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


def bad_limits(device: torch.device) -> list[Tensor]:
    """Limits of two gradients that are no numbers of 0 or more, together or one for each."""
    numbers: list[Any] = [math.nan, -1.0, [1.0, math.nan], [-1.0, 1.0], [math.nan, math.nan]]
    return [torch.tensor(number, device=device) for number in numbers]


@pytest.mark.parametrize("number", range(5), ids=["nan", "negative", "nan of one", "one", "each"])
@pytest.mark.parametrize("nonfinite", ["propagate", "error", "zero", "skip"])
def test_policies_act_on_a_tensor_that_is_no_limit(backend, number, nonfinite):
    """The host raises; on a device a limit is not read, and counts as a norm that is NaN."""
    bad = bad_limits(backend.device)[number]
    rule = _own(limit=lambda self, measured: bad, per_gradient=bad.dim() == 1)
    for stepping in (False, True):
        weights = [three_four(backend.device), three_four(backend.device)]
        optimizer = ClippedOptimizer(
            torch.optim.SGD(weights, lr=1.0, fused=True),
            rule if stepping else 1.0,
            nonfinite=nonfinite,
        )
        if nonfinite == "skip" and not stepping:
            continue

        def call(optimizer=optimizer, weights=weights, stepping=stepping):
            if stepping:
                return optimizer.step()
            return tritonclip.clip_(weights, rule, nonfinite=nonfinite)

        if backend.host_decides or nonfinite == "error":
            error = ValueError if backend.host_decides else RuntimeError
            with pytest.raises(error, match=r"[Tt]he limit of Own (must be 0|is NaN)"):
                call()
            assert all(grad_of(weight).tolist() == [3.0, 4.0] for weight in weights)
        else:
            call()
        after = [weight.tolist() for weight in weights]
        if not backend.host_decides and nonfinite == "propagate":
            # NaN, and not gradients of the other sign.
            spoiled = ~(bad.expand(2) >= 0)
            grads = [grad_of(weight).isnan().all().item() for weight in weights]
            assert grads == spoiled.tolist()
        else:
            assert after == [[0.0, 0.0]] * 2
            assert int(optimizer.stats.skipped_steps) == (
                nonfinite == "skip" and not backend.host_decides
            )
        if not backend.host_decides and nonfinite == "zero":
            assert not any(grad_of(weight).any() for weight in weights)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "skip"])
def test_a_limit_that_only_follows_a_norm_that_is_not_finite_is_the_policys(
    device, nonfinite, value
):
    """`norm - norm` is NaN where the norm is NaN or inf: a step like any other that is neither."""
    rule = _own(limit=lambda self, measured: 1 + measured.norm() - measured.norm())
    weight = parameter(torch.tensor([value, 4.0], device=device))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = ClippedOptimizer(inner, rule, nonfinite=nonfinite)
    optimizer.step()
    expected = (True, True) if nonfinite == "propagate" else (False, False)
    assert (bool(weight[0].isnan()), bool(weight[1].isnan())) == expected


@pytest.mark.parametrize("nonfinite", ["propagate", "error", "zero"])
def test_a_limit_that_is_nan_where_the_norm_is_0_clips_nothing(device, nonfinite):
    rule = _own(limit=lambda self, m: m.norm() / m.norm(), per_gradient=True, eps=1e-6)
    weights = [three_four(device), parameter(torch.zeros(2, device=device))]
    tritonclip.clip_(weights, rule, nonfinite=nonfinite)
    assert float(grad_of(weights[0]).norm()) == pytest.approx(1.0)
    assert grad_of(weights[1]).tolist() == [0.0, 0.0]


def test_a_wrong_limit_of_a_group_leaves_the_other_groups_as_they_were(device):
    first, second = three_four(device), three_four(device)
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": [second], "clip": _limiting(-1)},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=1.0), 1.0)
    for wrong in (None, 8.0):
        with pytest.raises(ValueError, match="must be 0 or more, got -1"):
            optimizer.step(grad_scale=wrong)
        assert grad_of(first).tolist() == grad_of(second).tolist() == [3.0, 4.0]
    optimizer.param_groups[1]["clip"] = 1.0
    # Nothing was divided: the same gradients serve.
    optimizer.step(grad_scale=8.0)


def test_a_state_that_became_nan_raises(backend):
    device = backend.device
    spoiling = _advancing((1.0,), lambda self, state, norm: (state[..., 0], state * math.nan))
    state, weight = ClipState(), three_four(device)
    tritonclip.clip_(weight, spoiling, state=state)
    loaded = ClipState()
    loaded.load_state_dict(state.state_dict())
    for one in (state, loaded):
        weight.grad = torch.tensor([3.0, 4.0], device=device)
        error = ValueError if backend.host_decides else RuntimeError
        with pytest.raises(error, match=r"limit of Own (must be 0 or more, got nan|is NaN)"):
            tritonclip.clip_(weight, spoiling, state=one, nonfinite="error")
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
