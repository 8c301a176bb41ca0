"""A recorder keeps the norms of a run in a file: what it takes, and when it writes.

The file is begun, resumed, and never mixed up with that of another run.
"""

import contextlib
import copy
import csv
import gc
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import tritonclip
import tritonclip.monitor.recorder as recorder_module
from helpers.workers import NEEDS_FORK, python, run_in_fork, run_in_threads
from tritonclip.monitor.history import read
from tritonclip.monitor.recorder import Recorder


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


def test_rows_of_slow_steps_are_written_in_time(path, monkeypatch):
    """A process that is killed loses ten seconds at most."""
    now = 100.0
    monkeypatch.setattr(recorder_module, "monotonic", lambda: now)
    recorder = tritonclip.record(path)
    for step in range(1, 40):
        recorder.add_(torch.tensor(1.0))
        assert (rows_in(path) if path.exists() else 0) >= step - 10
        now += 1.0
    now += 60.0
    recorder.add_(torch.tensor(1.0))
    assert rows_in(path) == 40


def test_a_flush_may_leave_out_what_has_not_arrived(path, device):
    recorder = tritonclip.record(path)
    recorder.add_(torch.tensor(1.0, device=device))
    recorder.flush(wait=False)
    if device.type == "cpu":
        assert rows_in(path) == 1
    recorder.close()
    assert rows_in(path) == 1


def test_threads_add_rows_to_one_recorder(path, frequent_switches):
    recorder = tritonclip.record(path, every=3)
    recorder.add_(torch.tensor(1.0))

    def work(thread: int) -> None:
        for i in range(200):
            recorder.add_(torch.tensor(float(1 + 1000 * thread + i)))

    run_in_threads(work, 4)
    recorder.close()
    history = read(path)
    assert history.steps.tolist() == list(range(1, 802))
    expected = [1.0, *(1.0 + 1000 * thread + i for thread in range(4) for i in range(200))]
    assert sorted(history.norms.tolist()) == sorted(expected)


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
        ({"norm": "1"}, TypeError, "norm must be a number or a one-element tensor, got .1."),
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


@NEEDS_FORK
def test_the_end_of_a_block_in_a_fork_does_nothing(path):
    def work() -> None:
        recorder.__exit__(None, None, None)

    with tritonclip.record(path) as recorder:
        recorder.add_(1.0)
        run_in_fork(work)
    assert len(read(path)) == 1


@pytest.mark.parametrize("end", ["the block", "the recorder"])
def test_rows_that_cannot_be_written_at_the_end_are_a_warning(tmp_path, end):
    folder = tmp_path / "runs"
    folder.mkdir()
    lost = pytest.warns(RuntimeWarning, match=r"rows for .*run\.csv are lost")
    if end == "the block":
        with lost, tritonclip.record(folder / "run.csv") as recorder:
            recorder.add_(1.0)
            folder.rmdir()
    else:
        recorder = tritonclip.record(folder / "run.csv")
        recorder.add_(1.0)
        folder.rmdir()
        with lost:
            del recorder
            gc.collect()


def test_a_file_that_was_removed_begins_anew(path):
    recorder = tritonclip.record(path, every=1)
    recorder.add_(1.0)
    path.unlink()
    recorder.add_(2.0)
    recorder.add_(3.0)
    assert read(path).norms.tolist() == [2.0, 3.0]


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


def resumed(path: Path, steps: int) -> Recorder:
    """A recorder that goes on from a checkpoint."""
    recorder = tritonclip.record(path)
    recorder.load_state_dict({"steps": steps})
    return recorder


def test_csv_is_plain(path):
    with tritonclip.record(path) as recorder:
        recorder.add_(torch.tensor(0.5), limit=1.0, skipped=False, norms={"a, b": 0.25})
    assert path.read_text() == (
        'step,norm,coefficient,limit,skipped,loss,"norm/a, b"\n1,0.5,,1.0,0,,0.25\n'
    )


@hypothesis.given(
    norms=st.lists(st.floats(min_value=0.0) | st.just(math.nan), min_size=1, max_size=20),
    every=st.integers(1, 7),
    as_tensors=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_record_gives_every_float64_back(tmp_path_factory, norms, every, as_tensors):
    path = tmp_path_factory.mktemp("runs") / "run.csv"
    with tritonclip.record(path, every=every) as recorder:
        for norm, as_tensor in zip(norms, as_tensors, strict=False):
            recorder.add_(torch.tensor(norm, dtype=torch.float64) if as_tensor else norm)
    expected = torch.tensor(norms, dtype=torch.float64)
    torch.testing.assert_close(read(path).norms, expected, rtol=0, atol=0, equal_nan=True)


def test_a_file_with_the_steps_of_another_run_is_refused_before_the_first_step(path):
    with tritonclip.record(path) as recorder:
        recorder.add_(1.0)
    before = path.read_text()
    other = tritonclip.record(path)
    said = r"run\.csv has the steps of another run.*another path.*from its checkpoint"
    with pytest.raises(FileExistsError, match=said):
        other.add_(2.0)
    assert other.steps == 0
    other.close()
    assert path.read_text() == before


def test_a_second_run_that_began_before_the_first_rows_is_refused(path):
    """As two processes with one path, neither of which finds a file at its first step."""
    first, second = tritonclip.record(path, every=2), tritonclip.record(path, every=2)
    for recorder in (first, second):
        recorder.add_(1.0)
    first.add_(2.0)
    with pytest.raises(FileExistsError, match=r"run\.csv has the steps of another run"):
        second.add_(3.0)
    for norm in (3.0, 4.0):
        first.add_(norm)
    first.close()
    with pytest.warns(RuntimeWarning, match="rows .* are lost"):
        second.__exit__()
    assert read(path).norms.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_record_resumes_after_an_earlier_checkpoint(path):
    with tritonclip.record(path) as recorder:
        for step in range(3):
            recorder.add_(float(step))
        saved = recorder.state_dict()
        recorder.add_(100.0)
        recorder.add_(100.0)
    before = path.read_text()
    with tritonclip.record(path, every=5) as recorder:
        recorder.load_state_dict(saved)
        recorder.add_(3.0)
        # Nothing goes before there are rows in its place.
        assert path.read_text() == before
        recorder.add_(4.0)
        recorder.add_(5.0)
    history = read(path)
    assert history.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert history.norms.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_run_that_goes_back_to_a_checkpoint_replaces_its_later_steps(path):
    with tritonclip.record(path, every=2) as recorder:
        for step in range(5):
            recorder.add_(float(step))
        for _ in range(2):
            recorder.load_state_dict({"steps": 3})
            recorder.add_(30.0)
    assert read(path).norms.tolist() == [0.0, 1.0, 2.0, 30.0]


def test_record_resumes_in_a_new_file(path):
    with resumed(path, 7) as recorder:
        recorder.add_(1.0)
    assert read(path).steps.tolist() == [8]


@pytest.mark.parametrize("state", [{}, {"steps": -1}, {"steps": 1.5}, {"steps": True}], ids=str)
def test_load_refuses_a_state_that_is_none(path, state):
    recorder = tritonclip.record(path)
    with pytest.raises(ValueError, match=r"expected the result of Recorder\.state_dict"):
        recorder.load_state_dict(state)
    assert recorder.steps == 0


def test_record_resumes_after_a_crash_at_any_byte(path):
    with tritonclip.record(path) as recorder:
        for norm in (1.25, 2.25):
            recorder.add_(norm, norms={"body": norm})
    data = path.read_bytes()
    for size in range(data.index(b"\n") + 1, len(data) + 1):
        path.write_bytes(data[:size])
        n = data[:size].count(b"\n") - 1
        with resumed(path, 2) as recorder:
            recorder.add_(9.0, norms={"body": 8.0})
        history = read(path)
        assert history.norms.tolist() == [*[1.25, 2.25][:n], 9.0]
        assert history.named_norms["body"].tolist() == [*[1.25, 2.25][:n], 8.0]


def test_a_run_is_resumed_with_the_columns_of_its_file(path):
    with tritonclip.record(path) as recorder:
        recorder.add_(1.0, norms={"body": 1.0})
    before = path.read_text()
    recorder = resumed(path, 1)
    for norms in ({"head": 1.0}, {}):
        with pytest.raises(ValueError, match=r"loss,norm/body; to resume .*record with the each="):
            recorder.add_(1.0, norms=norms)
    recorder.close()
    assert path.read_text() == before


def test_record_begins_in_an_empty_file(path):
    path.touch()
    with tritonclip.record(path) as recorder:
        recorder.add_(1.0)
    assert len(read(path)) == 1


@pytest.mark.parametrize("name", ["run.txt", "run", "run.jsonl"])
def test_record_refuses_other_endings(tmp_path, name):
    with pytest.raises(ValueError, match=r"ends in \.csv"):
        tritonclip.record(tmp_path / name)


def test_record_refuses_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="make it first"):
        tritonclip.record(tmp_path / "runs" / "run.csv")


def test_rows_stay_until_they_can_be_written(path, monkeypatch):
    recorder = tritonclip.record(path)
    recorder.add_(1.0)
    recorder.flush()
    recorder.add_(2.0)
    whole = Path.open

    class Full:
        """A file on a disk that becomes full."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = whole(*args, **kwargs)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def seek(self, *where: int) -> Any:
            return self.file.seek(*where)

        def truncate(self, size: int) -> None:
            self.file.truncate(size)

        def write(self, data: bytes) -> None:
            self.file.write(data[:-3])
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *args, **options: Full(*args, **options))
        with pytest.raises(OSError, match="No space"):
            recorder.flush()
    assert len(read(path)) == 1
    recorder.close()
    assert read(path).norms.tolist() == [1.0, 2.0]
