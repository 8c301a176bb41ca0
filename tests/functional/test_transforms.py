"""Under torch.vmap, torch.func, torch.compile and autocast calls give what plain calls give."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import tritonclip
from helpers.cases import assert_bits, grad_of, normal
from helpers.graphs import NEEDS_DYNAMO
from tritonclip import functional
from tritonclip.backends import choose

FUNCTIONS = {
    "value": lambda x: functional.clip_by_value(x, -0.3, 0.4),
    "value-of-tensors": lambda x: functional.clip_by_value(x, x.detach() - 0.1, torch.tensor(0.4)),
    "norm": lambda x: functional.clip_by_norm(x, 0.5),
    "norm-unclipped": lambda x: functional.clip_by_norm(x, 50.0),
    "norm-3": lambda x: functional.clip_by_norm(x, 0.5, norm_type=3.0),
    "columns": lambda x: functional.clip_by_norm(x, 0.5, dim=0),
    "average": lambda x: functional.clip_by_average_norm(x, 0.01),
    "rms": lambda x: functional.clip_by_rms(x, 0.1),
    "global": lambda x: functional.clip_by_global_norm({"a": x, "b": [x[0], None]}, 0.5)[0]["a"],
    "global-norm": lambda x: functional.global_norm([x]),
    "known": lambda x: functional.clip_by_global_norm([x], 0.5, use_norm=x.square().sum())[0][0],
    "limit": lambda x: functional.clip_by_norm(x, x.abs().max()),
}
# Values of float32 with a coefficient rounded once, and sums in another order.
CLOSE: dict[str, Any] = {"rtol": 2e-6, "atol": 1e-7}

named = pytest.mark.parametrize("name", FUNCTIONS)
# Of torch itself: when it first makes a dual tensor, and while it traces.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def loss_by(name):
    def loss(x):
        y = FUNCTIONS[name](x)
        return (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape)).sum()

    return loss


def slope_of(loss, x):
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(x), x)
    return slope


@named
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_is_a_call_for_each(name, dim):
    batch = normal((5, 3, 4)).movedim(0, dim)
    mapped = torch.vmap(FUNCTIONS[name], in_dims=dim)(batch)
    expected = torch.stack([FUNCTIONS[name](x) for x in batch.unbind(dim)])
    torch.testing.assert_close(mapped, expected, **CLOSE)


@named
def test_grad_and_vmap_give_derivatives_by_example_in_either_order(name):
    batch, loss = normal((5, 3, 4)), loss_by(name)
    expected = torch.stack([slope_of(loss, x) for x in batch])
    slope = torch.func.grad(lambda batch: torch.vmap(loss)(batch).sum())(batch)
    torch.testing.assert_close(slope, expected, **CLOSE)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(batch), expected, **CLOSE)


# The bounds of the other one move with x.detach(): its second derivative is another matter.
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "value-of-tensors"])
def test_hessians_are_symmetric_and_those_of_autograd(name):
    x, loss = normal((3, 4), torch.float64), loss_by(name)
    hessian = torch.func.hessian(loss)(x).reshape(12, 12)
    torch.testing.assert_close(hessian, hessian.T)
    expected = torch.autograd.functional.hessian(loss, x).reshape(12, 12)
    torch.testing.assert_close(hessian, expected)


@named
def test_func_grad_and_jvp_are_the_derivative(name):
    x, way, loss = normal((3, 4)), normal((3, 4), seed=1), loss_by(name)
    slope, along = slope_of(loss, x), torch.func.jvp(loss, (x,), (way,))[1]
    torch.testing.assert_close(torch.func.grad(loss)(x), slope, **CLOSE)
    torch.testing.assert_close(along, (slope * way).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.plain_empty
@pytest.mark.usefixtures("fresh_compiler")
@named
def test_compile_traces_the_whole_call_and_its_derivative(name):
    loss = loss_by(name)
    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 1e-3, 30.0):
        x = normal((3, 4)) * scale
        torch.testing.assert_close(traced(x), loss(x), **CLOSE)
        torch.testing.assert_close(slope_of(traced, x), slope_of(loss, x), **CLOSE)


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Tensor


pytree.register_dataclass(Pair)


@pytest.mark.plain_empty
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "tree",
    [{"a": [torch.ones(3), None], "b": (torch.ones(2),)}, [Pair(torch.ones(3), torch.ones(2))]],
    ids=["containers", "dataclass"],
)
def test_compile_traces_structures(tree):
    def step(tree):
        clipped, norm = functional.clip_by_global_norm(tree, 1.0)
        return functional.global_norm(clipped), norm

    found, norm = torch.compile(step, fullgraph=True, backend="aot_eager")(tree)
    torch.testing.assert_close(found, torch.tensor(1.0))
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(5.0)))


@pytest.mark.plain_empty
@named
def test_export_keeps_the_values(name):
    class Model(torch.nn.Module):
        def forward(self, x):
            return FUNCTIONS[name](x)

    x = normal((3, 4))
    exported = torch.export.export(Model(), (normal((3, 4), seed=1),)).module()
    torch.testing.assert_close(exported(x), FUNCTIONS[name](x), **CLOSE)


LAYER = torch.nn.Linear(3, 2)


@pytest.mark.plain_empty
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "call",
    [
        lambda batch: functional.global_norm([*LAYER.parameters()]),
        torch.vmap(FUNCTIONS["global"]),
    ],
    ids=["parameters", "vmap"],
)
def test_compiled_calls_are_eager_ones(call):
    batch = normal((5, 3, 4))
    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(batch), call(batch), **CLOSE)


@pytest.mark.parametrize("transformed", [False, True])
@named
def test_autocast_changes_nothing(name, transformed):
    function = FUNCTIONS[name]
    call = (lambda x: torch.func.vjp(function, x)[0]) if transformed else function
    x = normal((3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = call(x)
    assert_bits([under], [call(x)])


def test_autocast_derivatives_of_half_activations_are_finite():
    layer = torch.nn.Linear(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = layer(torch.ones(2, 3))
        loss = functional.clip_by_norm(hidden, 0.5, dim=1).square().sum()
    loss.backward()
    assert hidden.dtype == torch.bfloat16
    assert bool(grad_of(layer.weight).isfinite().all())


@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_transforms_survive_squares_that_overflow_or_vanish(value):
    batch = torch.full((2, 1000), value)
    clipped = torch.vmap(lambda x: functional.clip_by_norm(x, value))(batch)
    torch.testing.assert_close(functional.global_norm(clipped[0]), torch.tensor(value))
    slope = torch.func.grad(lambda x: functional.clip_by_norm(x, value)[0])(batch[0])
    # (1 - 1/1000) / sqrt(1000) for the first, -1/1000 / sqrt(1000) for the others.
    torch.testing.assert_close(slope[0], torch.tensor(0.999 / math.sqrt(1000)))
    torch.testing.assert_close(slope[1], torch.tensor(-0.001 / math.sqrt(1000)))


def test_transforms_say_once_that_kernels_would_serve(monkeypatch):
    monkeypatch.setattr(choose, "_reason_against", lambda name, on: None)
    choose._warn_once.cache_clear()
    mapped = torch.vmap(lambda x: functional.clip_by_norm(x, 1.0))
    with tritonclip.use_backend("triton"):
        with pytest.warns(UserWarning, match=r"kernels cannot read tensors inside torch\.func"):
            mapped(normal((2, 3)))
        mapped(normal((2, 3)))
    choose._warn_once.cache_clear()


def test_backend_that_cannot_serve_raises(monkeypatch):
    monkeypatch.setattr(choose, "triton_fault", lambda: "it is away: bring it back")
    with tritonclip.use_backend("triton"), pytest.raises(RuntimeError, match="it is away"):
        functional.clip_by_global_norm([normal(3)], 1.0)


def grads_of(device, scale=1.0):
    return [normal(n, device=device, seed=n) * scale for n in (7, 3)]


@pytest.mark.plain_empty
def test_traced_functions_out_of_place_are_right_for_other_tensors(device):
    def step(grads):
        clipped, norm = functional.clip_by_global_norm(grads, 1.0)
        return [*clipped, norm, *functional.clip_by_value(grads, min=-0.3, max=0.2)]

    graph = make_fx(step)(grads_of(device))
    for scale in (1.0, 30.0, 1e-3):
        others = grads_of(device, scale)
        torch.testing.assert_close(graph(others), step(others))


@pytest.mark.plain_empty
def test_trace_before_dispatch_of_functions_out_of_place_holds_no_constant(device):
    def step(grads):
        return [*functional.clip_by_norm(grads, 0.5)]

    graph = make_fx(step, pre_dispatch=True)(grads_of(device))
    torch.testing.assert_close(graph(grads_of(device, 30.0)), step(grads_of(device, 30.0)))


# A constant, the same as an input, and one more for a value that torch does not trace.
GRAPHS = 3
OUT_OF_PLACE: dict[str, Any] = {
    "global norm": lambda x, limit: functional.clip_by_global_norm([x], limit)[0][0],
    "norm": functional.clip_by_norm,
    "value": lambda x, limit: functional.clip_by_value(x, -2.0, limit),
}


@NEEDS_DYNAMO
@pytest.mark.plain_empty
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_compiled_call_out_of_place_with_a_number_that_changes_has_few_graphs(device, name):
    """A limit that changes from call to call: few graphs serve all limits."""
    if "value" in name and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 makes a graph for each number by which torch.clamp bounds")
    call, counter = OUT_OF_PLACE[name], CompileCounterWithBackend("aot_eager")
    traced = torch.compile(call, fullgraph=True, backend=counter)
    for value in (1 + 0.1 * i for i in range(12)):
        x = torch.tensor([3.0, -4.0, 1.05], device=device, requires_grad=True)
        results = [call(x, value), traced(x, value)]
        torch.testing.assert_close(*results, rtol=1e-6, atol=0)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in results]
        # Differences of terms up to 8: one unit in the last place is 5e-7.
        torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)
    assert 0 < counter.frame_count <= GRAPHS
