"""A recorder keeps the norms of a run in a file: what it takes, and when it writes."""

from __future__ import annotations

import contextlib
import copy
import csv
import gc
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tritonclip
from helpers.workers import NEEDS_FORK, python, run_in_fork
from tritonclip.monitor.history import read


def rows_in(path: Path) -> int:
    """The rows of a file, counted without the library."""
    return len(list(csv.DictReader(path.read_text().splitlines())))


def test_record_writes_a_row_a_step(path):
    with tritonclip.record(path) as recorder:
        recorder.add_(torch.tensor(2.0), coefficient=torch.tensor(0.5), limit=1.0)
        recorder.add_(0.25, limit=torch.tensor(1.0), skipped=torch.tensor(True), loss=-3)
        recorder.add_(torch.tensor(0.1, dtype=torch.float64), skipped=False, loss=torch.tensor(0.5))
    history = read(path)
    assert history.steps.tolist() == [1, 2, 3]
    assert history.norms.tolist() == [2.0, 0.25, 0.1]
    assert history.limits.nan_to_num(-1).tolist() == [1.0, 1.0, -1.0]
    assert history.coefficients.nan_to_num(-1).tolist() == [0.5, -1.0, -1.0]
    assert history.skipped.nan_to_num(-1).tolist() == [-1.0, 1.0, 0.0]
    assert history.losses.nan_to_num(-1).tolist() == [-1.0, -3.0, 0.5]
    assert history.is_clipped.tolist() == [True, False, False]
    assert history.is_skipped.tolist() == [False, True, False]


def test_record_writes_after_every_so_many_steps(path):
    recorder = tritonclip.record(path, every=3)
    assert not path.exists()
    written = []
    for _ in range(7):
        recorder.add_(torch.tensor(1.0))
        written.append(rows_in(path) if path.exists() else 0)
    recorder.close()
    assert written == [0, 0, 3, 3, 3, 6, 6]
    assert rows_in(path) == 7


def test_clip_and_record_together(path):
    weight = torch.nn.Parameter(torch.zeros(2))
    with tritonclip.record(path) as recorder:
        for size in (0.1, 10.0):
            weight.grad = torch.tensor([3.0, 4.0]) * size
            recorder.add_(tritonclip.clip_(weight, 1.0), limit=1.0)
    history = read(path)
    # float32 norms of 0.5 and 50, right to 1e-6.
    assert history.norms.tolist() == pytest.approx([0.5, 50.0], rel=1e-6, abs=0)
    assert history.is_clipped.tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be"),
        ({"every": -1}, ValueError, "every must be"),
        ({"every": 1.5}, TypeError, "every must be"),
        ({"every": True}, TypeError, "every must be"),
        ({"every": None}, TypeError, "every must be"),
        ({"write": "rank 0"}, TypeError, "write must be True, False or None, got 'rank 0'"),
        ({"each": "all"}, TypeError, "each must be True or False"),
        ({"each": 2}, TypeError, "each must be True or False"),
    ],
    ids=str,
)
def test_record_refuses_wrong_options(path, options, error, message):
    with pytest.raises(error, match=message):
        tritonclip.record(path, **options)


DTENSOR: Any = torch.ones(())
DTENSOR.placements = [SimpleNamespace(is_replicate=lambda: False)]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"norm": None}, TypeError, "got None, which clip_ returns"),
        ({"norm": "1"}, TypeError, "norm must be a number"),
        ({"norm": True}, TypeError, "norm must be a number"),
        ({"norm": -1.0}, ValueError, "norm must be 0 or more, got -1.0"),
        ({"norm": torch.ones(3)}, ValueError, r"one real number, got shape \(3,\).*norms\.max"),
        ({"norm": torch.ones((), dtype=torch.complex64)}, ValueError, "one real number"),
        ({"norm": torch.ones((), device="meta")}, ValueError, "on meta"),
        ({"norm": DTENSOR}, ValueError, "pass its full_tensor"),
        ({"norm": 1.0, "coefficient": [1.0]}, TypeError, "coefficient must be a number"),
        ({"norm": 1.0, "limit": "inf"}, TypeError, "limit must be a number"),
        ({"norm": 1.0, "skipped": 1}, TypeError, "skipped must be a truth value"),
        ({"norm": 1.0, "norms": {"a": None, "b": "x"}}, TypeError, r"norms\['b'\] must be"),
        ({"norm": 1.0, "norms": {"": 1.0}}, ValueError, "must have names, got ''"),
        ({"norm": 1.0, "norms": {3: 1.0}}, ValueError, "must have names, got 3"),
        ({"norm": 1.0, "norms": {"a\n": 1.0, "a\\n": 1.0}}, ValueError, "differ when printed"),
    ],
    ids=lambda value: str(value)[:30] if not isinstance(value, dict) else None,
)
def test_add_refuses_what_is_no_norm_and_changes_nothing(path, values, error, message):
    with tritonclip.record(path) as recorder:
        recorder.add_(1.0) if "norms" not in values else None
        steps = recorder.steps
        with pytest.raises(error, match=message):
            recorder.add_(**values)
        assert recorder.steps == steps
    assert not path.exists() or rows_in(path) == steps


def test_add_refuses_other_names_than_at_the_step_before(path):
    with tritonclip.record(path) as recorder:
        recorder.add_(1.0, norms={"a": 1.0, "b": 1.0})
        with pytest.raises(ValueError, match=r"at step 2 expected 2 names, got 2; different: b, c"):
            recorder.add_(1.0, norms={"a": 1.0, "c": 1.0})
        recorder.add_(2.0, norms={"a": 1.0, "b": 2.0})
    assert read(path).named_norms["b"].tolist() == [1.0, 2.0]


def test_close_ends_the_recording(path):
    recorder = tritonclip.record(path)
    recorder.add_(1.0)
    recorder.close()
    recorder.close()
    assert recorder.is_closed
    with pytest.raises(RuntimeError, match="is closed; expected an open one"):
        recorder.add_(2.0)
    with pytest.raises(RuntimeError, match="is closed"):
        recorder.flush()
    assert len(read(path)) == 1


def test_rows_are_written_where_the_loop_fails(path):
    recorder = tritonclip.record(path)
    with contextlib.suppress(KeyError), recorder:
        recorder.add_(1.0)
        raise KeyError
    assert len(read(path)) == 1


def test_rows_are_written_when_a_recorder_is_forgotten(path):
    tritonclip.record(path).add_(torch.tensor(1.0))
    gc.collect()
    assert len(read(path)) == 1


def test_rows_are_written_when_the_program_ends_by_an_error(path):
    code = "import sys, torch, tritonclip; recorder = tritonclip.record(sys.argv[1]); "
    python("-c", code + "recorder.add_(torch.tensor(1.0)); 1 / 0", str(path))
    assert len(read(path)) == 1


@NEEDS_FORK
def test_a_fork_neither_writes_nor_records(path):
    recorder = tritonclip.record(path)
    recorder.add_(1.0)

    def work() -> None:
        with pytest.raises(RuntimeError, match="from a fork"):
            recorder.add_(2.0)
        recorder._close()

    run_in_fork(work)
    assert not path.exists()
    recorder.add_(3.0)
    recorder.close()
    assert read(path).norms.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_recorder_is_not_copied(path, make):
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*make a new one"):
        make(tritonclip.record(path))


def test_a_process_that_is_told_not_to_writes_nothing_and_counts(path):
    path = path.parent / "no folder" / "run.csv"
    with tritonclip.record(path, every=1, write=False) as recorder:
        recorder.add_(1.0)
        with pytest.raises(ValueError, match="norm must be 0 or more"):
            recorder.add_(-1.0)
        assert recorder.state_dict() == {"steps": 1}
    assert not path.parent.exists()


def test_repr_tells_file_and_steps(path):
    recorder = tritonclip.record(path)
    recorder.add_(1.0)
    assert repr(recorder) == f"<Recorder of {path}, 1 steps>"
    recorder.close()
    assert repr(recorder).endswith("1 steps, closed>")


@pytest.mark.usefixtures("fresh_compiler")
def test_add_breaks_the_graph_of_a_compiled_step(path):
    with tritonclip.record(path) as recorder:

        @torch.compile(backend="eager")
        def step(x: Any) -> Any:
            norm = x.norm()
            recorder.add_(norm, limit=1.0)
            return norm + 1

        assert float(step(torch.tensor([3.0, 4.0]))) == 6.0
    assert read(path).norms.tolist() == [5.0]
