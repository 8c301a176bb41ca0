"""make_fx and FakeTensorMode: a call is one operator, and values do not become constants.

torch checks that operator itself, and it adds little to a call.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

import tritonclip
from helpers.cases import INTERPRETED, Operators, assert_bits, grad_of, normal, parameters
from helpers.serving import forget_plans
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByQuantile,
    ClipByValue,
    ClippedOptimizer,
    ClipState,
)
from tritonclip.engine import compiled

# Tracing fills memory with what a test would take for ours.
pytestmark = pytest.mark.plain_empty
CALLS = {
    "clip_": lambda params: tritonclip.clip_(params, 1.0),
    "order inf": lambda params: tritonclip.clip_(params, ClipByGlobalNorm(1.0, torch.inf)),
    "value": lambda params: tritonclip.clip_(params, ClipByValue(-0.3, 0.2)),
    "zero": lambda params: tritonclip.clip_(params, 1.0, nonfinite="zero"),
    "clip_grad_norm_": lambda params: tritonclip.clip_grad_norm_(params, 1.0),
    "clip_grad_value_": lambda params: tritonclip.clip_grad_value_(params, 0.3),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
SIZES = [(7, 3, 20), *([] if INTERPRETED else [(5,) * 30])]
sizes_of_lists = pytest.mark.parametrize("sizes", SIZES, ids=len)


def grads_of(device, sizes, scale=1.0):
    return [normal(n, device=device, seed=i) * scale for i, n in enumerate(sizes)]


def step_of(call):
    """A function of gradients: the result of a call on parameters that have them, and theirs."""

    def step(grads):
        params = parameters([grad.clone() for grad in grads])
        result = call(params)
        return [*([] if result is None else [result]), *map(grad_of, params)]

    return step


@pytest.mark.covering(1 if INTERPRETED else 2)
@each_call
@sizes_of_lists
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_call_is_right_for_gradients_that_the_trace_has_not_seen(device, call, sizes, mode):
    step = step_of(call)
    graph = make_fx(step, tracing_mode=mode)(grads_of(device, sizes))
    for scale in (1.0, 30.0, 1e-3):
        assert_bits(graph(grads_of(device, sizes, scale)), step(grads_of(device, sizes, scale)))


@pytest.mark.covering(2)
@each_call
@sizes_of_lists
def test_simulated_call_has_the_form_of_a_real_one(device, call, sizes):
    real = step_of(call)(grads_of(device, sizes))
    with FakeTensorMode():
        simulated = step_of(call)(grads_of(device, sizes))
    assert [(x.shape, x.dtype, x.device) for x in simulated] == [
        (x.shape, x.dtype, x.device) for x in real
    ]


def test_traced_call_looks_at_each_gradient_a_fixed_number_of_times():
    """Half a million comparisons of 1,000 gradients would take longer than all else."""

    def frames(n: int) -> int:
        found = 0

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal found
            found += event == "call" and frame.f_code.co_filename == compiled.__file__

        with FakeTensorMode():
            params = parameters(grads_of("cpu", (1,) * n))
            sys.setprofile(count)
            try:
                tritonclip.clip_(params, 1.0)
            finally:
                sys.setprofile(None)
        return found

    assert frames(40) - frames(20) == 2 * (frames(20) - frames(10))


def wrapped(params):
    return ClippedOptimizer(torch.optim.SGD(params, lr=0.1), ClipByNorm(0.5)).step()


REFUSED = "make_fx.*expected clip_, clip_grad_norm_ or clip_grad_value_ by global norm"
GROUP: Any = object()
REFUSED_CALLS: dict[str, Any] = {
    "each norm": lambda params: tritonclip.clip_(params, ClipByNorm(0.5)),
    "scaled": lambda params: tritonclip.clip_(params, 1.0, grad_scale=4.0),
    "get_total_norm": lambda params: tritonclip.get_total_norm([p.grad for p in params]),
    "clip_grads_with_norm_": lambda params: tritonclip.clip_grads_with_norm_(
        params, 1.0, grad_of(params[0]).norm()
    ),
    "adaptive": lambda params: tritonclip.clip_(params, ClipByQuantile(0.9), state=ClipState()),
    "scheduled": lambda params: tritonclip.clip_(
        params, ClipByNorm(lambda _: 1.0), state=ClipState()
    ),
    "wrapped": wrapped,
    "named": lambda params: tritonclip.norms_by_name(params)["parameters[0]"],
    "grouped": lambda params: tritonclip.clip_(params, 1.0, process_group=GROUP),
}


@pytest.mark.parametrize("call", REFUSED_CALLS.values(), ids=REFUSED_CALLS)
def test_calls_whose_decisions_would_become_constants_are_refused(device, call):
    """Traced, also before dispatch, or simulated, where there are no values to read."""
    step = step_of(call)
    with pytest.raises(RuntimeError, match=REFUSED):
        make_fx(step, pre_dispatch=call is REFUSED_CALLS["each norm"])(grads_of(device, (7, 3)))
    with FakeTensorMode(), pytest.raises(RuntimeError, match=REFUSED):
        step(grads_of(device, (7, 3)))


def test_trace_writes_no_row_of_a_recorder(tmp_path):
    recorder = tritonclip.record(tmp_path / "norms.csv")
    with pytest.raises(RuntimeError, match=REFUSED):
        make_fx(lambda norm: recorder.add_(norm))(torch.ones(()))
    recorder.add_(2.0)
    recorder.close()
    assert len((tmp_path / "norms.csv").read_text().splitlines()) == 2


@pytest.mark.covering(1)
@each_call
def test_functional_graph_is_right_for_other_gradients(device, call):
    """By AOTAutograd, which sees the gradients as functional tensors."""
    step = step_of(call)
    graph = aot_function(lambda *grads: step(grads), fw_compiler=lambda graph, _: graph)
    graph(*grads_of(device, (7, 3)))
    others = grads_of(device, (7, 3), 30.0)
    assert_bits(graph(*[other.clone() for other in others]), step(others))


OPERATOR_CALLS: dict[str, Callable[[list[Any]], Any]] = {
    "clip_": lambda params: tritonclip.clip_(params, 1.0),
    "within the limit": lambda params: tritonclip.clip_(params, 1e4),
    "order inf": lambda params: tritonclip.clip_(params, ClipByGlobalNorm(1.0, torch.inf)),
    "value": lambda params: tritonclip.clip_(params, ClipByValue(-0.3, 0.2)),
    "zero": lambda params: tritonclip.clip_(params, 1.0, nonfinite="zero"),
    "error": lambda params: tritonclip.clip_(params, 1.0, nonfinite="error"),
}
each_operator = pytest.mark.parametrize("call", OPERATOR_CALLS.values(), ids=OPERATOR_CALLS)


def make(device: torch.device) -> list[Any]:
    shapes = [(2, 3), (5,), ()]
    return parameters(normal(shape, device=device, seed=i) for i, shape in enumerate(shapes))


def operator_of(call: Callable[[list[Any]], Any], device: torch.device) -> tuple[Any, list[Any]]:
    """The operator of a call, and its arguments."""
    found: list[tuple[Any, Any]] = []

    class Finder(Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if getattr(target, "namespace", "") == "tritonclip":
                found.append((target, [*args, *kwargs.values()]))
            return super().call_function(target, args, kwargs)

    def step(weights: list[Tensor], grads: list[Tensor]) -> Any:
        params = [weight.detach().requires_grad_() for weight in weights]
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad
        return call(params)

    params = make(device)
    weights = [weight.detach().clone() for weight in params]
    grads = [grad_of(weight).clone() for weight in params]
    graph = make_fx(step)(weights, grads)
    Finder(graph).run(weights, grads)
    ((operator, arguments),) = found
    return operator, arguments


@pytest.mark.covering(1)
@each_operator
@pytest.mark.parametrize("has_derivative", [False, True], ids=["plain", "differentiable"])
def test_operator_passes_the_checks_of_torch(device, call, has_derivative):
    operator, (tensors, *others) = operator_of(call, device)
    tensors = [tensor.detach().clone().requires_grad_(has_derivative) for tensor in tensors]
    torch.library.opcheck(operator, (tensors, *others))


@each_operator
def test_operators_are_kept_out_of_cuda_graphs_of_torch_compile(call):
    """Their tables would lie in the memory of the graph; some read a value on the host."""
    with FakeTensorMode(), Operators() as operators:
        call(parameters([torch.ones(2, 3, device="cuda"), torch.ones(5, device="cuda")]))
    (operator,) = [one for one, *_ in operators.calls if one.namespace == "tritonclip"]
    assert torch.Tag.cudagraph_unsafe in operator.tags


@pytest.mark.covering(0)
@each_operator
def test_operator_adds_no_layers_of_python(device, call):
    """As `torch.library.custom_op` has them: they take longer than clipping a small model."""
    operator, arguments = operator_of(call, device)
    operator(*arguments)
    entered = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        operator(*arguments)
    finally:
        sys.setprofile(None)
    assert not [path for path in entered if "_library" in path or "_dynamo" in path]


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1.0), ClipByValue(0.3)], ids=["norm", "value"])
def test_operators_and_eager_calls_share_a_plan(device, rule, built):
    forget_plans()
    params = make(device)
    tritonclip.clip_(params, rule)
    operator, (_, *others) = operator_of(lambda params: tritonclip.clip_(params, rule), device)
    del built[:]
    for _ in range(2):
        operator(list(map(grad_of, params)), *others)
        tritonclip.clip_(params, rule)
    assert not built
