"""FlatGradients: gradients as views of one buffer for each dtype, and calls of clip_ on them.

The truth is `tests/helpers/reference.py` on copies of the gradients, and the same training with
gradients of their own.
"""

import copy
import math
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import tritonclip
from helpers import reference
from helpers.arena import Arena
from helpers.cases import (
    FLOATS,
    assert_bits,
    assert_norm,
    check_clip,
    copies,
    grad_of,
    named,
    of_sizes,
    parameters,
    unchanged,
)
from helpers.clips import CHOICES, clip_a_list, random_arena
from helpers.processes import in_processes
from helpers.refusing import check_raises, is_first
from helpers.spread import assert_same_everywhere, values
from helpers.workers import python
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, FlatGradients

# Sizes that are multiples of 16 bytes for no dtype, for some and for all; an empty one.
SHAPES = ((5, 7), (8, 4), (3,), (0, 2), (16, 16), (), (2, 3, 5), (4099,))
GONE = r"is no longer a view of FlatGradients: .*Call flat\.attach_\(\)"
RULES = pytest.mark.parametrize(
    "rule", [ClipByGlobalNorm(0.5), ClipByNorm(0.2), ClipByValue(0.1)], ids=str
)


def parameters_of(
    shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> list[Tensor]:
    return parameters(of_sizes(shapes, dtype, device))


def grads_of(params: list[Tensor]) -> list[Tensor]:
    return [grad_of(p) for p in params]


def mixed(device: Any = "cpu") -> list[Tensor]:
    """Gradients of three dtypes in turn."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return [
        param
        for seed, shape in enumerate(SHAPES)
        for param in parameters_of([shape], dtypes[seed % 3], device)
    ]


def backward(params: list[Tensor]) -> None:
    """Adds 1 to the gradients of parameters that are 0."""
    torch.stack([(p * p.detach().add(1)).sum() for p in params]).sum().backward()


def assert_views(flat: FlatGradients, params: list[Tensor]) -> None:
    """Every gradient lies in a buffer, none over another, and nothing lies between them."""
    spans = []
    for param in params:
        grad = grad_of(param)
        assert (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device)
        (buffer,) = [b for b in flat.buffers if (b.dtype, b.device) == (grad.dtype, grad.device)]
        if grad.numel():
            start = grad.data_ptr() - buffer.data_ptr()
            spans.append((buffer.data_ptr(), start, start + grad.numel() * grad.element_size()))
    spans.sort()
    ends: dict[int, int] = {}
    for base, start, end in spans:
        assert start == ends.get(base, 0)
        ends[base] = end
    assert ends == {b.data_ptr(): b.numel() * b.element_size() for b in flat.buffers}


@pytest.mark.parametrize("dtype", [*FLOATS, *named([torch.complex64]), None])
def test_constructor_makes_views_without_gaps_and_keeps_gradients(dtype):
    """In a buffer for each dtype."""
    params = mixed() if dtype is None else parameters_of(dtype=dtype)
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    assert [b.dtype for b in flat.buffers] == [*dict.fromkeys(p.dtype for p in params)]
    assert_views(flat, params)
    assert_bits(grads_of(params), before)
    aligned = [g for g in grads_of(params) if g.numel() * g.element_size() % 16 == 0]
    assert len(aligned) > 2
    assert all(g.data_ptr() % 16 == 0 for g in aligned)


def test_constructor_keeps_the_strides_that_autograd_would_give():
    dense = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    channels_last, gapped = map(torch.nn.Parameter, (dense, torch.zeros(6, 4)[:, :3]))
    FlatGradients([channels_last, gapped])
    assert grad_of(channels_last).stride() == channels_last.stride()
    assert grad_of(gapped).is_contiguous()
    assert not grad_of(gapped).any()


def test_constructor_takes_each_parameter_once_and_leaves_some_out():
    params = parameters_of()
    params[1].requires_grad_(False)
    params[2].need_clip = False  # type: ignore[attr-defined]
    left_out = [p.grad for p in params[1:3]]
    flat = FlatGradients([*params, params[0]])
    assert [id(p) for _, p in flat] == [*map(id, (params[0], *params[3:]))]
    assert [*map(id, left_out)] == [id(p.grad) for p in params[1:3]]


@pytest.mark.parametrize(
    ("form", "n"),
    [
        (lambda layer: layer, 2),
        (lambda layer: layer.named_parameters(), 2),
        (lambda layer: layer.weight, 1),
        (lambda layer: layer.parameters(), 2),
    ],
    ids=["module", "named", "tensor", "generator"],
)
def test_constructor_takes_what_clip_takes(form, n):
    assert len(FlatGradients(form(torch.nn.Linear(3, 2)))) == n


class _Subclass(Tensor):
    pass


def _sparse():
    param = torch.nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.ones(4, 2).to_sparse_coo()
    return param


def _marked():
    layer: Any = torch.nn.Linear(2, 2)
    layer.need_clip = False
    return layer


REFUSED: dict[str, Any] = {
    "empty": (list, ValueError, "expected at least one parameter that requires a gradient"),
    "frozen": (lambda: [torch.zeros(2)], ValueError, "got none among 1;"),
    "number": (lambda: 3, TypeError, "expected an iterable of tensors"),
    "numbers": (lambda: [3], TypeError, r"parameters\[0\] must be a tensor, got int"),
    "mark": (_marked, ValueError, "has need_clip = False, which nothing reads on a module"),
    "subclass": (
        lambda: torch.zeros(2).as_subclass(_Subclass).requires_grad_(),
        TypeError,
        r"parameters\[0\] is a _Subclass .*plain tensors only",
    ),
    "float8": (
        lambda: [torch.zeros(2).to(torch.float8_e5m2).requires_grad_()],
        TypeError,
        r"parameters\[0\] has dtype torch.float8_e5m2; clip in float32 or bfloat16",
    ),
    "computed": (
        lambda: [torch.ones(2, requires_grad=True) * 2],
        ValueError,
        r"parameters\[0\] is computed from other tensors",
    ),
    "sparse": (
        _sparse,
        TypeError,
        r"gradient of parameters\[0\] is a Tensor of layout torch\.sparse_coo; .*dense gradients",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_constructor_refuses(make, error, message):
    with pytest.raises(error, match=message):
        FlatGradients(make())


@pytest.mark.parametrize("inference", [False, True])
def test_backward_accumulates_into_the_buffers(inference):
    params = parameters_of()
    with torch.inference_mode(inference):
        flat = FlatGradients(params)
    flat.zero_()
    backward(params)
    backward(params)
    assert_views(flat, params)
    assert all(bool((g == 2).all()) for g in grads_of(params))
    assert float(flat.buffers[0].sum()) == 2 * sum(p.numel() for p in params)


def test_sparse_embedding_adds_to_its_dense_view():
    table = torch.nn.Embedding(10, 3, sparse=True)
    flat = FlatGradients(table)
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert_views(flat, [table.weight])
    assert grad_of(table.weight).sum(1).tolist() == [0, 6, 0, 0, 3, 0, 0, 0, 0, 0]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_zero_resets_every_gradient_also_those_that_are_not_clipped(compiled):
    """In place of zero_grad: else they would add up for ever."""
    params = mixed()
    params[2].need_clip = False  # type: ignore[attr-defined]
    flat = FlatGradients(params)
    compiled_by = partial(torch.compile, backend="aot_eager", fullgraph=True)
    zero_ = compiled_by(flat.zero_) if compiled else flat.zero_
    zero_()
    assert params.pop(2).grad is None
    assert_views(flat, params)
    assert not any(g.any() for g in grads_of(params))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copy_has_buffers_of_its_own(again):
    """Set to 0: copies of parameters, as torch makes them, have no gradients."""
    params = parameters_of()
    params[1].need_clip = False  # type: ignore[attr-defined]
    flat = FlatGradients(params)
    before = copies(grads_of(params))
    twins, other = again((params, flat))
    unclipped = twins.pop(1)
    assert_views(other, twins)
    tritonclip.clip_(other, ClipByValue(0.5, 1.0))
    assert all(bool((g == 0.5).all()) for g in grads_of(twins))
    unclipped.grad = torch.ones_like(unclipped)
    other.zero_()
    assert unclipped.grad is None
    tritonclip.clip_(flat, 1e9)
    assert_bits(grads_of(params), before)


class FlatArena(Arena):
    """The memory is a buffer of FlatGradients, without guard bytes."""

    layouts = ("plain",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flat = FlatGradients(self.params)
        (buffer,) = self.flat.buffers
        self.memory, self.grads = buffer.view(torch.uint8), grads_of(self.params)

    def call(self, rule: Any, **options: Any) -> Any:
        return tritonclip.clip_(self.flat, rule, **options)


@given(choice=CHOICES)
def test_calls_on_a_random_list_are_right(backend, choice: random.Random):
    clip_a_list(choice, random_arena(choice, backend.device, [FlatArena]))


def test_complex_gradients_are_clipped_by_modulus(backend):
    params = parameters_of(SHAPES[:3], torch.complex64, backend.device)
    flat = FlatGradients(params)
    check_clip(grads_of(params), ClipByNorm(1e9, 1.0), flat)
    check_clip(grads_of(params), ClipByGlobalNorm(1e9), flat)
    named = r"cannot order complex gradients \(parameters\[0\], parameters\[1\]"
    with pytest.raises(TypeError, match=named):
        tritonclip.clip_(flat, ClipByValue(1.0))


@RULES
def test_error_names_the_parameter(backend, rule):
    layer = torch.nn.Linear(3, 2, device=backend.device)
    flat = FlatGradients(layer)
    grad_of(layer.bias)[0] = math.inf
    grads = grads_of([layer.weight, layer.bias])
    with unchanged(grads), pytest.raises(RuntimeError, match=r"(of|gradients:) bias\b"):
        tritonclip.clip_(flat, rule, nonfinite="error")


def test_functions_of_torch_take_it_but_for_the_norm_of_tensors(backend):
    params = parameters_of(SHAPES[:3], device=backend.device)
    flat = FlatGradients(params)
    expected = reference.total_norm(copies(grads_of(params)))
    assert_norm(tritonclip.clip_grad_norm_(flat, 1e9), expected)
    tritonclip.clip_grads_with_norm_(flat, 1e9, torch.tensor(expected))
    for call in (tritonclip.get_total_norm, partial(tritonclip.clip_tensors_, max_norm=1.0)):
        given: Any = flat
        with pytest.raises(TypeError, match="got FlatGradients; expected its buffers"):
            call(given)
    assert_norm(tritonclip.get_total_norm(flat.buffers), expected)
    tritonclip.clip_grad_value_(flat, 0.25)
    assert max(float(g.abs().max()) for g in grads_of(params)) == 0.25


@RULES
def test_writes_show_in_version_counters(backend, rule):
    params = parameters_of(SHAPES[:3], device=backend.device)
    flat = FlatGradients(params)
    before = [g._version for g in grads_of(params)]
    tritonclip.clip_(flat, rule)
    assert all(g._version > v for g, v in zip(grads_of(params), before, strict=True))


def test_verification_agrees(backend):
    flat = FlatGradients(mixed(backend.device))
    with tritonclip.verify():
        for rule in (ClipByGlobalNorm(0.5), ClipByNorm(0.1), ClipByValue(0.01)):
            tritonclip.clip_(flat, rule)


def test_call_asks_for_the_backend_of_its_block(monkeypatch):
    """A plan of another backend is not used."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    flat = FlatGradients(parameters_of([(3,)]))
    tritonclip.clip_(flat, 1.0)
    refused = pytest.raises(RuntimeError, match="the triton backend was asked for")
    with tritonclip.use_backend("triton"), refused:
        tritonclip.clip_(flat, 1.0)


@pytest.mark.usefixtures("fresh_compiler")
@RULES
def test_compiled_call_equals_eager(rule):
    results = []
    # A norm for each gradient breaks the graph.
    options: Any = {"backend": "aot_eager", "fullgraph": not rule.per_gradient}
    for compile_ in (partial(torch.compile, **options), lambda f: f):
        params = parameters_of()
        flat = FlatGradients(params)
        norm = compile_(lambda: tritonclip.clip_(flat, rule))()  # noqa: B023
        results.append([norm, *grads_of(params)])
        assert_views(flat, params)
    # The norm is added up in another order.
    torch.testing.assert_close(*results, rtol=1e-6, atol=0.0)


# In a new process: what is entered depends on what of torch is imported.
WARM = """
import torch, tritonclip
from helpers.entered import entered
params = [torch.zeros(8, requires_grad=True) for _ in range(10)]
flat = tritonclip.FlatGradients(params)
flat.buffers[0].fill_(1e-3)
with tritonclip.use_backend("native"):
    found = entered(lambda: tritonclip.clip_(flat, 1.0))
print(len(found), len({file for file, _ in found}))
"""


def test_warm_call_enters_few_functions():
    done = python("-c", WARM, PYTHONPATH=str(Path(__file__).parents[1]))
    assert done.returncode == 0, done.stderr
    functions, modules = map(int, done.stdout.split())
    assert 0 < functions <= 11
    assert 0 < modules <= 6


def _set_to_none(params: list[Tensor]) -> None:
    torch.optim.SGD(params).zero_grad()


def _set_to_none_and_backward(params: list[Tensor]) -> None:
    torch.optim.SGD(params).zero_grad()
    backward(params)


def _replace_one(params: list[Tensor]) -> None:
    params[4].grad = torch.ones_like(params[4])


def _make_sparse(params: list[Tensor]) -> None:
    params[1].grad = torch.ones_like(params[1]).to_sparse()


def _create_graph(params: list[Tensor]) -> None:
    torch.stack([(p * p).sum() for p in params]).sum().backward(create_graph=True)


def _move(params: list[Tensor]) -> None:
    torch.nn.ParameterList(params).double()


REPLACING = [_set_to_none, _set_to_none_and_backward, _replace_one, _create_graph, _move]
CALLS: dict[str, Callable[[FlatGradients], Any]] = {
    "clip": lambda flat: tritonclip.clip_(flat, 0.1),
    "by-norm": lambda flat: tritonclip.clip_(flat, ClipByNorm(0.1)),
    "zero": lambda flat: flat.zero_(),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("replace", [*REPLACING, _make_sparse])
def test_gradient_that_was_replaced_is_noticed(replace, call):
    params = parameters_of()
    flat = FlatGradients(params)
    tritonclip.clip_(flat, 1e9)
    replace(params)
    grads = [p.grad for p in params]
    there = [grad.detach() for grad in grads if grad is not None and not grad.is_sparse]
    with unchanged([*there, *flat.buffers]), pytest.raises(RuntimeError, match=GONE):
        call(flat)
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("replace", REPLACING)
def test_attach_goes_on_with_the_gradients_that_are_there(backend, replace):
    params = parameters_of(device=backend.device)
    flat = FlatGradients(params)
    replace(params)
    expected = [
        torch.zeros_like(p) if p.grad is None else grad_of(p).detach().clone() for p in params
    ]
    flat.attach_()
    assert_views(flat, params)
    assert_bits(grads_of(params), expected)
    assert_norm(tritonclip.clip_(flat, 1e9), reference.total_norm(copies(expected)))


def test_attach_that_is_refused_changes_nothing():
    params = parameters_of()
    flat = FlatGradients(params)
    params[2].data = torch.zeros(7)
    grads, buffers = [p.grad for p in params], flat.buffers
    with pytest.raises(ValueError, match=r"gradient of parameters\[2\] has shape \(3,\); expected"):
        flat.attach_()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(a is b for a, b in zip(flat.buffers, buffers, strict=True))


@pytest.mark.parametrize(("n", "others"), [(8, ""), (9, " and 1 more"), (20, " and 12 more")])
def test_message_names_some_parameters_and_counts_the_others(n, others):
    params = {f"p{i}": torch.nn.Parameter(torch.zeros(2)) for i in range(30)}
    flat = FlatGradients(params.items())
    for param in [*params.values()][:n]:
        param.grad = None
    message = rf"p0, p1, p2, p3, p4, p5, p6, p7{others} is no longer a view"
    with pytest.raises(RuntimeError, match=message):
        tritonclip.clip_(flat, 1.0)


def test_one_of_many_that_was_replaced_is_noticed_while_its_view_is_kept():
    params = parameters_of([(2,)] * 999)
    flat = FlatGradients(params)
    kept = params[500].grad
    params[500].grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"parameters\[500\] " + GONE):
        tritonclip.clip_(flat, 1.0)
    params[500].grad = kept
    tritonclip.clip_(flat, 1.0)


def test_second_one_takes_the_gradients_over():
    params = parameters_of()
    first = FlatGradients(params)
    before = copies(grads_of(params))
    second = FlatGradients(params)
    assert_views(second, params)
    assert_bits(grads_of(params), before)
    with pytest.raises(RuntimeError, match=GONE):
        tritonclip.clip_(first, 1.0)


@pytest.mark.parametrize("sizes", [(2,), (3, 5)])
@in_processes(2)
def test_one_norm_over_a_group(sizes: tuple[int, ...]) -> None:
    """The first parameter has a copy in each process."""
    params: list[Tensor] = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    flat = FlatGradients(params)
    flat.buffers[0].fill_(1.0 + dist.get_rank())
    world = dist.group.WORLD
    with tritonclip.verify():
        norm = tritonclip.clip_(flat, 1e9, process_group=world)
    assert_norm(norm, math.sqrt(sum(sizes) * (1 + 4)))
    grad_of(params[0]).fill_(3.0)
    norm = tritonclip.clip_(flat, 1e9, process_group=world, copies={params[0]: 2})
    assert_norm(norm, math.sqrt(sizes[0] * 9 + sum(sizes[1:]) * (1 + 4)))


@in_processes(2)
def test_lost_view_raises_everywhere() -> None:
    layer = torch.nn.Linear(3, 2)
    flat = FlatGradients(layer)
    flat.buffers[0].fill_(1.0 + dist.get_rank())
    kept = layer.weight.grad
    if is_first():
        layer.weight.grad = torch.ones(2, 3)
    clip: Any = partial(tritonclip.clip_, flat, 0.5, process_group=dist.group.WORLD)
    check_raises(clip, RuntimeError, "attach_", list(flat.buffers))
    layer.weight.grad = kept
    assert_same_everywhere(clip())


@in_processes(2)
def test_ddp_reduces_into_the_views() -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    flat, alone = FlatGradients(model.module), copy.deepcopy(model.module)
    for step in range(2):
        flat.zero_()
        batch = values((8, 3), step).float()
        model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
        norm = tritonclip.clip_(flat, 0.05)
        alone.zero_grad()
        alone(batch).square().mean().backward()
        truth = tritonclip.clip_(alone, 0.05)
        torch.testing.assert_close(norm, truth, rtol=1e-5, atol=0.0)
    assert_views(flat, [*model.module.parameters()])
