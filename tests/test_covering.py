"""A thinned product holds every combination of values, in few of its cases."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from helpers.covering import covering

AXES = ("abc", (0, 1), "xyz", (True, False))


@pytest.mark.parametrize(("strength", "most"), [(0, 1), (1, 3), (2, 12), (3, 24)])
def test_chosen_cases_hold_every_combination(strength, most):
    cases = list(product(*AXES))
    chosen = [cases[i] for i in covering(cases, strength)]
    for axes in combinations(range(len(AXES)), strength):
        found, every = ({tuple(case[i] for i in axes) for case in some} for some in (chosen, cases))
        assert found == every
    assert len(chosen) <= most


def test_cases_of_fewer_axes_are_all_chosen():
    assert covering([[one] for one in "abc"], 2) == [0, 1, 2]
    assert covering(list(product("ab", "xy")), 2) == [0, 1, 2, 3]
