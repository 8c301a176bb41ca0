"""The tests in several processes fail where they should, and leave no process behind."""

import os
import time
from collections.abc import Iterator
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch import distributed as dist

from helpers import processes
from helpers.processes import Worlds, in_processes


@pytest.fixture
def own_worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worlds]:
    # None of the processes that are left comes to an end.
    monkeypatch.setattr(processes, "GRACE", 0.5)
    worlds = Worlds()
    yield worlds
    worlds.end()


def _raise_in_one() -> None:
    if dist.get_rank() == 1:
        raise AssertionError("of process 1")
    dist.all_reduce(torch.ones(1))


def _die_in_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def _hang_in_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def _skip() -> None:
    pytest.importorskip("no_such_package", reason="of no package")


def test_a_test_is_skipped_where_every_process_skips_it(own_worlds: Worlds) -> None:
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="of no package"):
            own_worlds.run(2, _skip, {}, seconds=20.0)


@in_processes(2)
def test_in_processes_makes_a_group() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(_raise_in_one, "AssertionError: of process 1", id="raises"),
        pytest.param(_die_in_one, "process 1 died with exit code 3", id="dies"),
        pytest.param(_hang_in_one, "in _hang_in_one", id="hangs"),
    ],
)
def test_in_processes_fails_and_ends_all(own_worlds: Worlds, body: Any, message: str) -> None:
    before = set(active_children())
    with pytest.raises(pytest.fail.Exception, match=message):
        own_worlds.run(2, body, {}, seconds=2.0)
    assert set(active_children()) <= before
