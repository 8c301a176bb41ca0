"""The file of a recorder: begun, resumed, and never mixed up with that of another run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import tritonclip
from tritonclip.monitor.history import read
from tritonclip.monitor.recorder import Recorder


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

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

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
