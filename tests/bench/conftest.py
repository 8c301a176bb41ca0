"""The commands of the benchmarks, which here copy little to measure memory."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from bench import timing
from bench.__main__ import main


@pytest.fixture(autouse=True)
def little_copied(monkeypatch):
    monkeypatch.setitem(timing.COPIED, "cpu", 2**16)


@pytest.fixture
def command(set_threads):
    """Runs a command, which may set the threads of torch."""

    def run(*arguments):
        return CliRunner().invoke(main, [str(one) for one in arguments])

    return run
