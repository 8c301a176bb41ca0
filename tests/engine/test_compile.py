"""``torch.compile(fullgraph=True)`` traces a step with a clip in it, and the result is the same.

A training step as users compile it has clipping and the update in one graph, and is five steps
long: forward and backward run outside of the graph, which is called again and again on gradients
that were set to zero or made anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.two_tensor import TwoTensor

import tritonclip
from helpers.cases import assert_bits, copies, grad_of, normal, parameter, parameters, unchanged
from helpers.graphs import COMPILING, compiled
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue, ClipState

pytestmark = COMPILING

RULES = [
    pytest.param(1.0, id="number"),
    pytest.param(ClipByGlobalNorm(0.5), id="global"),
    pytest.param(ClipByGlobalNorm(0.5, norm_type=torch.inf, eps=0.0), id="global-inf"),
    pytest.param(ClipByGlobalNorm(0.5, norm_type=3.0), id="global-p3"),
    pytest.param(ClipByValue(-0.1, 0.2), id="by-value"),
]
CALLS: dict[str, Any] = {
    "clip_grad_norm_": lambda params: tritonclip.clip_grad_norm_(params, 0.5),
    "clip_grad_value_": lambda params: tritonclip.clip_grad_value_(params, 0.1),
}
# Calls that no graph takes, of parameters and a number.
BREAKS: dict[str, Any] = {
    "by-norm": lambda params, x: tritonclip.clip_(params, ClipByNorm(x)),
    "by-unit": lambda params, x: tritonclip.clip_(params, ClipByUnitNorm(x)),
    "grad_scale": lambda params, x: tritonclip.clip_(params, 0.5, grad_scale=x),
    "state": lambda params, x: tritonclip.clip_(
        params, ClipByGlobalNorm(lambda _: x), state=ClipState()
    ),
    "iterator": lambda params, x: tritonclip.clip_(iter(params), ClipByNorm(x)),
    "clip_tensors_": lambda params, x: tritonclip.clip_tensors_([None, *grads_of(params)], x),
    "get_total_norm": lambda params, x: tritonclip.get_total_norm([None, *grads_of(params)], 2 + x),
    "clip_grads_with_norm_": lambda params, x: tritonclip.clip_grads_with_norm_(
        params, x, torch.tensor(0.625), eps=0.0
    ),
}
# Limits that have to be read.
READS: dict[str, Any] = {
    "clip_": lambda params, x: tritonclip.clip_(params, x),
    "rule": lambda params, x: tritonclip.clip_(params, ClipByValue(x)),
    "clip_grad_norm_": lambda params, x: tritonclip.clip_grad_norm_(params, x),
}
each_read = pytest.mark.parametrize("call", READS.values(), ids=READS)


def grads_of(params):
    return [param.grad for param in params]


def fill(params, scale=1.0):
    """New values in the same gradients, as accumulation does it."""
    for seed, one in enumerate(params):
        grad_of(one).copy_(normal(one.shape, one.dtype, seed=seed) * scale)


def make(device, dtypes=(torch.float32, torch.float32, torch.bfloat16)):
    forms = zip(((40,), (3, 5), (70,)), dtypes, strict=True)
    return parameters(normal(shape, dtype, device) for shape, dtype in forms)


def three_four(device):
    """A parameter whose gradient has a norm of 5."""
    return parameter(torch.tensor([3.0, 4.0], device=device))


def assert_equals_eager(step, device):
    """Clipped, below the limit, and clipped again: one graph must serve them all."""
    ours, eager = make(device), make(device)
    traced = compiled(step)
    for scale in (1.0, 1e-4, 30.0):
        fill(ours, scale)
        fill(eager, scale)
        torch.testing.assert_close(traced(ours), step(eager), rtol=1e-6, atol=0)
        for one, other in zip(ours, eager, strict=True):
            rtol = max(1e-6, torch.finfo(one.dtype).eps)
            torch.testing.assert_close(one.grad, other.grad, rtol=rtol, atol=0)
            torch.testing.assert_close(one.data, other.data, rtol=2e-2, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["propagate", "zero"])
def test_compiled_clip_equals_eager(device, rule, policy):
    assert_equals_eager(lambda params: tritonclip.clip_(params, rule, nonfinite=policy), device)


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", CALLS)
def test_compiled_torch_signature_equals_eager(device, call):
    assert_equals_eager(CALLS[call], device)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "form",
    [lambda m: m, lambda m: m.parameters(), lambda m: m.named_parameters()],
    ids=["module", "generator", "pairs"],
)
def test_compiled_clip_takes_every_form_of_parameters(device, form):
    module, again = (torch.nn.Linear(5, 3).to(device) for _ in range(2))
    for model in (module, again):
        for seed, one in enumerate(model.parameters()):
            one.grad = normal(one.shape, device=device, seed=seed)
    measured = compiled(lambda: tritonclip.clip_(form(module), 0.5))()
    assert torch.equal(measured, tritonclip.clip_(again, 0.5))
    assert_bits(map(grad_of, module.parameters()), map(grad_of, again.parameters()))


@pytest.mark.parametrize(
    "twice",
    [lambda one: one, lambda one: parameter(one.grad), lambda one: parameter(one.grad.detach())],
    ids=["parameter", "gradient", "memory"],
)
@pytest.mark.covering(1)
def test_compiled_clip_counts_what_is_listed_twice_once(device, twice):
    one = three_four(device)
    assert compiled(lambda given: tritonclip.clip_(given, 1.0))([one, twice(one)]).item() == 5.0
    torch.testing.assert_close(grad_of(one).cpu(), torch.tensor([0.6, 0.8]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES[1:])
def test_compiled_clip_with_error_policy_raises(device, rule):
    params = make(device)
    params[1].grad[0, 0] = torch.nan
    step = compiled(lambda given: tritonclip.clip_(given, rule, nonfinite="error"))
    with unchanged(map(grad_of, params)), pytest.raises(RuntimeError, match="non-finite"):
        step(params)


def test_compiled_clip_stays_one_graph_beside_a_parameter_of_another_class():
    """One without a gradient here, as frozen quantized weights are."""
    frozen = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)), requires_grad=False)
    (one,) = parameters([torch.tensor([3.0, 4.0])])
    assert compiled(lambda given: tritonclip.clip_(given, 1.0))([frozen, one]).item() == 5.0


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES[1:])
def test_compiled_clip_writes_gradients_without_copies(device, rule):
    """The code that inductor generates calls the operator on the gradients, and nothing else."""
    step = torch.compile(lambda given: tritonclip.clip_(given, rule), fullgraph=True)
    _, (code,) = run_and_get_code(step, make(device))
    run = code.split("def call(")[1].partition("return")[0]
    assert "torch.ops.tritonclip.clip_" in run
    assert not re.search(r"copy|clone|empty_strided|fused|\.run\(", run)


@pytest.mark.covering(1)
@pytest.mark.parametrize("graph", ["aot_eager", "inductor"])
def test_compiled_clip_is_seen_by_autograd(device, graph):
    one = three_four(device)
    weight = torch.ones(2, device=device, requires_grad=True)
    product = (weight * grad_of(one)).sum()
    torch.compile(lambda: tritonclip.clip_(one, 1.0), fullgraph=True, backend=graph)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.covering(1)
@pytest.mark.parametrize("graph", ["aot_eager", "inductor"])
# torch says so of the gradient itself while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_clip_of_gradients_with_a_derivative_equals_eager(device, graph):
    def clip(weight):
        return tritonclip.clip_(weight, 1.0)

    def results(step):
        weight = torch.tensor([3.0, 4.0], device=device, requires_grad=True)
        (weight.grad,) = torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
        norm = step(weight)
        assert not norm.requires_grad
        grad = grad_of(weight)
        return [norm, grad.detach(), *torch.autograd.grad(grad.sum(), weight)]

    assert_bits(results(torch.compile(clip, fullgraph=True, backend=graph)), results(clip))


def test_compiled_calls_refuse_marks():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    model[1].need_clip = False
    with pytest.raises(Exception, match="need_clip = False"):
        torch.compile(lambda: tritonclip.clip_(model, 0.0), backend="aot_eager")()


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", BREAKS)
def test_compiled_call_that_no_graph_takes_breaks_it(device, call):
    ours, eager = make(device), make(device)
    step = torch.compile(BREAKS[call], backend="aot_eager")
    for x in (0.5, 0.25):
        fill(ours)
        fill(eager)
        torch.testing.assert_close(step(ours, x), BREAKS[call](eager, x), rtol=0, atol=0)
        assert_bits(map(grad_of, ours), map(grad_of, eager))


@pytest.mark.covering(0)
@pytest.mark.parametrize("call", BREAKS)
def test_compiled_call_that_no_graph_takes_says_so_under_fullgraph(device, call):
    params = make(device)
    refused = pytest.raises(Exception, match="Make other calls outside of the compiled region")
    with unchanged(map(grad_of, params)), refused:
        compiled(BREAKS[call])(params, 0.5)


@pytest.mark.covering(1)
@each_read
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_compiled_call_takes_a_limit_that_changes(device, call, kind):
    """Each number is a constant of its own graph; a tensor is read, which breaks the graph."""
    step = torch.compile(call, fullgraph=kind is float, backend="aot_eager")
    for x in (0.5, 0.25, 0.0, 0.125, torch.inf):
        ours, eager = make(device), make(device)
        torch.testing.assert_close(step(ours, kind(x)), call(eager, kind(x)), rtol=0, atol=0)
        # PyTorch does not say whether a bound of 0 gives 0.0 or -0.0.
        torch.testing.assert_close([*map(grad_of, ours)], [*map(grad_of, eager)], rtol=0, atol=0)


@pytest.mark.covering(0)
@each_read
def test_compiled_call_refuses_a_bad_limit(device, call):
    params = make(device)
    with unchanged(map(grad_of, params)), pytest.raises(Exception, match="must be 0 or more"):
        compiled(call)(params, -1.0)


STEPS = 5
STEP_RULES = pytest.mark.parametrize(
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
@STEP_RULES
@UPDATES
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("set_to_none", [False, True], ids=["set to zero", "made anew"])
def test_compiled_step_equals_eager(device, rule, update, target, set_to_none):
    """In one graph, which is compiled once."""
    both = (Training(device, rule, target, update) for _ in range(2))
    run_both(both, set_to_none=set_to_none)


@pytest.mark.covering(1)
@STEP_RULES
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
@STEP_RULES
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
@STEP_RULES
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
