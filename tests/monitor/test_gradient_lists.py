"""Which list a call is on: lists that stay, grow, are replaced, or are new at every call."""

import pytest
import torch

from helpers.cases import parameters
from tritonclip.monitor.gradient_lists import MOST_LISTS, GradientList, GradientLists


def made(n: int, size: int = 3) -> list[torch.Tensor]:
    return parameters([torch.ones(size) for _ in range(n)])


def numbers_of(lists: GradientLists, calls: list[list[torch.Tensor]]) -> list[int]:
    return [found.number for given in calls if (found := lists.find(given)) is not None]


def test_lists_of_equal_shapes_are_known_by_their_tensors():
    first, second = made(3), made(3)
    calls = [first, second, *([p] for p in first)] * 2
    assert numbers_of(GradientLists(), calls) == [1, 2, 3, 4, 5] * 2


def test_lists_that_share_their_ends_are_different():
    trunk, a, b, head = made(4)
    calls = [[trunk, a, head], [trunk, b, head], [trunk, a], [trunk, b]] * 2
    assert numbers_of(GradientLists(), calls) == [1, 2, 3, 4] * 2


def test_the_name_says_number_and_size():
    lists = GradientLists()
    assert str(lists.find(made(2, 1500))) == "1: 2 tensors, 3,000 elements"
    assert str(lists.find(made(1, 1))) == "2: 1 tensor, 1 elements"


def test_new_tensors_go_on_with_the_list_that_is_freed():
    lists = GradientLists()
    assert {lists.find(made(2)).number for _ in range(50)} == {1}  # type: ignore[union-attr]


def test_replaced_parameters_are_the_same_list():
    lists, model = GradientLists(), torch.nn.Linear(4, 3)
    other = torch.nn.Linear(4, 3)
    calls = numbers_of(lists, [[*model.parameters()], [*other.parameters()]])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    calls += numbers_of(lists, [[*model.parameters()]])
    model.double()
    calls += numbers_of(lists, [[*model.parameters()], [*other.parameters()]])
    assert calls == [1, 2, 1, 1, 2]


def test_a_module_may_swap_its_tensors():
    """Torch refuses to swap tensors with weak references."""
    model = torch.nn.Linear(4, 3)
    lists = GradientLists()
    before = numbers_of(lists, [[*model.parameters()]])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert numbers_of(lists, [[*model.parameters()]]) == before == [1]


def test_parameters_of_a_lazy_module_that_is_never_called_have_no_size():
    lists = GradientLists()
    given = [*torch.nn.LazyLinear(2).parameters(), *made(1)]
    assert str(lists.find(given)) == "1: 3 tensors, 3 elements"
    assert numbers_of(lists, [given, made(3), given]) == [1, 2, 1]


@pytest.mark.parametrize("kind", ["grows", "shrinks at its start", "sizes"])
def test_lists_that_change_at_every_call_are_few(kind):
    lists, params = GradientLists(), made(200)
    found = set()
    for n in range(1, 200):
        given = params[:n] if kind == "grows" else params[n:]
        given = made(1, n) if kind == "sizes" else given
        found |= {str(lists.find(given))}
    assert len(found) <= 12
    assert any("tensors that change" in name for name in found)


def test_lists_above_a_bound_are_none():
    lists, params = GradientLists(), made(MOST_LISTS + 1)
    found = [lists.find([param]) for param in params]
    assert found[-1] is None
    assert None not in found[:-1]


def test_a_list_above_the_bound_is_not_searched_for_at_each_call(monkeypatch):
    """A model of more parameters, with one call for each, would become several times slower."""
    lists, params = GradientLists(), made(MOST_LISTS + 1)
    for param in params:
        lists.find([param])
    searched = property(lambda _: pytest.fail("the list was searched for"))
    monkeypatch.setattr(GradientList, "is_freed", searched)
    assert lists.find([params[-1]]) is None
