"""Gradients and parameters that FlatGradients holds no more are noticed, and attached again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers import reference
from helpers.cases import assert_bits, assert_norm, copies, grad_of, unchanged
from helpers.views import GONE, assert_views, backward, grads_of, parameters_of
from tritonclip import FlatGradients


def _set_to_none(params: list[Tensor]) -> None:
    torch.optim.SGD(params).zero_grad()


def _set_to_none_and_backward(params: list[Tensor]) -> None:
    torch.optim.SGD(params).zero_grad()
    backward(params)


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
CALLS = {
    "clip": lambda flat: tritonclip.clip_(flat, 0.1),
    "zero": lambda flat: flat.zero_(),
    "norm": tritonclip.get_total_norm,
    "check": lambda flat: flat.check(),
}


def test_gradient_that_was_replaced_is_noticed_beside_other_views_of_its_buffer():
    """Among more parameters than a call compares one by one."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(999)]
    flat = FlatGradients(params)
    tritonclip.clip_(flat, 0.1)
    logged = [grad_of(p).detach() for p in params]
    params[900].grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=GONE):
        tritonclip.clip_(flat, 0.1)
    assert len(logged) == len(params)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@REPLACING
def test_gradient_that_was_replaced_is_noticed(replace, call):
    params = parameters_of()
    flat = FlatGradients(params)
    replace(params)
    grads = [p.grad for p in params]
    there = [grad.detach() for grad in grads if grad is not None]
    with unchanged([*there, *flat.buffers]), pytest.raises(RuntimeError, match=GONE):
        call(flat)
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))


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
    message = rf"p0, p1, p2, p3, p4, p5, p6, p7{others} is no longer a view"
    with pytest.raises(RuntimeError, match=message):
        flat.check()


def test_view_that_somebody_keeps_is_found_by_the_full_check():
    params = parameters_of([(2,)] * 200)
    flat = FlatGradients(params)
    kept = params[150].grad
    params[150].grad = None
    # The price of a check in constant time: these calls look at others.
    for _ in range(3):
        tritonclip.clip_(flat, 1e9)
    with pytest.raises(RuntimeError, match=r"parameters\[150\] " + GONE):
        flat.check()
    with tritonclip.verify(), pytest.raises(RuntimeError, match=GONE):
        tritonclip.clip_(flat, 1e9)
    assert kept is not None


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


@pytest.mark.parametrize("n", [4, 50])
def test_need_clip_set_later_is_noticed_by_calls(n):
    """Of many parameters, each has its turn. One that is frozen is not to blame."""
    params = parameters_of([(2,)] * n)
    flat = FlatGradients(params)
    params[3].need_clip = False  # type: ignore[attr-defined]
    params[2].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"^parameters\[3\] was frozen or got need_clip = False"):
        _ = [tritonclip.clip_(flat, 1.0) for _ in range(4)]


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


@pytest.mark.parametrize("call", [CALLS["clip"], CALLS["zero"]], ids=["clip", "zero"])
@pytest.mark.parametrize(("n", "at"), [(40, 30), (3, 1)], ids=["large", "small"])
def test_move_of_a_part_is_noticed_at_once(n, at, call):
    """Neither end moves, and the gradient's own object stays."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(n)))
    flat = FlatGradients(model)
    model[at].double()
    with pytest.raises(RuntimeError, match=rf"{at}\.weight, {at}\.bias is no longer a view"):
        call(flat)


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
    FlatGradients(params).check()
    assert_bits(grads_of(params), before)
    with pytest.raises(RuntimeError, match=GONE):
        tritonclip.clip_(first, 1.0)


def test_dropped_view_is_noticed_at_the_next_call_among_many():
    """Whatever its place: the addresses of some are compared at each call."""
    params = parameters_of([(2,)] * 100)
    flat = FlatGradients(params)
    for at in (50, 77):
        tritonclip.clip_(flat, 1.0)
        params[at].grad = None
        with pytest.raises(RuntimeError, match=rf"parameters\[{at}\] is no longer a view"):
            tritonclip.clip_(flat, 1.0)
        flat.attach_()


def test_dropped_view_is_noticed_beside_lists_that_hold_memory_of_the_buffers():
    """A plan for each gradient has slices of them, made between."""
    params = parameters_of([(2,)] * 100)
    flat = FlatGradients(params)
    tritonclip.clip_(flat, tritonclip.ClipByNorm(1.0))
    params[50].grad = None
    with pytest.raises(RuntimeError, match=r"parameters\[50\] is no longer a view"):
        tritonclip.clip_(flat, 1.0)


def test_view_of_a_buffer_that_the_program_drops_is_no_lost_gradient():
    params = parameters_of([(2,)] * 100)
    flat = FlatGradients(params)
    kept = [flat.buffers[0][3:5]]
    tritonclip.clip_(flat, tritonclip.ClipByNorm(1.0))
    kept.clear()
    tritonclip.clip_(flat, 1.0)
