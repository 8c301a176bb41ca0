"""FlatGradients: gradients as views of one buffer, what clipping makes of it, and what it refuses.

The truth is `tests/reference.py` on copies of the gradients, as for gradients of their own.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
from typing import Any

import pytest
import reference
import torch
from cases import FLOATS, NORM_TYPES, assert_bits, assert_norm, copies, grad_of, normal
from torch import Tensor

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, FlatGradients
from tritonclip.flat import gradient_lists

# Sizes that are multiples of 16 bytes for no dtype, for some and for all; an empty one.
SHAPES = ((5, 7), (8, 4), (3,), (0, 2), (16, 16), (), (2, 3, 5), (4099,))


def parameters_of(
    shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> list[Tensor]:
    """Parameters with random gradients."""
    params: list[Tensor] = []
    for seed, shape in enumerate(shapes):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        param.grad = normal(shape, dtype, device, seed)
        params.append(param)
    return params


def grads_of(params: list[Tensor]) -> list[Tensor]:
    return [grad_of(p) for p in params]


def mixed(device: Any) -> list[Tensor]:
    """Gradients of three dtypes in turn."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return [
        param
        for seed, shape in enumerate(SHAPES)
        for param in parameters_of([shape], dtypes[seed % 3], device)
    ]


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
    sizes = {b.data_ptr(): b.numel() * b.element_size() for b in flat.buffers}
    assert ends == sizes


@pytest.mark.parametrize("dtype", [*FLOATS, pytest.param(torch.complex64, id="complex64")])
def test_constructor_makes_views_without_gaps_and_keeps_gradients(dtype):
    params = parameters_of(dtype=dtype)
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    assert len(flat.buffers) == 1
    assert_views(flat, params)
    assert_bits(grads_of(params), before)
    flat.check()


def test_constructor_makes_a_buffer_for_each_dtype():
    params = mixed("cpu")
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    assert [b.dtype for b in flat.buffers] == [torch.float32, torch.bfloat16, torch.float64]
    assert_views(flat, params)
    assert_bits(grads_of(params), before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_constructor_aligns_what_can_be_aligned(dtype):
    params = parameters_of(dtype=dtype)
    FlatGradients(params)
    whole = [g for g in grads_of(params) if g.numel() * g.element_size() % 16 == 0]
    assert len(whole) > 2
    assert all(g.data_ptr() % 16 == 0 for g in whole)


def test_constructor_keeps_the_strides_that_autograd_would_give():
    channels_last = torch.nn.Parameter(
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    )
    gapped = torch.nn.Parameter(torch.zeros(6, 4)[:, :3])
    FlatGradients([channels_last, gapped])
    assert grad_of(channels_last).stride() == channels_last.stride()
    assert grad_of(gapped).is_contiguous()


def test_constructor_fills_missing_gradients_with_zeros():
    param = torch.nn.Parameter(torch.ones(3))
    FlatGradients(param)
    assert grad_of(param).tolist() == [0.0, 0.0, 0.0]


def test_constructor_takes_each_parameter_once_and_leaves_some_out():
    params = parameters_of()
    params[1].requires_grad_(False)
    params[2].need_clip = False  # type: ignore[attr-defined]
    kept = [grad_of(params[1]), grad_of(params[2])]
    flat = FlatGradients([*params, params[0]])
    assert [id(p) for p in flat.parameters] == [
        id(p) for i, p in enumerate(params) if i not in (1, 2)
    ]
    assert grad_of(params[1]) is kept[0]
    assert grad_of(params[2]) is kept[1]


@pytest.mark.parametrize("kind", ["module", "named", "tensor", "generator"])
def test_constructor_takes_what_clip_takes(kind):
    layer = torch.nn.Linear(3, 2)
    given: dict[str, Any] = {
        "module": layer,
        "named": layer.named_parameters(),
        "tensor": layer.weight,
        "generator": layer.parameters(),
    }
    flat = FlatGradients(given[kind])
    assert len(flat) == (1 if kind == "tensor" else 2)
    flat.check()


class _Subclass(Tensor):
    pass


def _sparse():
    param = torch.nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.ones(4, 2).to_sparse_coo()
    return param


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (list, ValueError, "expected at least one parameter that requires a gradient"),
        (lambda: [torch.zeros(2)], ValueError, "got 1 parameters without"),
        (lambda: 3, TypeError, "expected an iterable of tensors"),
        (lambda: [3], TypeError, r"parameters\[0\] must be a tensor, got int"),
        (
            lambda: torch.zeros(2).as_subclass(_Subclass).requires_grad_(),
            TypeError,
            r"parameters\[0\] is a _Subclass; expected a plain tensor",
        ),
        (
            lambda: [torch.ones(2, requires_grad=True) * 2],
            ValueError,
            r"parameters\[0\] is computed from other tensors",
        ),
        (_sparse, TypeError, r"gradient of parameters\[0\] has layout .*dense gradients only"),
    ],
    ids=["empty", "frozen", "number", "numbers", "subclass", "computed", "sparse"],
)
def test_constructor_refuses(make, error, message):
    with pytest.raises(error, match=message):
        FlatGradients(make())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [1e-2, 1e9], ids=["clipped", "within"])
def test_global_norm_equals_the_reference(backend, norm_type, dtype, max_norm):
    params = parameters_of(SHAPES[:3], dtype, backend.device)
    before = copies(grads_of(params))
    rule = ClipByGlobalNorm(max_norm, norm_type)
    norm = tritonclip.clip_(FlatGradients(params), rule)
    assert_norm(norm, reference.total_norm(before, norm_type))
    assert_bits(grads_of(params), reference.clipped(before, rule, norm))


@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clipped", "within"])
def test_norm_by_gradient_equals_the_reference(backend, max_norm):
    params, rule = mixed(backend.device), ClipByNorm(max_norm)
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    for _ in range(2):
        norms = tritonclip.clip_(flat, rule)
        assert norms.dtype == torch.float64
        # Those of narrower gradients are right to the tolerance of float32.
        assert_norm(norms.float(), reference.norms(before))
        expected = reference.clipped(before, rule, norms)
        for ours, truth in zip(grads_of(params), expected, strict=True):
            torch.testing.assert_close(ours.cpu(), truth)
        before = copies(grads_of(params))


@pytest.mark.parametrize(
    "rule", [ClipByValue(0.5), ClipByValue(0.1, 0.2), ClipByValue(-9.0, 9.0)], ids=str
)
def test_value_equals_torch_clamp(backend, rule):
    params = mixed(backend.device)
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    assert tritonclip.clip_(flat, rule) is None
    expected = [
        g.clamp(reference.bound(rule.min, g.dtype), reference.bound(rule.max, g.dtype))
        for g in before
    ]
    assert_bits(grads_of(params), expected)


def test_complex_gradients_are_clipped_by_modulus(backend):
    params = parameters_of(SHAPES[:3], torch.complex64, backend.device)
    before = copies(grads_of(params))
    flat = FlatGradients(params)
    norms = tritonclip.clip_(flat, ClipByNorm(1e9, 1.0))
    assert_norm(norms, reference.norms(before, 1.0))
    assert_norm(tritonclip.clip_(flat, 1e9), reference.total_norm(before))
    with pytest.raises(TypeError, match=r"cannot order complex gradients \(parameters\[0\]"):
        tritonclip.clip_(flat, ClipByValue(1.0))


def test_zero_policy_erases_every_gradient(backend):
    params = parameters_of(SHAPES[:3], device=backend.device)
    flat = FlatGradients(params)
    grad_of(params[1])[0] = math.nan
    norm = tritonclip.clip_(flat, 1.0, nonfinite="zero")
    assert math.isnan(norm)
    assert not any(g.any() for g in grads_of(params))


def test_nan_that_spread_is_gone_after_zero_grad(backend):
    """Nothing but gradients lies in a buffer: no place keeps the NaN."""
    params = parameters_of(device=backend.device)
    flat = FlatGradients(params)
    grad_of(params[0])[0] = math.nan
    tritonclip.clip_(flat, 1.0)
    torch.optim.SGD(params).zero_grad(set_to_none=False)
    assert tritonclip.clip_(flat, 1.0) == 0


@pytest.mark.parametrize(
    "rule", [ClipByGlobalNorm(1.0), ClipByNorm(1.0)], ids=["global", "by-norm"]
)
def test_error_names_the_parameter(backend, rule):
    layer = torch.nn.Linear(3, 2, device=backend.device)
    flat = FlatGradients(layer)
    grad_of(layer.bias)[0] = math.inf
    before = copies(grads_of([layer.weight, layer.bias]))
    with pytest.raises(RuntimeError, match="bias"):
        tritonclip.clip_(flat, rule, nonfinite="error")
    assert_bits(grads_of([layer.weight, layer.bias]), before)


def test_grad_scale_is_taken_out(backend):
    params = parameters_of(SHAPES[:3], device=backend.device)
    before = copies(grads_of(params))
    norm = tritonclip.clip_(FlatGradients(params), 1e9, grad_scale=4.0)
    assert_norm(norm, reference.total_norm([g / 4 for g in before]))
    assert_bits(grads_of(params), [g / 4 for g in before])


def test_functions_of_torch_take_it(backend):
    params = parameters_of(SHAPES[:3], device=backend.device)
    flat = FlatGradients(params)
    expected = reference.total_norm(copies(grads_of(params)))
    assert_norm(tritonclip.get_total_norm(flat), expected)
    assert_norm(tritonclip.clip_grad_norm_(flat, 1e9), expected)
    tritonclip.clip_grads_with_norm_(flat, 1e9, torch.tensor(expected))
    assert_norm(tritonclip.get_total_norm(flat), expected)
    tritonclip.clip_grad_value_(flat, 0.25)
    assert max(float(g.abs().max()) for g in grads_of(params)) == 0.25


@pytest.mark.parametrize(
    "rule", [ClipByGlobalNorm(0.1), ClipByNorm(0.1), ClipByValue(0.1)], ids=str
)
def test_writes_show_in_version_counters(backend, rule):
    params = parameters_of(SHAPES[:3], device=backend.device)
    flat = FlatGradients(params)
    before = [g._version for g in grads_of(params)]
    tritonclip.clip_(flat, rule)
    assert all(g._version > v for g, v in zip(grads_of(params), before, strict=True))


def _backward(params: list[Tensor]) -> None:
    torch.stack([(p * p.detach().add(1)).sum() for p in params]).sum().backward()


def test_backward_accumulates_into_the_buffers():
    params = parameters_of()
    flat = FlatGradients(params)
    flat.zero_()
    _backward(params)
    _backward(params)
    flat.check()
    assert all(bool((g == 2).all()) for g in grads_of(params))
    assert float(flat.buffers[0].sum()) == 2 * sum(p.numel() for p in params)


def test_zero_sets_every_gradient():
    params = mixed("cpu")
    flat = FlatGradients(params)
    flat.zero_()
    flat.check()
    assert not any(g.any() for g in grads_of(params))


GONE = r"is no view of FlatGradients any more: .*Call flat\.attach_\(\)"


def _set_to_none(params: list[Tensor]) -> None:
    torch.optim.SGD(params).zero_grad()


def _set_to_none_and_backward(params: list[Tensor]) -> None:
    torch.optim.SGD(params).zero_grad()
    _backward(params)


def _replace_one(params: list[Tensor]) -> None:
    params[4].grad = torch.ones_like(params[4])


def _create_graph(params: list[Tensor]) -> None:
    torch.stack([(p * p).sum() for p in params]).sum().backward(create_graph=True)


def _move(params: list[Tensor]) -> None:
    torch.nn.ParameterList(params).double()


REPLACING = pytest.mark.parametrize(
    "replace",
    [_set_to_none, _set_to_none_and_backward, _replace_one, _create_graph, _move],
    ids=lambda f: f.__name__.strip("_"),
)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("call", ["clip", "zero", "norm", "check"])
@REPLACING
def test_gradient_that_was_replaced_is_noticed(replace, call):
    params = parameters_of()
    flat = FlatGradients(params)
    replace(params)
    before = [None if p.grad is None else p.grad.detach().clone() for p in params]
    buffers = copies(flat.buffers)
    with pytest.raises(RuntimeError, match=GONE):
        {
            "clip": lambda: tritonclip.clip_(flat, 0.1),
            "zero": flat.zero_,
            "norm": lambda: tritonclip.get_total_norm(flat),
            "check": flat.check,
        }[call]()
    for param, old in zip(params, before, strict=True):
        assert (param.grad is None) == (old is None)
        if old is not None:
            assert_bits([grad_of(param).detach()], [old])
    assert_bits(flat.buffers, buffers)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@REPLACING
def test_attach_goes_on_with_the_gradients_that_are_there(backend, replace):
    params = parameters_of(device=backend.device)
    flat = FlatGradients(params)
    replace(params)
    expected = [
        torch.zeros_like(p) if p.grad is None else grad_of(p).detach().clone() for p in params
    ]
    flat.attach_()
    flat.check()
    assert_views(flat, params)
    assert_bits(grads_of(params), expected)
    assert_norm(tritonclip.clip_(flat, 1e9), reference.total_norm(copies(expected)))


@pytest.mark.parametrize(("n", "others"), [(8, ""), (9, " and 1 more"), (20, " and 12 more")])
def test_message_names_some_parameters_and_counts_the_others(n, others):
    params = {f"p{i}": torch.nn.Parameter(torch.zeros(2)) for i in range(n)}
    flat = FlatGradients(params.items())
    for param in params.values():
        param.grad = None
    with pytest.raises(RuntimeError, match=rf"p0, p1, p2, p3, p4, p5, p6, p7{others} is no view"):
        flat.check()


def test_view_that_somebody_keeps_is_found_by_the_full_check():
    params = parameters_of([(2,)] * 40)
    flat = FlatGradients(params)
    kept = params[30].grad
    params[30].grad = None
    # The price of a check in constant time: this call looks at others.
    tritonclip.clip_(flat, 1e9)
    with pytest.raises(RuntimeError, match=r"parameters\[30\] " + GONE):
        flat.check()
    with tritonclip.verify(), pytest.raises(RuntimeError, match=GONE):
        tritonclip.clip_(flat, 1e9)
    assert kept is not None


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.5), ClipByNorm(0.5)], ids=["all", "each"])
def test_alias_of_a_view_serves_in_its_place(rule):
    """The same memory seen in the same way, while somebody keeps the view."""
    params = parameters_of([(2, 2), (3,)])
    flat = FlatGradients(params)
    kept = grad_of(params[0])
    params[0].grad = kept.view_as(kept)
    for _ in range(2):
        before = copies(grads_of(params))
        measured = tritonclip.clip_(flat, rule)
        assert_bits(grads_of(params), reference.clipped(before, rule, measured))


def test_other_view_of_the_memory_of_a_view_is_noticed():
    """Backward would add to the wrong elements."""
    params = parameters_of([(2, 2), (3,)])
    flat = FlatGradients(params)
    kept = grad_of(params[0])
    params[0].grad = kept.t()
    with pytest.raises(RuntimeError, match=r"parameters\[0\] " + GONE):
        tritonclip.clip_(flat, 1.0)


@pytest.mark.parametrize("how", ["need_clip", "requires_grad"])
def test_parameter_left_out_later_is_found_by_the_full_check(how):
    params = parameters_of()
    flat = FlatGradients(params)
    setattr(params[3], how, False)
    with pytest.raises(RuntimeError, match=r"parameters\[3\] was frozen or got need_clip = False"):
        flat.check()


@pytest.mark.parametrize("how", ["need_clip", "requires_grad"])
def test_parameter_left_out_at_first_is_noticed_when_it_is_no_more(how):
    """Nobody would clip its gradient, nor set it to 0."""
    params = parameters_of()
    setattr(params[3], how, False)
    flat = FlatGradients(params)
    tritonclip.clip_(flat, 1.0)
    setattr(params[3], how, True)
    for call in (flat.check, flat.zero_, lambda: tritonclip.clip_(flat, 1.0)):
        with pytest.raises(RuntimeError, match=r"parameters\[3\] requires a gradient"):
            call()


def test_every_parameter_left_out_has_its_turn():
    """Also where there are more of them than of the others."""
    layers = [torch.nn.Linear(2, 2) for _ in range(25)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    layers[0].requires_grad_(True)
    flat = FlatGradients(model)
    layers[24].requires_grad_(True)
    # 48 were left out, 16 a call: the last two at the third.
    for _ in range(2):
        tritonclip.clip_(flat, 1.0)
    with pytest.raises(RuntimeError, match=r"24\.weight, 24\.bias requires a gradient"):
        tritonclip.clip_(flat, 1.0)


def test_move_of_a_part_is_noticed_within_a_round_of_calls():
    """Neither end moves, and the view's own object stays: only addresses tell."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(40)))
    flat = FlatGradients(model)
    model[30].double()
    # 80 parameters, 16 a call: the 61st at the fourth.
    for _ in range(3):
        tritonclip.clip_(flat, 1.0)
    with pytest.raises(RuntimeError, match=r"30\.weight, 30\.bias is no view"):
        tritonclip.clip_(flat, 1.0)


def test_move_that_spares_the_ends_of_a_small_model_is_noticed_at_once():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    flat = FlatGradients(model)
    model[1].double()
    with pytest.raises(RuntimeError, match=r"1\.weight, 1\.bias is no view"):
        flat.zero_()


def test_shallow_copy_is_refused():
    params = parameters_of()
    flat = FlatGradients(params)
    with pytest.raises(TypeError, match=r"expected copy\.deepcopy"):
        copy.copy(flat)
    flat.check()


def test_made_in_inference_mode_it_takes_gradients_outside():
    params = parameters_of()
    with torch.inference_mode():
        flat = FlatGradients(params)
    flat.zero_()
    _backward(params)
    flat.check()


def test_attach_that_is_refused_changes_nothing():
    params = parameters_of()
    flat = FlatGradients(params)
    params[2].data = torch.zeros(7)
    grads, buffers = [p.grad for p in params], flat.buffers
    with pytest.raises(ValueError, match=r"gradient of parameters\[2\] has shape \(3,\); expected"):
        flat.attach_()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(a is b for a, b in zip(flat.buffers, buffers, strict=True))


def test_second_one_takes_the_gradients_over():
    params = parameters_of()
    first = FlatGradients(params)
    before = copies(grads_of(params))
    second = FlatGradients(params)
    second.check()
    assert_bits(grads_of(params), before)
    with pytest.raises(RuntimeError, match=GONE):
        tritonclip.clip_(first, 1.0)


COPIED = pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)


@COPIED
def test_copy_has_buffers_of_its_own(again):
    """Set to 0: copies of parameters, as torch makes them, have no gradients."""
    params = parameters_of()
    flat = FlatGradients(params)
    before = copies(grads_of(params))
    twins, other = again((params, flat))
    other.check()
    assert_views(other, twins)
    tritonclip.clip_(other, ClipByValue(0.5, 1.0))
    assert all(bool((g == 0.5).all()) for g in grads_of(twins))
    flat.check()
    assert_bits(grads_of(params), before)


@COPIED
def test_copy_leaves_out_what_the_original_left_out(again):
    params = parameters_of(SHAPES[:3])
    params[1].need_clip = False  # type: ignore[attr-defined]
    twins, other = again((params, FlatGradients(params)))
    assert [getattr(p, "need_clip", True) for p in twins] == [True, False, True]
    assert twins[1].grad is None or again is not copy.deepcopy
    other.check()
    assert len(other) == 2


@COPIED
def test_copy_without_its_parameters_says_so(again):
    params = parameters_of(SHAPES[:3])
    other = again(FlatGradients(params))
    for call in (other.check, other.zero_, other.attach_, lambda: tritonclip.clip_(other, 1.0)):
        with pytest.raises(RuntimeError, match=r"parameters\[0\], .*\[2\] is gone.*let go"):
            call()


@pytest.mark.parametrize("call", ["clip", "zero", "norm", "check", "attach"])
def test_parameter_that_was_replaced_is_noticed_at_once(call):
    """As Gaussian splatting does it; no gradient was in the place that is looked at."""
    params = parameters_of([(2,)] * 60)
    flat = FlatGradients(params)
    optimizer = torch.optim.SGD(params, lr=1.0)
    params[30] = optimizer.param_groups[0]["params"][30] = torch.nn.Parameter(torch.zeros(3))
    params[30].grad = torch.full((3,), 7.0)
    before, buffers = copies(grads_of(params)), copies(flat.buffers)
    with pytest.raises(RuntimeError, match=r"^parameters\[30\] is gone.*Make a new FlatGradients"):
        {
            "clip": lambda: tritonclip.clip_(flat, 0.1),
            "zero": flat.zero_,
            "norm": lambda: tritonclip.get_total_norm(flat),
            "check": flat.check,
            "attach": flat.attach_,
        }[call]()
    assert_bits(grads_of(params), before)
    assert_bits(flat.buffers, buffers)
    again = FlatGradients(params)
    assert_norm(tritonclip.clip_(again, 0.1), reference.total_norm(before))


@pytest.mark.parametrize("part", ["all", "one"])
def test_buffers_that_move_into_shared_memory_stay_in_use(part):
    """All views move with their buffer, also where one of them was meant."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 2) for _ in range(40)))
    model[30:].bfloat16()
    flat = FlatGradients(model)
    for seed, param in enumerate(model.parameters()):
        grad_of(param).copy_(normal(param.shape, param.dtype, seed=seed))
    expected = reference.total_norm(copies(map(grad_of, model.parameters())))
    tritonclip.clip_(flat, 1e9)
    (model if part == "all" else model[35]).share_memory()
    assert_norm(tritonclip.clip_(flat, 1e9), expected)
    flat.check()
    assert flat.buffers[1].is_shared()
    assert flat.buffers[0].is_shared() == (part == "all")
    tritonclip.clip_(flat, ClipByValue(0.0, 0.5))
    assert all(
        0 <= float(g.min()) <= float(g.max()) <= 0.5 for g in map(grad_of, model.parameters())
    )
    flat.zero_()
    assert not any(grad_of(p).any() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_whole_vectors_begin_at_vectors(dtype):
    """Ragged ones come last, so that kernels read the others 16 bytes at a time."""
    params = parameters_of([(3,), (4, 4), (5,), (8,), (1,), (16,)], dtype)
    (buffer,) = FlatGradients(params).buffers
    for param in params:
        if param.numel() * param.itemsize % 16 == 0:
            assert (grad_of(param).data_ptr() - buffer.data_ptr()) % 16 == 0


def test_buffers_are_planned_again_only_where_memory_moved(monkeypatch):
    """A plan has addresses, which kernels read."""
    model = torch.nn.Linear(3, 2)
    flat = FlatGradients(model)
    plan, planned = gradient_lists.list_of, []

    def counted(*args, **kwargs):
        planned.append(args)
        return plan(*args, **kwargs)

    monkeypatch.setattr("tritonclip.flat.flat_gradients.list_of", counted)
    for _ in range(3):
        tritonclip.clip_(flat, 1.0)
    assert len(planned) == 1
    model.share_memory()
    for _ in range(3):
        tritonclip.clip_(flat, 1.0)
    assert len(planned) == 2


def test_verification_agrees(backend):
    params = mixed(backend.device)
    flat = FlatGradients(params)
    with tritonclip.verify():
        for rule in (ClipByGlobalNorm(0.5), ClipByNorm(0.1), ClipByValue(0.01)):
            tritonclip.clip_(flat, rule)


def _calls_of(n_parameters: int, rule: Any) -> int:
    """Calls of Python and C functions in one clip of 1,200 elements in so many parameters."""
    params = parameters_of([(1200 // n_parameters,)] * n_parameters)
    flat = FlatGradients(params)
    tritonclip.clip_(flat, rule)
    seen = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        tritonclip.clip_(flat, rule)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.1), ClipByValue(0.1)], ids=str)
def test_work_on_the_host_does_not_grow_with_the_parameters(rule):
    assert _calls_of(400, rule) == _calls_of(40, rule)


def test_repr_says_what_it_holds():
    flat = FlatGradients(parameters_of([(2, 3), (4,)]))
    assert repr(flat) == "FlatGradients(2 parameters: 10 of torch.float32 on cpu)"


def test_dropped_view_is_noticed_at_the_next_call_among_many():
    """Whatever its place: the addresses of some are compared at each call."""
    params = parameters_of([(2,)] * 100)
    flat = FlatGradients(params)
    for at in (50, 77):
        tritonclip.clip_(flat, 1.0)
        params[at].grad = None
        with pytest.raises(RuntimeError, match=rf"parameters\[{at}\] is no view"):
            tritonclip.clip_(flat, 1.0)
        flat.attach_()


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.5), ClipByNorm(0.5)], ids=["all", "each"])
def test_calls_after_attach_clip_the_new_buffers(rule):
    params = parameters_of([(3,), (5,)])
    flat = FlatGradients(params)
    tritonclip.clip_(flat, rule)
    flat.attach_()
    for seed, param in enumerate(params):
        grad_of(param).copy_(normal(param.shape, seed=10 + seed))
    before = copies(grads_of(params))
    measured = tritonclip.clip_(flat, rule)
    assert_bits(grads_of(params), reference.clipped(before, rule, measured))


def test_call_asks_for_the_backend_of_its_block(monkeypatch):
    """A plan of another backend is not used."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    params = parameters_of([(3,)])
    flat = FlatGradients(params)
    tritonclip.clip_(flat, 1.0)
    with (
        tritonclip.use_backend("triton"),
        pytest.raises(RuntimeError, match="the triton backend was asked for"),
    ):
        tritonclip.clip_(flat, 1.0)
