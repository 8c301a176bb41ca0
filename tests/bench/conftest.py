"""The commands of the benchmarks, which here copy little to measure memory."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from bench import timing
from bench.__main__ import main


@pytest.fixture(autouse=True)
def little_copied(monkeypatch):
    monkeypatch.setitem(timing.COPIED, "cpu", 2**16)


@pytest.fixture
def command():
    """Runs a command, and gives torch its threads back."""
    threads = torch.get_num_threads()

    def run(*arguments):
        return CliRunner().invoke(main, [str(one) for one in arguments])

    yield run
    torch.set_num_threads(threads)
