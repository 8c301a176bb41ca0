"""Files of recorders."""

from __future__ import annotations

import pytest

import tritonclip


@pytest.fixture
def path(tmp_path):
    """The path of a file that is not there."""
    return tmp_path / "run.csv"


@pytest.fixture
def record_run(path):
    """Records a run."""

    def record_run(norms, **values):
        with tritonclip.record(path) as recorder:
            for norm in norms:
                recorder.add_(float(norm), **values)
        return path

    return record_run
