"""Gradient lists met before: recognised only where every look at them would find the same."""

from __future__ import annotations

import weakref

import pytest
import torch
from cases import normal, parameter
from torch import Tensor

import tritonclip
from tritonclip import familiar, gradients
from tritonclip.familiar import REMEMBERED, Familiar

SIZES = (5, 1, 24)


def contiguous() -> list[Tensor]:
    return [normal(n) for n in SIZES]


def mixed() -> list[Tensor]:
    return [normal(3), normal(4, dtype=torch.bfloat16), normal(3), normal(2, dtype=torch.float64)]


def channels_last() -> list[Tensor]:
    dense = normal(96).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return [normal(3), dense, normal(4, dtype=torch.float64), normal(15).view(3, 5).t()]


def negated() -> list[Tensor]:
    return [torch._neg_view(normal(3)), normal(3)]


LISTS = [
    pytest.param(make, id=make.__name__) for make in (contiguous, mixed, channels_last, negated)
]


@pytest.fixture
def fresh(monkeypatch):
    """Nothing met before."""
    monkeypatch.setattr(gradients, "_familiar", Familiar())
    return gradients._familiar


@pytest.fixture
def walks(fresh, monkeypatch):
    """The lists that were looked at gradient by gradient."""
    seen = []
    fill = gradients._fill_groups

    def counted(result, addresses):
        seen.append(result)
        fill(result, addresses)

    monkeypatch.setattr(gradients, "_fill_groups", counted)
    return seen


def described(grads: list[Tensor]) -> list[tuple[object, ...]]:
    return [
        (
            [(t.data_ptr(), t.numel(), t.is_contiguous(), t.is_neg()) for t in group.tensors],
            list(group.places),
            group.flat,
            group.pairs,
            group.device,
            group.dtype,
            group.has_negated,
        )
        for group in gradients.of_tensors(grads).groups
    ]


@pytest.mark.parametrize("make", LISTS)
def test_familiar_groups_are_those_that_the_walk_finds(walks, make):
    grads = make()
    found = described(grads)
    assert described(list(grads)) == found
    assert len(walks) == 1


@pytest.mark.parametrize("make", LISTS)
def test_familiar_groups_hold_the_addresses_of_this_call(walks, make):
    described(make())
    other = make()
    groups = gradients.of_tensors(other).groups
    assert len(walks) == 1
    for group in groups:
        assert group.addresses == [other[place].data_ptr() for place in group.places]
        assert [t.data_ptr() for t in group.tensors] == group.addresses


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda g: normal(6), id="size"),
        pytest.param(lambda g: normal(5).view(1, 5), id="shape"),
        pytest.param(lambda g: g.double(), id="dtype"),
        pytest.param(lambda g: normal(10)[::2], id="strides"),
        pytest.param(lambda g: torch._neg_view(g), id="negated"),
        pytest.param(lambda g: g.clone().requires_grad_(), id="requires-grad"),
        pytest.param(lambda g: g.to_sparse(), id="sparse"),
        pytest.param(lambda g: torch.nn.Parameter(g), id="type"),
        pytest.param(lambda g: torch.empty_like(g, device="meta"), id="device"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_changed_gradient_is_looked_at(walks, changed, place):
    grads = [normal(5) for _ in range(3)]
    gradients.of_tensors(grads)
    grads[place] = changed(grads[place])
    gradients.of_tensors(grads)
    assert len(walks) == 2


@pytest.mark.parametrize("resized", [lambda g: g.resize_(2), lambda g: g.t_(), lambda g: g.set_()])
def test_a_gradient_changed_in_place_is_looked_at(walks, resized):
    grads = [normal(10).view(5, 2) for _ in range(3)]
    gradients.of_tensors(grads)
    resized(grads[1])
    gradients.of_tensors(grads)
    assert len(walks) == 2


@pytest.mark.parametrize("again", [lambda g: g, lambda g: g.view(-1)], ids=["itself", "a view"])
def test_a_gradient_met_twice_counts_once_in_a_familiar_form(fresh, again):
    grads = [torch.ones(4) for _ in range(2)]
    assert tritonclip.get_total_norm(grads) == 8**0.5
    assert tritonclip.get_total_norm([grads[0], again(grads[0])]) == 2


@pytest.mark.parametrize(
    "make", [lambda g: [*g, g[0]], lambda g: [*g, torch.empty(0), torch.empty(0)]]
)
def test_a_list_that_cannot_be_recognised_is_not_learned(fresh, make):
    """A gradient listed twice, or several without memory."""
    gradients.of_tensors(make([normal(4), normal(5)]))
    assert not fresh._forms


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: [normal(3).to_sparse()], id="sparse"),
        pytest.param(lambda: [normal(6)[::2]], id="gaps"),
        pytest.param(lambda: [normal(3, dtype=torch.complex64)], id="complex"),
    ],
)
def test_what_takes_a_look_is_looked_at_every_time(walks, make):
    grads = make()
    assert described(grads) == described(grads)
    assert len(walks) == 2


def test_no_gradient_is_kept_alive(fresh):
    grads = contiguous()
    gradients.of_tensors(grads)
    gradients.of_tensors(grads)
    alive = [weakref.ref(grad) for grad in grads]
    del grads
    assert fresh._forms
    assert not any(ref() is not None for ref in alive)


def test_the_list_not_met_for_longest_is_forgotten(walks, fresh):
    lists = [[normal(n)] for n in range(1, REMEMBERED + 2)]
    for grads in lists[:-1]:
        gradients.of_tensors(grads)
    gradients.of_tensors(lists[0])
    gradients.of_tensors(lists[-1])
    assert len(fresh._forms) == REMEMBERED
    assert len(walks) == len(lists)
    gradients.of_tensors(lists[0])
    assert len(walks) == len(lists)
    gradients.of_tensors(lists[1])
    assert len(walks) == len(lists) + 1


def test_lists_of_one_length_are_told_apart(walks):
    lists = [[normal(5), normal(n), normal(7)] for n in (2, 3)]
    for grads in lists * 3:
        gradients.of_tensors(grads)
    assert len(walks) == len(lists)


def test_what_a_custom_operator_met_says_nothing_of_inference_mode(fresh):
    """Inside, a normal tensor has the dispatch keys of one made in inference mode."""

    @torch.library.custom_op("inside::clip", mutates_args={"a", "b"})
    def clip(a: Tensor, b: Tensor) -> Tensor:
        return tritonclip.clip_([parameter(a), parameter(b)], 1.0)

    for _ in range(2):
        clip(torch.ones(5), torch.ones(5))
    with torch.inference_mode():
        grads = [torch.full((5,), 2.0) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="made in inference mode"):
            tritonclip.clip_([parameter(grad) for grad in grads], 1.0)
    assert all((grad == 2).all() for grad in grads)
    clip(torch.ones(5), torch.ones(5))


@pytest.mark.parametrize("make", LISTS)
def test_without_guards_every_list_is_looked_at(walks, monkeypatch, make):
    monkeypatch.setattr(familiar, "TensorGuards", None)
    grads = make()
    assert described(grads) == described(grads)
    assert len(walks) == 2


def test_torch_has_the_guards():
    """Without them calls are right and slow: a PyTorch that moved them should be noticed here."""
    assert familiar.TensorGuards is not None
