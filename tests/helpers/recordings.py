"""Files of recorders: their paths, and files with whole runs."""

from __future__ import annotations

import pytest

import tritonclip


@pytest.fixture
def path(request, tmp_path):
    """The path of a file that is not there, by its ending."""
    return tmp_path / f"run.{getattr(request, 'param', 'csv')}"


@pytest.fixture
def record_runs(path):
    """Records runs into one file, each by a recorder without a checkpoint."""

    def record_runs(*runs, **values):
        for norms in runs:
            with tritonclip.record(path, append=True) as recorder:
                for norm in norms:
                    recorder.add_(float(norm), **values)
        return path

    return record_runs
