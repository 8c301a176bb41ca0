"""Rules of users: the contract of docs/clipping.md, and the errors for what breaks it.

A limit may be a tensor: on any device, for all gradients or one for each.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    assert_bits,
    assert_norm,
    copies,
    grad_of,
    normal,
    of_sizes,
    parameter,
    parameters,
)
from helpers.optimizers import torch_saved
from tritonclip import AdaptiveRule, ClipByGlobalNorm, ClipByNorm, ClippedOptimizer, ClipState, Rule
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


class MeanOfEach(Mean):
    """The same for each gradient."""

    per_gradient = True


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


@pytest.mark.parametrize("rule", [Mean(0.1), MeanOfEach(0.1)], ids=["all", "each"])
def test_a_mutable_rule_follows_norms(device, rule):
    state, weight = ClipState(), three_four(device)
    for _ in range(2):
        weight.grad = torch.tensor([3.0, 4.0], device=device)
        tritonclip.clip_(weight, rule, state=state)
    assert float(grad_of(weight).norm()) == pytest.approx(0.5)


@pytest.mark.parametrize("each", [False, True], ids=["all", "each"])
def test_a_state_that_a_rule_writes_to_changes_with_the_step_alone(device, each):
    """A norm that is NaN does not enter it, and a call that raises leaves it."""

    def advance(self: Any, state: Tensor, norm: Tensor) -> Any:
        state[..., 0] += norm
        if bool((norm > 8).any()):
            raise KeyError
        return torch.full_like(norm, torch.inf), state

    rule, state, weight = _advancing((1.0,), advance, each=each), ClipState(), three_four(device)
    tritonclip.clip_(weight, rule, state=state)
    before = state.state_dict()["values"]
    for size, error in ((10.0, pytest.raises(KeyError)), (math.nan, contextlib.nullcontext())):
        weight.grad = torch.tensor([size, 0.0], device=device)
        with error:
            tritonclip.clip_(weight, rule, state=state)
        assert state.state_dict()["values"] == before == ([[6.0]] if each else [6.0])


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
    pytest.param(_advancing((), None), TypeError, r"such as \(0.0, 0.0\), got \(\)", id="empty"),
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


def test_a_limit_on_meta_is_refused_before_another_group_is_written():
    first, second = three_four(), three_four()
    limit = torch.ones((), device="meta")
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": [second], "clip": _limiting(limit)},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=1.0), 1.0)
    with pytest.raises(TypeError, match=r"limit of Own must have a value, got a tensor on meta"):
        optimizer.step()
    assert grad_of(first).tolist() == [3.0, 4.0]
    weight = parameter(torch.ones(2, device="meta"))
    tritonclip.clip_(weight, _limiting(limit))


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

    first, second = wrapper(), wrapper()
    first.step()
    second.load_state_dict(torch_saved(first.state_dict(), weights_only=True))
    second.step()
    # The first step had no limit, the second a tenth of its norm.
    assert float(second.stats.last_limit) == pytest.approx(0.5)

    with torch.serialization.safe_globals([Smooth]):
        assert torch_saved(first.param_groups[0]["clip"], weights_only=True) == Smooth()


def test_torch_compile_runs_the_call_eagerly():
    clip = torch.compile(lambda weight: tritonclip.clip_(weight, Smooth()), backend="eager")
    weight = three_four()
    assert clip(weight) == 5.0
    assert float(grad_of(weight).norm()) == pytest.approx(5 / 6)


SIZES = (5, 0, 3 * CHUNK + 7, 40, 1)
FEW = (5, 40, 3)


@dataclass(frozen=True)
class Following(Rule):
    """The limit is a share of the norm, computed on the device."""

    share: float
    norm_type: float = 2.0
    eps: float = 0.0

    def limit(self, measured: Measured) -> Tensor:
        return measured.norm() * self.share


class FollowingEach(Following):
    """As above, with a norm and a limit for each gradient."""

    per_gradient: ClassVar[bool] = True


@dataclass(frozen=True)
class Given(Rule):
    """A limit that stands in a tensor."""

    max_norm: Tensor
    norm_type: float = 2.0
    eps: float = 1e-6

    def limit(self, measured: Measured) -> Tensor:
        return self.max_norm


class GivenEach(Given):
    per_gradient: ClassVar[bool] = True


def clipped(grads: list[Tensor], rule: Rule) -> Tensor:
    """The norm before clipping."""
    norm = tritonclip.clip_(parameters(grads), rule)
    assert norm is not None
    return norm


def mixed(device: torch.device) -> list[Tensor]:
    """Gradients of three groups, in turn."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return [normal(7 + i, dtypes[i % 3], device, seed=i) for i in range(7)]


LISTS = [
    pytest.param(lambda device: of_sizes(SIZES, torch.float32, device), id="one-group"),
    pytest.param(mixed, id="three-groups"),
]


def assert_same(make: Any, device: torch.device, rule: Rule, other: Rule) -> None:
    """Two rules measure and clip alike."""
    ours, theirs = make(device), make(device)
    assert_bits([clipped(ours, rule), *ours], [clipped(theirs, other), *theirs])


@pytest.mark.parametrize("make", LISTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_limit_in_a_tensor_clips_as_its_number(device, make, dtype, shape):
    limit = torch.full(shape, 0.625, dtype=dtype, device=device)
    assert_same(make, device, Given(limit), ClipByGlobalNorm(0.625))


@pytest.mark.parametrize("make", LISTS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_limit_in_a_tensor_serves_each_gradient(device, make, shape):
    limit = torch.full(shape, 0.625, device=device)
    assert_same(make, device, GivenEach(limit), ClipByNorm(0.625))


@pytest.mark.parametrize("make", LISTS)
def test_each_gradient_has_the_limit_of_its_place(device, make):
    grads = make(device)
    before = copies(grads)
    limits = torch.tensor([2.0**-i for i in range(len(grads))], device=device)
    norms = clipped(grads, GivenEach(limits))
    # Results of a mixed list are float64, but a norm is right to its gradient's dtype.
    for norm, grad in zip(norms, before, strict=True):
        assert float(norm) == pytest.approx(reference.total_norm([grad]), rel=1e-6)
    for i, grad in enumerate(before):
        twin = grad.clone().to(device)
        clipped([twin], ClipByNorm(float(limits[i])))
        torch.testing.assert_close(grads[i], twin)


@pytest.mark.parametrize(
    ("rule", "sizes", "expected"),
    [(Following(0.25), SIZES, reference.total_norm), (FollowingEach(0.25), FEW, reference.norms)],
    ids=["call", "each gradient"],
)
def test_a_limit_follows_the_norm(device, rule, sizes, expected):
    grads = of_sizes(sizes, torch.float32, device)
    before = copies(grads)
    assert_norm(clipped(grads, rule), expected(before))
    assert_bits(grads, [grad * 0.25 for grad in before])


def test_a_limit_follows_the_norm_after_division_by_the_loss_scale(device):
    grads = of_sizes(FEW, torch.float32, device)
    before = copies(grads)
    tritonclip.clip_(parameters(grads), Following(0.25), grad_scale=8.0)
    assert_bits(grads, [grad * (0.25 / 8) for grad in before])


@pytest.mark.parametrize("rule", [Following(0.25), FollowingEach(0.25)], ids=["all", "each"])
def test_verify_passes_a_limit_that_follows(device, rule):
    with tritonclip.verify():
        tritonclip.clip_(parameters(of_sizes(FEW, torch.float32, device)), rule)


def test_the_wrapper_takes_a_new_rule(device):
    weight = torch.nn.Parameter(torch.zeros(2, device=device))
    weight.grad = torch.tensor([3.0, 4.0], device=device)
    optimizer = ClippedOptimizer(torch.optim.SGD([weight], lr=1.0), Following(0.5))
    optimizer.step()
    assert torch.equal(weight.detach().cpu(), torch.tensor([-1.5, -2.0]))
    assert float(optimizer.stats.last_coefficient) == 0.5


@pytest.mark.parametrize("make", LISTS)
def test_limits_may_have_gaps(device, make):
    spread = (torch.arange(1.0, 2 * len(make("cpu")) + 1, device=device) / 8)[::2]
    assert_same(make, device, GivenEach(spread), GivenEach(spread.contiguous()))


@pytest.mark.parametrize(
    ("rule", "said"),
    [(GivenEach, "one for each of 3 gradients"), (Given, "set per_gradient = True")],
    ids=["each", "global"],
)
def test_limits_of_another_number_are_refused(device, rule, said):
    grads = of_sizes(FEW, torch.float32, device)
    before = copies(grads)
    with pytest.raises(ValueError, match=said):
        clipped(grads, rule(torch.ones(2, device=device)))
    assert_bits(grads, before)
