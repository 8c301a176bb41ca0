"""Numbers that change from call to call in a compiled region: few graphs serve them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tritonclip
from helpers.cases import assert_bits, grad_of, parameters, unchanged
from helpers.graphs import COMPILING, compiled
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByRMS,
    ClipByUnitNorm,
    ClipByValue,
    ClipState,
    functional,
)

pytestmark = COMPILING
# A constant, the same as an input, and one more for a value that torch does not trace.
GRAPHS = 3
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "clip_": tritonclip.clip_,
    "global norm": lambda params, x: tritonclip.clip_(params, ClipByGlobalNorm(x)),
    "order": lambda params, x: tritonclip.clip_(params, ClipByGlobalNorm(1.0, x)),
    "eps": lambda params, x: tritonclip.clip_(params, ClipByGlobalNorm(1.0, eps=x)),
    "each norm": lambda params, x: tritonclip.clip_(params, ClipByNorm(x)),
    "RMS": lambda params, x: tritonclip.clip_(params, ClipByRMS(x)),
    "unit": lambda params, x: tritonclip.clip_(params, ClipByUnitNorm(x)),
    "value": lambda params, x: tritonclip.clip_(params, ClipByValue(x)),
    "two values": lambda params, x: tritonclip.clip_(params, ClipByValue(-2.0, x)),
    "grad_scale": lambda params, x: tritonclip.clip_(params, 1.0, grad_scale=x),
    "unit grad_scale": lambda params, x: tritonclip.clip_(params, ClipByUnitNorm(), grad_scale=x),
    "clip_grad_norm_": tritonclip.clip_grad_norm_,
    "clip_grad_norm_ order": lambda params, x: tritonclip.clip_grad_norm_(params, 1.0, x),
    "clip_grad_value_": tritonclip.clip_grad_value_,
    "get_total_norm": lambda params, x: tritonclip.get_total_norm([p.grad for p in params], x),
    "clip_grads_with_norm_": lambda params, x: tritonclip.clip_grads_with_norm_(
        params, x, torch.tensor(5.0)
    ),
    "clip_grads_with_norm_ norm": lambda params, x: tritonclip.clip_grads_with_norm_(
        params, 1.0, x
    ),
}
OUT_OF_PLACE: dict[str, Callable[[Any, float], Any]] = {
    "global norm": lambda x, limit: functional.clip_by_global_norm([x], limit)[0][0],
    "norm": lambda x, limit: functional.clip_by_norm(x, limit),
    "value": lambda x, limit: functional.clip_by_value(x, -2.0, limit),
    "backward by norm": lambda x, limit: tritonclip.clip_backward(x, ClipByNorm(limit)),
    "backward by value": lambda x, limit: tritonclip.clip_backward(x, ClipByValue(limit)),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
VALUES = [1 + 0.1 * i for i in range(12)]
KINDS: dict[str, Callable[[float], Any]] = {
    "number": lambda x: x,
    "integer": lambda x: round(10 * x),
    "tensor": lambda x: torch.tensor(x, dtype=torch.float64),
    "one element": lambda x: torch.tensor([x]),
}


def make(device: torch.device) -> list[torch.Tensor]:
    return parameters([torch.tensor([[3.0, -4.0]], device=device), torch.ones(3, device=device)])


def assert_same(ours: Any, eager: Any) -> None:
    assert_bits(map(grad_of, ours), map(grad_of, eager))


def check(call: Callable[..., Any], device: torch.device, arguments: list[Any]) -> None:
    """Each argument has the result of eager mode, and few graphs serve all."""
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(call, fullgraph=True, backend=counter)
    for argument in arguments:
        ours, eager = make(device), make(device)
        measured, expected = traced(ours, argument), call(eager, argument)
        assert_same(ours, eager)
        if expected is not None:
            assert_bits([measured], [expected])
    assert 0 < counter.frame_count <= GRAPHS


@pytest.mark.covering(1)
@each_call
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_compiled_call_with_a_number_that_changes_has_few_graphs(device, call, kind):
    check(call, device, [kind(value) for value in VALUES])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_compiled_call_out_of_place_with_a_number_that_changes_has_few_graphs(device, name):
    if "value" in name and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 makes a graph for each number by which torch.clamp bounds")
    call = OUT_OF_PLACE[name]
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(call, fullgraph=True, backend=counter)
    for value in VALUES:
        x = torch.tensor([3.0, -4.0, 1.05], device=device, requires_grad=True)
        results = [call(x, value), traced(x, value)]
        torch.testing.assert_close(*results, rtol=1e-6, atol=0)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in results]
        # Differences of terms up to 8: one unit in the last place is 5e-7.
        torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)
    assert 0 < counter.frame_count <= GRAPHS


@pytest.mark.covering(0)
def test_compiled_call_with_a_rule_that_changes_has_few_graphs(device):
    check(tritonclip.clip_, device, [ClipByNorm(value) for value in VALUES])


@pytest.mark.covering(0)
def test_compiled_call_with_a_number_that_changes_takes_inf(device):
    check(tritonclip.clip_, device, [*VALUES[:3], torch.inf, 0.0, -0.0, VALUES[3]])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("call", "bad", "message"),
    [
        ("clip_", -1.0, r"max_norm must be 0 or more, got -1\.0"),
        ("clip_", torch.nan, "max_norm must be 0 or more, got nan"),
        ("value", -1.0, "must not exceed max|0 or more"),
        ("eps", torch.inf, "eps must be finite"),
        ("grad_scale", 0.0, "grad_scale must be positive"),
        ("get_total_norm", -1.0, "norm_type must be positive"),
        ("clip_grads_with_norm_", -1.0, "max_norm must be 0 or more"),
    ],
)
def test_compiled_call_refuses_a_bad_number_in_a_tensor(device, call, bad, message):
    params = make(device)
    with unchanged(map(grad_of, params)), pytest.raises(ValueError, match=message):
        compiled(CALLS[call])(params, torch.tensor(bad))


@pytest.mark.covering(0)
def test_call_outside_takes_a_rule_that_a_compiled_region_made_of_a_tensor(device):
    rule = compiled(ClipByNorm)(torch.tensor(1.0))
    ours, eager = make(device), make(device)
    tritonclip.clip_(ours, rule)
    tritonclip.clip_(eager, ClipByNorm(1.0))
    assert_same(ours, eager)


@pytest.mark.covering(0)
def test_compiled_call_that_breaks_the_graph_takes_a_limit_in_a_tensor(device):
    ours, eager = make(device), make(device)

    def step(params: Any, limit: Any, state: ClipState) -> Any:
        return tritonclip.clip_(params, ClipByValue(limit), state=state)

    torch.compile(step, backend="aot_eager")(ours, torch.tensor(0.5), ClipState())
    tritonclip.clip_(eager, ClipByValue(0.5))
    assert_same(ours, eager)
