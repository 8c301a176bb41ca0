"""Files of norms, and a command that runs in this process."""

import random

import pytest

import tritonclip
from tritonclip.commands.cli import main


@pytest.fixture
def spiky(path):
    """The file of a run with 3% spikes."""
    numbers = random.Random(0)
    with tritonclip.record(path) as recorder:
        for step in range(600):
            norm = numbers.lognormvariate(0.0, 0.2)
            recorder.add_(20 * norm if step % 33 == 32 else norm, limit=2.0)
    return path


@pytest.fixture
def run(capsys):
    """Runs a command, which ends with a status; what it printed."""

    def run(*arguments, status=0):
        assert main([*map(str, arguments)]) == status
        return capsys.readouterr()

    return run
