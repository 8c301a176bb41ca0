"""``torch.compile(fullgraph=True)`` traces a step with a clip in it, and the result is the same."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.two_tensor import TwoTensor

import tritonclip
from helpers.cases import assert_bits, copies, grad_of, normal, parameter, parameters, unchanged
from helpers.graphs import COMPILING, compiled
from helpers.units import make as make_units
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue

pytestmark = COMPILING

RULES = [
    pytest.param(1.0, id="number"),
    pytest.param(ClipByGlobalNorm(0.5), id="global"),
    pytest.param(ClipByGlobalNorm(0.5, norm_type=torch.inf, eps=0.0), id="global-inf"),
    pytest.param(ClipByGlobalNorm(0.5, norm_type=3.0), id="global-p3"),
    pytest.param(ClipByNorm(0.5), id="by-norm"),
    pytest.param(ClipByValue(-0.1, 0.2), id="by-value"),
]
HALF = numpy.float64(0.5)
CALLS: dict[str, Any] = {
    "clip_grads_with_norm_ without eps": lambda params: tritonclip.clip_grads_with_norm_(
        params, 0.5, torch.tensor(0.625), eps=0.0
    ),
    "get_total_norm with None": lambda params: tritonclip.get_total_norm([None, *grads_of(params)]),
    "clip_tensors_": lambda params: tritonclip.clip_tensors_(
        [params[0].grad, None, *grads_of(params)], ClipByNorm(0.5)
    ),
    "clip_tensors_ by name": lambda params: tritonclip.clip_tensors_(
        zip("abc", grads_of(params), strict=True), 0.5, grad_scale=8.0
    ),
    "clip_grad_norm_": lambda params: tritonclip.clip_grad_norm_(params, 0.5),
    "clip_grad_norm_ by NumPy": lambda params: tritonclip.clip_grad_norm_(params, HALF),
    "clip_grad_value_": lambda params: tritonclip.clip_grad_value_(params, 0.1),
    "get_total_norm": lambda params: tritonclip.get_total_norm(grads_of(params)),
    "clip_grads_with_norm_": lambda params: tritonclip.clip_grads_with_norm_(
        params, 0.5, params[0].grad.norm()
    ),
}


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
def test_compiled_clip_equals_eager(device, rule):
    assert_equals_eager(lambda params: tritonclip.clip_(params, rule), device)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES[1:])
def test_compiled_clip_with_zero_policy_and_grad_scale_equals_eager(device, rule):
    assert_equals_eager(
        lambda params: tritonclip.clip_(params, rule, nonfinite="zero", grad_scale=8.0), device
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", CALLS)
def test_compiled_torch_signature_equals_eager(device, call):
    assert_equals_eager(CALLS[call], device)


def test_compiled_clip_tensors_refuses_weights(device):
    params = make(device)
    with pytest.raises(Exception, match=r"is a parameter|requires grad"):
        compiled(lambda given: tritonclip.clip_tensors_(given, 0.5))(params)


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


@pytest.mark.covering(0)
def test_compiled_clip_takes_a_one_element_grad_scale(device):
    one, other = three_four(device), three_four(device)
    scale = torch.tensor([2.0])
    compiled(lambda given: tritonclip.clip_(given, 1.0, grad_scale=scale))([one])
    tritonclip.clip_([other], 1.0, grad_scale=scale)
    assert torch.equal(grad_of(one), grad_of(other))


@pytest.mark.covering(1)
@pytest.mark.parametrize("graph", ["aot_eager", "inductor"])
def test_compiled_clip_by_norm_refuses_one_memory_met_twice(device, graph):
    """The graph was promised as many norms as gradients, and has no way to learn of fewer."""
    grad = torch.tensor([3.0, 4.0], device=device)
    params = parameters([grad, grad.detach(), torch.tensor([6.0, 8.0], device=device)])
    step: Any = torch.compile(tritonclip.clip_, fullgraph=True, backend=graph)
    message = r"gradients\[1\] has the memory of an earlier one"
    with unchanged([grad]), pytest.raises(ValueError, match=message):
        step(params, ClipByNorm(1.0))


@pytest.mark.covering(0)
def test_compiled_clip_grads_with_norm_refuses_a_negative_norm(device):
    one = three_four(device)
    step = compiled(lambda norm: tritonclip.clip_grads_with_norm_([one], 1.0, norm))
    refused = pytest.raises(ValueError, match=r"total_norm must be 0 or more, got -5\.0")
    with unchanged([one.grad]), refused:
        step(torch.tensor(-5.0))


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


UNIT_SHAPES = [(5, 8), (3, 700), (70,), (2, 2)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("scale", [None, 4.0], ids=["unscaled", "scaled"])
def test_compiled_clip_by_unit_is_eager_clip_by_unit(device, policy, scale):
    """Clipped, below the limit, and clipped again: one graph must serve them all."""
    ours, eager = make_units(UNIT_SHAPES, device=device), make_units(UNIT_SHAPES, device=device)

    def step(parameters):
        return tritonclip.clip_(parameters, ClipByUnitNorm(), nonfinite=policy, grad_scale=scale)

    traced = compiled(step)
    for size in (1.0, 1e-6, 30.0):
        fill(ours, size)
        fill(eager, size)
        assert_bits([traced(ours)], [step(eager)])
        assert_bits(map(grad_of, ours), map(grad_of, eager))


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_follows_the_rule(device):
    parameters = make_units(UNIT_SHAPES, device=device)
    traced = compiled(lambda rule: tritonclip.clip_(parameters, rule))
    for ratio in (0.01, math.inf, 0.0):
        fill(parameters)
        before = copies(map(grad_of, parameters))
        traced(ClipByUnitNorm(ratio))
        same = [*map(torch.equal, copies(map(grad_of, parameters)), before)]
        assert same == [ratio == math.inf] * len(UNIT_SHAPES)


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_reads_the_weights_of_the_call(device):
    (one,) = make_units([(5, 8)], device=device)
    rule = ClipByUnitNorm(0.5)
    traced = compiled(lambda: tritonclip.clip_([one], rule))
    for size in (1.0, 0.25):
        one.data.fill_(size)
        fill([one], 100.0)
        traced()
        expected = torch.full((5,), 0.5 * size * 8**0.5)
        torch.testing.assert_close(grad_of(one).norm(dim=1).cpu(), expected)


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_of_nothing(device):
    empty = torch.nn.Parameter(torch.ones(2, device=device))
    assert compiled(lambda: tritonclip.clip_([empty], ClipByUnitNorm()))().shape == (0,)


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_names_gradients_that_are_not_finite(device):
    model = torch.nn.Linear(3, 2).to(device)
    model(torch.full((1, 3), torch.inf, device=device)).sum().backward()
    step = compiled(lambda: tritonclip.clip_(model, ClipByUnitNorm(), nonfinite="error"))
    with pytest.raises(RuntimeError, match=r"norms of order 2\.0 of weight are non-finite"):
        step()
