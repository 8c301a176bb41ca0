"""Work that hangs ends its test; a thinned product of parameters holds every combination."""

import ctypes
import os
from itertools import combinations, product
from pathlib import Path

import pytest

from helpers.covering import covering
from helpers.workers import NEEDS_FORK, run_in_fork


def hang(path: Path) -> None:
    """Holds the interpreter's lock, as a destructor that waits for another thread may."""
    path.write_text(str(os.getpid()))
    while True:
        ctypes.PyDLL(None).sleep(600)


@NEEDS_FORK
def test_fork_that_hangs_is_ended(tmp_path):
    path = tmp_path / "pid"
    with pytest.raises(pytest.fail.Exception, match=r"did not end in 0\.5 s:[^$]* in hang"):
        run_in_fork(lambda: hang(path), seconds=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


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
