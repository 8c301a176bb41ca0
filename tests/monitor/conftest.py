"""Files of recorders."""

import pytest


@pytest.fixture
def path(tmp_path):
    """The path of a file that is not there."""
    return tmp_path / "run.csv"
