"""The operator that graphs hold: torch's own checks of it, and how much it adds to a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tritonclip
from helpers.cases import grad_of, normal, parameters
from helpers.serving import forget_plans
from tritonclip import ClipByGlobalNorm, ClipByValue

# Tracing fills memory with what a test would take for ours.
pytestmark = pytest.mark.plain_empty


CALLS: dict[str, Callable[[list[Any]], Any]] = {
    "clip_": lambda params: tritonclip.clip_(params, 1.0),
    "within the limit": lambda params: tritonclip.clip_(params, 1e4),
    "order inf": lambda params: tritonclip.clip_(params, ClipByGlobalNorm(1.0, torch.inf)),
    "value": lambda params: tritonclip.clip_(params, ClipByValue(-0.3, 0.2)),
    "zero": lambda params: tritonclip.clip_(params, 1.0, nonfinite="zero"),
    "error": lambda params: tritonclip.clip_(params, 1.0, nonfinite="error"),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


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
@each_call
@pytest.mark.parametrize("has_derivative", [False, True], ids=["plain", "differentiable"])
def test_operator_passes_the_checks_of_torch(device, call, has_derivative):
    operator, (tensors, *others) = operator_of(call, device)
    tensors = [tensor.detach().clone().requires_grad_(has_derivative) for tensor in tensors]
    torch.library.opcheck(operator, (tensors, *others))


class Noting(TorchDispatchMode):
    """Notes the operators of tritonclip."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tritonclip":
            self.operators.append(func)
        return func(*args, **(kwargs or {}))


@each_call
def test_operators_are_kept_out_of_cuda_graphs_of_torch_compile(call):
    """Their tables would lie in the memory of the graph; some read a value on the host."""
    with FakeTensorMode(), Noting() as noting:
        call(parameters([torch.ones(2, 3, device="cuda"), torch.ones(5, device="cuda")]))
    (operator,) = noting.operators
    assert torch.Tag.cudagraph_unsafe in operator.tags


@pytest.mark.covering(0)
@each_call
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
