"""What calls, rules, wrappers and scalers refuse: the error, its message, and nothing changed."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.optim import SGD, Optimizer

import tritonclip
from helpers.cases import parameter, parameters, untouched
from helpers.refusals import FOLLOWING, Fresh, Refused, each_refused
from tritonclip import (
    AdaptiveRule,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByUnitNorm,
    ClipByValue,
    ClippedOptimizer,
    ClipState,
    Rule,
)

# Whose types refuse much of what is given here.
api: Any = tritonclip
clip_, clip_tensors_, get_total_norm = api.clip_, api.clip_tensors_, api.get_total_norm
clip_grad_norm_, clip_grad_value_ = api.clip_grad_norm_, api.clip_grad_value_
clip_grads_with_norm_ = api.clip_grads_with_norm_

NAN, INF, T = math.nan, math.inf, torch.tensor


class Labelled(torch.Tensor):
    """A subclass that the library knows nothing about."""


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def clips(*arguments: Any, call: Any = clip_, **options: Any) -> Callable[[Fresh], object]:
    """A call on good gradients with these arguments."""
    return lambda f: call(f.params, *arguments, **options)


def given(parameters: Any) -> Callable[[Fresh], object]:
    return lambda f: clip_(parameters, 1.0)


def of_norm(total: Any, limit: Any = 1.0, **options: Any) -> Callable[[Fresh], object]:
    return clips(limit, total, call=clip_grads_with_norm_, **options)


def beside(bad: Callable[[], torch.Tensor], rule: Any = 1.0, **options: Any) -> Any:
    """A call whose third gradient is a bad one."""
    return lambda f: clip_([*f.params, parameter(bad())], rule, **options)


def by_each_rule(bad: Callable[[], torch.Tensor], **options: Any) -> list[Any]:
    return [beside(bad, rule, **options) for rule in (GLOBAL, EACH, VALUE)]


def ones(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(3, dtype=dtype)


def tensors(make: Callable[[Fresh], Any], rule: Any = 1e-3, **options: Any) -> Any:
    return lambda f: clip_tensors_(make(f), rule, **options)


def in_vmap(call: Callable[[Any], object]) -> list[Any]:
    """Inside torch.func.vmap, alone and around torch.func.grad."""

    def body(grad: torch.Tensor) -> torch.Tensor:
        weight = torch.zeros(2)
        weight.grad = grad
        call(weight)
        return grad.sum()

    return [
        lambda f: torch.func.vmap(body)(f.grads[1]),
        lambda f: torch.func.vmap(torch.func.grad(body))(f.grads[1]),
    ]


GLOBAL, EACH, VALUE = ClipByGlobalNorm(1.0), ClipByNorm(1.0), ClipByValue(0.5)
MODULE = torch.nn.Linear(2, 2)
FORMS: list[Callable[[], Any]] = [lambda: MODULE, MODULE.parameters, lambda: [*MODULE.parameters()]]
BOOLEANS = (True, numpy.bool_(True), T(True))
OF_TORCH = (clip_grad_norm_, clip_grad_value_)
RAISES: dict[str, Any] = {"nonfinite": "error"}
AT_0 = r"at position 0 .*got another one.*new ClipState\(\)"
TWO = ValueError, "1 tensors at 2 positions"
OWN, NEW = ClipByOwnHistory(1.05), ClipState
CALLS: list[Refused] = [
    (TypeError, r"parameters\[2\].*int64", *by_each_rule(ones(torch.int64))),
    (TypeError, r"parameters\[2\].*uint8", beside(ones(torch.uint8))),
    (TypeError, r"parameters\[2\].*bool", beside(ones(torch.bool))),
    (TypeError, "Labelled", *by_each_rule(lambda: torch.ones(3).as_subclass(Labelled))),
    (TypeError, "complex", *(beside(ones(x), VALUE) for x in (torch.complex64, torch.complex128))),
    (ValueError, r"parameters\[2\] share memory", *by_each_rule(lambda: torch.ones(1).expand(3))),
    (ValueError, r"\(3, 4\).*overlap", *by_each_rule(lambda: torch.ones(4).expand(3, 4))),
    (RuntimeError, r"parameters\[2\] were made in inference mode", *by_each_rule(inferred)),
    (
        RuntimeError,
        r"parameters\[0\] were made in inference mode",
        lambda f: clip_grads_with_norm_(parameter(inferred()), 0.1, T(5.0)),
    ),
    (
        TypeError,
        r"head\.steps",
        lambda f: clip_({"head.steps": parameter(torch.ones(3).int())}.items(), 1.0),
    ),
    (TypeError, r"tensors\[0\] is a nested tensor", lambda f: get_total_norm([nested()])),
    (TypeError, r"tensors\[2\] is a nested", lambda f: get_total_norm([*f.grads, nested()])),
    (TypeError, r"tensors\[3\] has dtype", lambda f: get_total_norm([None, *f.grads, T(1)])),
    (TypeError, r"tensors\[1\] .* got float", lambda f: get_total_norm([None, 1.0])),
    (TypeError, "mkldnn", lambda f: get_total_norm([*f.grads, T([1.0]).to_mkldnn()])),
    (RuntimeError, r"parameters\[2\]", *by_each_rule(lambda: T([1.0, INF]), **RAISES)),
    (RuntimeError, r"[Nn]on-finite", beside(lambda: T([3e38] * 4), **RAISES)),
    (
        RuntimeError,
        r"^The gradients of parameters\[2\] are non-finite",
        beside(lambda: T([INF]), VALUE, **RAISES),
    ),
    (TypeError, "parameter", *map(given, (None, 3.0, [1.0, 2.0], [None], "weights"))),
    (TypeError, r"got method; call it: parameters\(\)", given(MODULE.parameters)),
    (TypeError, r"got dict; pass its items\(\)", given(dict(MODULE.named_parameters()))),
    (TypeError, "got SGD; pass the parameters of the", lambda f: clip_(f.inner, 1.0)),
    (TypeError, r"\[0\] must be a tensor, got Linear; .*: pass the model that", given([MODULE])),
    (TypeError, "name", given([(1, torch.ones(2))]), given([("w", 1.0)])),
    (TypeError, "parameters", given([("w", torch.ones(2), 3)])),
    (TypeError, r"parameters\[2\] must", lambda f: clip_([*f.params, 1.0], 1.0)),
    (
        TypeError,
        r"parameters come first: clip_\(parameters, 1\.0\)",
        *(lambda f, form=form: clip_(1.0, form()) for form in FORMS),
    ),
    (ValueError, "max_norm must be 0 or more, got (-1.0|nan)", clips(-1.0), clips(NAN)),
    (TypeError, "max_norm must be a number", clips(True), clips("1.0"), clips((0.1, 0.2))),
    (TypeError, r"the class; write ClipByGlobalNorm\(", clips(ClipByGlobalNorm)),
    (TypeError, r"got None .*; float\('inf'\) measures", clips(None)),
    (
        TypeError,
        r"ClippedOptimizer\(skip_above=Outlier",
        clips(tritonclip.Outlier()),
        clips(tritonclip.Outlier),
    ),
    (
        TypeError,
        r"parameters come first: clip_\(parameters, 1\.0\)",
        lambda f: clip_(1.0, [("a", f.params[0])]),
        lambda f: clip_(1.0, {"a": f.params[0]}.items()),
    ),
    (
        TypeError,
        r"tensors come first: clip_tensors_\(tensors, 1\.0\)",
        lambda f: clip_tensors_(1.0, f.grads),
        lambda f: clip_tensors_(1.0, torch.ones(2)),
        lambda f: clip_tensors_(1.0, {"a": f.grads[0]}.items()),
    ),
    (ValueError, "must be 'propagate'", *(clips(1.0, nonfinite=x) for x in ("", None, True))),
    (
        ValueError,
        "grad_scale must",
        *(clips(1.0, grad_scale=x) for x in (0.0, -2.0, NAN, INF, T(0.0), T(-2.0), T(NAN), T(INF))),
        *(clips(1.0, grad_scale=x) for x in (torch.ones(2), torch.ones(0))),
        clips(EACH, grad_scale=0.0),
        clips(VALUE, grad_scale=0.0),
    ),
    (ValueError, r"2\^-126", clips(1.0, grad_scale=2.0**-127), clips(1.0, grad_scale=2.0**127)),
    (TypeError, "grad_scale must", *(clips(1.0, grad_scale=x) for x in (True, "8", T(1)))),
    (
        TypeError,
        r"got a GradScaler; pass its get_scale\(\)",
        clips(1.0, grad_scale=torch.amp.GradScaler("cpu")),
    ),
    (ValueError, "total_norm must be 0 or more", *map(of_norm, (-5.0, NAN, T(-5.0), T([-5.0])))),
    (ValueError, "eps", *(of_norm(T(9.0), eps=x) for x in (-1.0, NAN, INF))),
    (
        TypeError,
        r"got the rule ClipByNorm; .*clip_\(parameters, rule\)",
        *(clips(EACH, call=call) for call in OF_TORCH),
    ),
    (
        TypeError,
        "must be a number, got .*; parameters come first",
        *(lambda f, call=call, form=form: call(1.0, form()) for form in FORMS for call in OF_TORCH),
    ),
    (
        TypeError,
        "(max_norm|clip_value) must be a number, got .*([Tt]rue|boolean)",
        *(clips(x, call=call) for x in BOOLEANS for call in OF_TORCH),
    ),
    (
        TypeError,
        "norm_type must be a number, got .*([Tt]rue|boolean)",
        *(clips(1.0, x, call=clip_grad_norm_) for x in BOOLEANS),
    ),
    (TypeError, r"must be a tensor, got Linear; .*None\]$", lambda f: get_total_norm([MODULE])),
    (TypeError, r"a module; expected \[p.grad for p in", lambda f: get_total_norm(MODULE)),
    (ValueError, "no process_group was given; expected both", clips(1.0, copies={})),
    (TypeError, "or a DeviceMesh, got 3 of type int", clips(1.0, process_group=3)),
    (TypeError, "must be a ClipState, got dict", clips(1.0, state={})),
    (ValueError, AT_0, lambda f: clip_(parameters(f.grads), FOLLOWING, state=f.state)),
    (TypeError, r"tensors\[0\] is a parameter", tensors(lambda f: f.params)),
    (TypeError, r"tensors\[0\] is a", torch.no_grad()(tensors(lambda f: f.params))),
    (TypeError, "weight is a parameter", tensors(lambda f: [("weight", f.params[0])])),
    (
        TypeError,
        r"tensors\[1\] is a parameter",
        tensors(lambda f: [f.grads[0], torch.nn.Parameter(torch.ones(2), requires_grad=False)]),
    ),
    (
        TypeError,
        r"tensors\[0\] requires grad",
        tensors(lambda f: torch.ones(2, requires_grad=True)),
        tensors(lambda f: [f.params[0] * 2]),
    ),
    (TypeError, r"a module; .* clip_\(module, 1.0\)", lambda f: clip_tensors_(MODULE, 1.0)),
    (TypeError, r"tensors\[2\] .* got float", tensors(lambda f: [*f.grads, 1.0])),
    (
        TypeError,
        r"tensors\[1\] must be a \(name",
        tensors(lambda f: [("a", f.grads[0]), f.grads[1]]),
    ),
    (TypeError, r"tensors\[2\] has dtype", tensors(lambda f: [*f.grads, torch.ones(2).long()])),
    (TypeError, "with the weights", tensors(lambda f: f.grads, ClipByUnitNorm(0.01))),
    (*TWO, tensors(lambda f: [f.grads[0], None], OWN, state=NEW())),
    (*TWO, tensors(lambda f: [f.grads[0]] * 2, OWN, state=NEW())),
    (
        RuntimeError,
        "Non-finite gradients: second$",
        tensors(lambda f: [("first", f.grads[0]), ("second", T([NAN]))], **RAISES),
    ),
    (
        RuntimeError,
        r"order 2.0 is non-.* gradients: tensors\[3\]$",
        tensors(lambda f: [None, *f.grads, T([NAN])], **RAISES),
    ),
    (
        RuntimeError,
        r"batched by torch\.func\.vmap.*functional",
        *in_vmap(lambda p: clip_(p, 1.0)),
        *in_vmap(lambda p: clip_(p, EACH)),
        *in_vmap(lambda p: clip_(p, VALUE)),
        *in_vmap(lambda p: clip_tensors_(p.grad.detach(), 1.0)),
        *in_vmap(lambda p: clip_grad_norm_(p, 1.0)),
        *in_vmap(lambda p: clip_grad_value_(p, 1.0)),
        *in_vmap(lambda p: get_total_norm(p.grad)),
        *in_vmap(lambda p: clip_grads_with_norm_(p, 1.0, torch.ones(()))),
    ),
]


@each_refused(CALLS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_call_is_refused_and_changes_nothing(call, error, message):
    Fresh().check(call, error, message)


def wraps(inner: Any, rule: Any = 1.0, **options: Any) -> Callable[[Fresh], object]:
    return lambda f: ClippedOptimizer(inner(f) if callable(inner) else inner, rule, **options)


def with_options(name: str, *values: Any) -> list[Any]:
    """Wrappers made with a wrong value, and one to which it is given."""
    return [
        meet for value in values for meet in (wraps(inner_of, **{name: value}), set_to(name, value))
    ]


def scaled(scale: Any) -> Callable[[Fresh], object]:
    return lambda f: f.optimizer.step(grad_scale=scale)


def inner_of(f: Fresh) -> Optimizer:
    return f.inner


def set_to(name: str, value: Any) -> Callable[[Fresh], object]:
    return lambda f: setattr(f.optimizer, name, value)


def group_of(rule: Any) -> dict[str, Any]:
    return {"params": [torch.nn.Parameter(torch.ones(2))], "clip": rule}


def steps(change: Callable[[Fresh], object]) -> Callable[[Fresh], object]:
    """A step after something was changed by hand."""

    def call(f: Fresh) -> None:
        change(f)
        f.optimizer.step()

    return call


class Around:
    """As wrappers write it that do not call Optimizer.__init__."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Lookahead(Around, Optimizer):
    """An Optimizer by inheritance."""


def differentiable(**options: Any) -> SGD:
    return SGD([torch.nn.Parameter(torch.ones(2))], differentiable=True, **options)


def mostly_differentiable(meet: Callable[[ClippedOptimizer], object]) -> Callable[[Fresh], object]:
    groups: Any = [{"params": [torch.nn.Parameter(torch.ones(2))], "differentiable": False}]
    return lambda f: meet(ClippedOptimizer(SGD(groups, lr=0.5, differentiable=True), 1.0))


def own_option(f: Fresh) -> object:
    inner = SGD([torch.nn.Parameter(torch.ones(2))])
    inner.defaults["clip"] = inner.param_groups[0]["clip"] = 1.0
    return ClippedOptimizer(inner, 1.0)


def group_rule(rule: Any) -> Callable[[Fresh], object]:
    return lambda f: f.optimizer.param_groups[1].update(clip=rule)


def rebuilt(f: Fresh, *grads: Any, clip: Any = None, left_out: bool = False) -> ClippedOptimizer:
    """Another wrapper, each of whose gradients is a group; the last one has this rule."""
    groups: list[Any] = [{"params": [one]} for one in parameters(grads)]
    if left_out:
        groups[-1]["params"][0].need_clip = False
    else:
        groups[-1]["clip"] = clip
    return ClippedOptimizer(SGD(groups, lr=1.0), 1.0, nonfinite="skip")


def complex_group(*before: Any) -> Callable[[Fresh], object]:
    bad = torch.ones(2, dtype=torch.complex64)
    return lambda f: rebuilt(f, *(before or f.grads), bad, clip=VALUE).step()


def overlapping(*, known: bool = False, **options: Any) -> Callable[[Fresh], object]:
    """Gradients under two rules that share a part, at once or after a step where they did not."""

    def call(f: Fresh) -> None:
        memory = torch.ones(12)
        optimizer = rebuilt(f, memory[:4], memory[6 if known else 2 :][:4], **options)
        if known:
            optimizer.step()
            optimizer.param_groups[1]["params"][0].grad = memory[2:6]
        before = memory.tolist()
        try:
            optimizer.step()
        finally:
            assert memory.tolist() == before

    return call


def added(rule: Any) -> Callable[[Fresh], object]:
    return lambda f: f.optimizer.add_param_group(group_of(rule))


def made_of_groups(rule: Any) -> Callable[[Fresh], object]:
    return lambda f: ClippedOptimizer(SGD([group_of(0.5), group_of(rule)]), 1.0)


def for_rules(call: Any) -> list[Any]:
    return [call(rule) for rule in ("1", True, ClipByNorm)]


OF_A_GROUP = r"param_groups\[1\]\['clip'\]: .*got .*; None clips nothing"
OF_THE_THIRD = r"param_groups\[2\]\['clip'\]: .*got .*; None clips nothing"
DIFFERENTIABLE = r"param_groups\[\d\] has differentiable=True, .* clip of tritonclip\.functional"
OVERLAP = r"\[0\]\['params'\]\[0\] and .*\[1\]\['params'\]\[0\] overlap in memory"
POLICY = "nonfinite must be 'propagate', 'error', 'zero' or 'skip', got "
SKIPS = "max_consecutive_skips"
OPTIMIZERS: list[Refused] = [
    (ValueError, "skip_above must be 0 or more", *with_options("skip_above", -1.0, NAN)),
    (ValueError, "skip_above must be over 0, got 0", *with_options("skip_above", 0, -0.0)),
    (TypeError, "skip_above must be a number .* an Outlier", *with_options("skip_above", "6 s")),
    (TypeError, "skip_above must be a number", *with_options("skip_above", EACH)),
    (TypeError, r"the class; write Outlier\(\)$", *with_options("skip_above", tritonclip.Outlier)),
    (
        TypeError,
        r"got the class SGD: write SGD\(parameters, \.\.\.\)",
        lambda f: api.ClippedOptimizer(SGD, 1.0),
    ),
    (
        TypeError,
        "expected one, as the first argument",
        lambda f: api.ClippedOptimizer(1.0, f.inner),
    ),
    (ValueError, f"{SKIPS} must be 1 or more", *with_options(SKIPS, 0)),
    (TypeError, f"{SKIPS} must be an integer", *with_options(SKIPS, 1.5)),
    (ValueError, "expected nonfinite='skip' or skip_above", *with_options(SKIPS, 2)),
    (TypeError, "must be a Recorder or None, got str.*record", *with_options("recorder", "a.csv")),
    (TypeError, r"got shape \(2,\)", set_to("loss", torch.zeros(2))),
    (TypeError, r"got shape \(1,\)", set_to("loss", torch.zeros(1))),
    (TypeError, "of torch.int64", set_to("loss", T(1))),
    (TypeError, "of torch.complex64", set_to("loss", T(1j))),
    (TypeError, "got bool", set_to("loss", True)),
    (TypeError, "got str", set_to("loss", "1.0")),
    (AttributeError, r"max_norm belongs to .*ClipByGlobalNorm\(", set_to("max_norm", 2.0)),
    (ValueError, "grad_scale must be positive", scaled(0.0)),
    (TypeError, "grad_scale must be a number", scaled("8")),
    (ValueError, "must be a one-element", scaled(torch.ones(2))),
    (TypeError, r"pass its get_scale\(\)", scaled(torch.amp.GradScaler("cpu"))),
    (
        TypeError,
        r"must be a torch\.optim\.Optimizer .*, got (NoneType|Linear|Const\w*); expected one",
        *map(wraps, (lambda f: None, lambda f: MODULE)),
        wraps(lambda f: torch.optim.lr_scheduler.ConstantLR(f.inner)),
    ),
    (
        TypeError,
        r"got (Around|Lookahead); .*around another one, wrap that inside",
        wraps(lambda f: Around(f.inner)),
        wraps(lambda f: Lookahead(f.inner)),
    ),
    (ValueError, "would clip twice; to change its rule, set", wraps(lambda f: f.optimizer)),
    (TypeError, "max_norm must be a number", wraps(inner_of, "1"), wraps(inner_of, True)),
    (TypeError, r"max_norm must be.*got None .*; float\('inf'\) measures", wraps(inner_of, None)),
    (TypeError, "clip must be a number", set_to("clip", "1"), set_to("clip", True)),
    (TypeError, r"clip must be.*got None .*; float\('inf'\) measures", set_to("clip", None)),
    (ValueError, "must be 0 or more, got -1.0", wraps(inner_of, -1.0), set_to("clip", -1.0)),
    (ValueError, "must be 0 or more, got nan", wraps(inner_of, NAN), set_to("clip", NAN)),
    (
        ValueError,
        POLICY,
        *(wraps(inner_of, nonfinite=policy) for policy in ("ignore", None, True)),
        *(set_to("nonfinite", policy) for policy in ("ignore", None, True)),
    ),
    (
        ValueError,
        DIFFERENTIABLE,
        wraps(lambda f: differentiable()),
        mostly_differentiable(
            lambda w: w.add_param_group({**group_of(1.0), "differentiable": True})
        ),
        # By default.
        mostly_differentiable(lambda w: w.add_param_group(group_of(1.0))),
        mostly_differentiable(lambda w: w.load_state_dict(differentiable().state_dict())),
    ),
    (ValueError, "has an option 'clip' of its own", own_option),
    (TypeError, OF_A_GROUP, *for_rules(lambda rule: steps(group_rule(rule)))),
    (TypeError, OF_A_GROUP, *for_rules(made_of_groups)),
    (ValueError, OF_A_GROUP, steps(group_rule(-1.0)), made_of_groups(-1.0)),
    (TypeError, OF_THE_THIRD, *for_rules(added)),
    (ValueError, OF_THE_THIRD, added(-1.0)),
    (TypeError, r"complex gradients \(param_groups\[2\]\['params'\]\[0\]\)", complex_group()),
    (TypeError, r"complex gradients \(param_groups\[1\]", complex_group(None)),
    (
        ValueError,
        OVERLAP,
        overlapping(),
        overlapping(left_out=True),
        overlapping(clip=0.5),
        overlapping(known=True),
        overlapping(known=True, clip=0.5),
    ),
]


@each_refused(OPTIMIZERS)
def test_an_optimizer_or_a_step_is_refused_and_changes_nothing(call, error, message):
    Fresh().check(call, error, message)


def made(kind: Any, *arguments: Any, **options: Any) -> Callable[[Fresh], object]:
    return lambda f: kind(*arguments, **options)


def by_norms(argument: str, values: Any) -> list[Any]:
    kinds = (ClipByGlobalNorm, ClipByNorm)
    return [made(kind, **{"max_norm": 1.0, argument: x}) for kind in kinds for x in values]


def replaced(rule: Any) -> Callable[[Fresh], object]:
    return lambda f: dataclasses.replace(rule, **{dataclasses.fields(rule)[0].name: NAN})


def either_bound(bound: Any) -> list[Any]:
    return [made(ClipByValue, bound), made(ClipByValue, -9.0, bound)]


def own(parent: Any = Rule, **members: Any) -> Any:
    """A class of rules of a user."""
    return type("Own", (parent,), {"limit": lambda self, measured: measured.norm() / 2, **members})


def of_own(name: str, value: Any) -> list[Any]:
    """A call and a wrapper by a rule with a wrong order or eps."""
    rule = own(**{name: value})()
    return [clips(rule), wraps(inner_of, rule)]


def saved_state(**changed: Any) -> dict[str, Any]:
    return {"kind": "", "steps": 0, "parameters": None, "values": None, **changed}


NO_STATES: list[Any] = [
    *({}, [1], None, saved_state(kind=7), saved_state(steps=2**62), saved_state(parameters=-1)),
    *(saved_state(values=[1.0, []]), saved_state(values=[2**1024])),
]
NUMBERS = (-1.0, -1e-30, NAN), (True, "big", None, [1.0], 1j)
ON_A_CPU = r"on the CPU, got one on meta.*item\(\)"
RULES: list[Refused] = [
    (
        ValueError,
        r"ClipState\.state_dict",
        *(lambda f, wrong=wrong: f.state.load_state_dict(wrong) for wrong in NO_STATES),
    ),
    *((ValueError, name, *by_norms(name, NUMBERS[0])) for name in ("max_norm", "norm_type", "eps")),
    *((TypeError, name, *by_norms(name, NUMBERS[1])) for name in ("max_norm", "norm_type", "eps")),
    (ValueError, r"max_norm.*-3\.5", *by_norms("max_norm", [-3.5])),
    (ValueError, "min|max", *(made(ClipByValue, *x) for x in ((NAN,), (NAN, 1.0), (0.0, NAN)))),
    (TypeError, "min|max", *(made(ClipByValue, x) for x in (True, "1", 1j))),
    (TypeError, "min", made(ClipByValue, False, 1.0), made(ClipByValue, None, 1.0)),
    (TypeError, "max", made(ClipByValue, 0.0, True), made(ClipByValue, 0.0, "1")),
    (TypeError, "min|max", made(ClipByValue, [1.0], [2.0])),
    (
        ValueError,
        r"2\.5.*-1\.5; the lower bound comes first: ClipByValue",
        made(ClipByValue, 2.5, -1.5),
    ),
    (
        ValueError,
        r"^min, which without max bounds the absolute value,.* got -1\.5; write ClipBy",
        made(ClipByValue, -1.5),
    ),
    *((ValueError, "max_norm", replaced(rule)) for rule in (GLOBAL, EACH)),
    (ValueError, "min", replaced(VALUE)),
    (TypeError, "must be a number", *either_bound(torch.ones(2)), *either_bound(T(True))),
    (TypeError, "must be a number", *either_bound(T(1j))),
    *(
        (error, name, *(made(ClipByUnitNorm, **{name: x}) for x in values))
        for error, values in ((ValueError, (-1.0, NAN)), (TypeError, (True, "big")))
        for name in ("ratio", "eps")
    ),
    (ValueError, "eps must be finite", made(ClipByUnitNorm, eps=INF)),
    (TypeError, ON_A_CPU, *either_bound(torch.ones((), device="meta"))),
    (TypeError, "min must be a number, got 'a'", made(ClipByValue, "a", lambda step: 1.0)),
    (ValueError, "between 0 and 1, got 99.5; write 0.995 for 99.5%$", made(ClipByQuantile, 99.5)),
    *(
        (ValueError, f"must lie between 0 and 1, got {x}$", made(ClipByQuantile, x))
        for x in (0.0, 1.0, 100.0, -0.5)
    ),
    (TypeError, "Own overrides limit, .*ClipByGlobalNorm or Rule instead", made(own, ClipByValue)),
    (
        TypeError,
        "Own overrides limit, .*override advance instead",
        made(own, ClipByOwnHistory),
        made(own, AdaptiveRule),
    ),
    (ValueError, "Own: eps must be 0 or more, got -10.0", *of_own("eps", -10.0)),
    (ValueError, "Own: eps must be 0 or more, got nan", *of_own("eps", NAN)),
    (TypeError, "Own: eps must be a number, got None", *of_own("eps", None)),
    (TypeError, "Own: norm_type must be a number, got '2'", *of_own("norm_type", "2")),
    (ValueError, "Own: norm_type must be from 1 to inf, got 0.5", *of_own("norm_type", 0.5)),
    (ValueError, "norm_type must be from 1 to inf, got 0.5", *by_norms("norm_type", [0.5])),
    (
        ValueError,
        "limit of Own must be 0 or more, got -1.0",
        clips(own(limit=lambda self, measured: T(-1.0))()),
    ),
]


@each_refused(RULES)
def test_a_rule_is_refused_and_changes_nothing(call, error, message):
    Fresh().check(call, error, message)


@pytest.mark.parametrize(("name", "value"), [("norm_type", -1.0), ("eps", NAN)])
def test_a_rule_that_turns_wrong_is_refused_by_a_step(name, value):
    f, rule = Fresh(), own()()
    f.optimizer.clip = rule
    f.optimizer.step()
    setattr(rule, name, value)
    with untouched([*f.params, *f.grads]), pytest.raises(ValueError, match=f"Own: {name} must be"):
        f.optimizer.step()
