"""The file of a recorder: begun, gone on with, and never mixed up with another."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import tritonclip
from tritonclip.monitor import recorder as recorder_module
from tritonclip.monitor.history import read

COLUMNS = ["run", "step", "norm", "coefficient", "limit", "skipped", "loss"]


def test_csv_is_plain(path):
    with tritonclip.record(path) as recorder:
        recorder.add_(torch.tensor(0.5), limit=1.0, skipped=False, norms={"a, b": 0.25})
    assert path.read_text() == (
        'run,step,norm,coefficient,limit,skipped,loss,"norm/a, b"\n1,1,0.5,,1.0,0,,0.25\n'
    )


@pytest.mark.parametrize("path", ["jsonl"], indirect=True)
def test_json_lines_are_strict_json(path):
    with tritonclip.record(path) as recorder:
        for norm in (math.nan, math.inf, 1.5):
            recorder.add_(torch.tensor(norm), skipped=False)

    # A constant such as NaN is refused.
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [row["norm"] for row in rows] == ["NaN", "Infinity", 1.5]
    first = {"run": 1, "step": 1, "norm": "NaN", "skipped": False}
    assert rows[0] == dict.fromkeys(COLUMNS) | first
    norms = read(path).norms.tolist()
    assert norms == pytest.approx([math.nan, math.inf, 1.5], rel=0, abs=0, nan_ok=True)


@hypothesis.given(
    norms=st.lists(st.floats(min_value=0.0) | st.just(math.nan), min_size=1, max_size=20),
    every=st.integers(1, 7),
    ending=st.sampled_from(["csv", "jsonl"]),
    as_tensors=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_record_gives_every_float64_back(tmp_path_factory, norms, every, ending, as_tensors):
    path = tmp_path_factory.mktemp("runs") / f"run.{ending}"
    with tritonclip.record(path, every=every) as recorder:
        for norm, as_tensor in zip(norms, as_tensors, strict=False):
            recorder.add_(torch.tensor(norm, dtype=torch.float64) if as_tensor else norm)
    expected = torch.tensor(norms, dtype=torch.float64)
    torch.testing.assert_close(read(path).norms, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("path", ["csv", "jsonl"], indirect=True)
def test_record_appends_to_a_file(path):
    for start in (0, 3):
        with tritonclip.record(path, append=True) as recorder:
            assert recorder.steps == start
            for step in range(start, start + 3):
                recorder.add_(float(step), norms={"body": 1.0})
    history = read(path)
    assert history.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert history.norms.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert history.named_norms["body"].tolist() == [1.0] * 6
    assert [len(run) for run in history.runs] == [3, 3]


def test_record_warns_that_it_appends(path):
    with tritonclip.record(path) as recorder:
        recorder.add_(1.0)
    with pytest.warns(UserWarning, match=r"steps up to 1.*append=True.*another path") as caught:
        recorder = tritonclip.record(path)
    assert caught[0].filename == __file__
    recorder.add_(2.0)
    recorder.close()
    assert read(path).norms.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
def test_record_without_append_refuses_a_file_with_steps(path, closed):
    first = tritonclip.record(path, append=False)
    first.add_(1.0)
    if closed:
        first.close()
    said = r"run\.csv already has steps.*append=False.*another path"
    with pytest.raises(FileExistsError, match=said):
        tritonclip.record(path, append=False)
    assert first.is_closed == closed
    first.close()
    assert read(path).norms.tolist() == [1.0]


def test_record_resumes_after_an_earlier_checkpoint(path):
    with tritonclip.record(path) as recorder:
        for step in range(3):
            recorder.add_(float(step))
        saved = recorder.state_dict()
        recorder.add_(100.0)
        recorder.add_(100.0)
    with tritonclip.record(path, append=True) as recorder:
        recorder.load_state_dict(saved)
        recorder.add_(3.0)
    history = read(path)
    assert history.steps.tolist() == [1, 2, 3, 4]
    assert history.norms.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (len(history.runs), history.replaced) == (1, 2)


@pytest.mark.parametrize(
    "state", [{}, {"steps": -1}, {"steps": 1.5}, {"steps": True}, {"steps": 1, "run": 0}], ids=str
)
def test_load_refuses_a_state_that_is_none(path, state):
    recorder = tritonclip.record(path)
    with pytest.raises(ValueError, match=r"expected the result of Recorder\.state_dict"):
        recorder.load_state_dict(state)
    assert recorder.steps == 0


@pytest.mark.parametrize("path", ["csv", "jsonl"], indirect=True)
def test_record_resumes_after_a_crash_at_any_byte(path):
    with tritonclip.record(path) as recorder:
        for norm in (1.25, 2.25):
            recorder.add_(norm, norms={"body": norm})
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        n = max(data[:size].count(b"\n") - (path.suffix == ".csv"), 0)
        with tritonclip.record(path, append=True) as recorder:
            assert recorder.steps == n
            recorder.add_(9.0, norms={"body": 8.0})
        history = read(path)
        assert history.norms.tolist() == [*[1.25, 2.25][:n], 9.0]
        assert history.named_norms["body"].tolist() == [*[1.25, 2.25][:n], 8.0]
        assert len(history.runs) == (2 if n else 1)


@pytest.mark.parametrize("path", ["csv", "jsonl"], indirect=True)
def test_record_resumes_an_earlier_run_and_leaves_the_others(path):
    states = []
    for norms in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
        with tritonclip.record(path, append=True) as recorder:
            for norm in norms:
                recorder.add_(norm)
                states.append(recorder.state_dict())
    with tritonclip.record(path, append=True) as recorder:
        recorder.load_state_dict(states[1])
        recorder.add_(30.0)
    with tritonclip.record(path, append=True) as recorder:
        recorder.load_state_dict({"steps": 2})
        recorder.add_(7.0)
    history = read(path)
    assert [run.steps.tolist() for run in history.runs] == [[1, 2, 3], [4, 5, 6], [3]]
    assert history.norms.tolist() == [1.0, 2.0, 30.0, 4.0, 5.0, 6.0, 7.0]
    assert history.replaced == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.csv", "time,loss\n1,2\n"),
        ("run.csv", "run,step,norm\n1,1,2\n"),
        ("run.csv", "run,step,norm,coefficient,limit,skipped,loss\n1,x,1,,,,\n"),
        ("run.csv", "no line break"),
        ("run.csv", "\n"),
        ("run.csv", "\xff\n\xff\n"),
        ("run.jsonl", "[1, 2]\n"),
        ("run.jsonl", '{"loss": 1}\n'),
        ("run.jsonl", "{\n"),
        ("run.jsonl", '{"run": "exp", "step": 1, "norm": 2}'),
        ("run.jsonl", "[" * 200_000 + "\n"),
    ],
    ids=[
        *("other", "fewer", "step", "text", "line", "bytes", "array", "object", "no json"),
        *("cut", "nested"),
    ],
)
def test_record_refuses_a_file_that_no_recorder_wrote(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    said = r"exists, and no row can be appended to it: .*another path"
    with pytest.raises(ValueError, match=said):
        tritonclip.record(path)
    assert path.read_bytes() == text.encode("latin-1")


def test_record_names_the_columns_that_a_file_lacks(path):
    path.write_text("run,step,norm,coefficient,skipped,loss\n1,1,2,,,\n")
    with pytest.raises(ValueError, match=r"appended to it: .*there is no limit; pass another"):
        tritonclip.record(path)


def test_rows_of_other_norms_are_refused_with_what_to_pass(path):
    with tritonclip.record(path, each=True) as recorder:
        recorder.add_(5.0, norms={"a": 4.0, "b": 3.0})
    with pytest.raises(ValueError, match=r"norm/a, norm/b.*got no norms by name: record with the"):
        tritonclip.record(path, append=True).add_(5.0)


def test_record_refuses_a_file_with_other_columns(path):
    with tritonclip.record(path) as recorder:
        recorder.add_(1.0, norms={"body": 1.0})
    before = path.read_text()
    recorder = tritonclip.record(path, append=True)
    with pytest.raises(ValueError, match=r"norm/body; expected the same, got norm/head"):
        recorder.add_(1.0, norms={"head": 1.0})
    recorder.close()
    assert path.read_text() == before


def test_record_begins_in_an_empty_file(path):
    path.touch()
    with tritonclip.record(path) as recorder:
        recorder.add_(1.0)
    assert len(read(path)) == 1


@pytest.mark.parametrize("name", ["run.txt", "run", "run.json"])
def test_record_refuses_other_endings(tmp_path, name):
    with pytest.raises(ValueError, match=r"ends in \.csv or \.jsonl"):
        tritonclip.record(tmp_path / name)


def test_record_refuses_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="make it first"):
        tritonclip.record(tmp_path / "runs" / "run.csv")


def test_two_recorders_of_one_file_are_noticed(path):
    first = tritonclip.record(path)
    # As another process has it.
    recorder_module._open.clear()
    second = tritonclip.record(path)
    for recorder in (first, second):
        recorder.add_(1.0)
    first.flush()
    with pytest.raises(RuntimeError, match=r"something else writes to it.*write=rank == 0"):
        second.flush()
    assert len(read(path)) == 1
    # What it holds has nowhere to go.
    path.unlink()
    second.close()


def test_rows_stay_until_they_can_be_written(path, monkeypatch):
    recorder = tritonclip.record(path)
    recorder.add_(1.0)
    recorder.flush()
    recorder.add_(2.0)
    whole = Path.open

    @contextlib.contextmanager
    def open_full(*args: Any, **kwargs: Any) -> Any:
        with whole(*args, **kwargs) as file:

            def write(data: memoryview) -> Any:
                if len(data) < 6:
                    raise OSError(28, "No space left on device")
                return file.write(data[:-3])

            yield SimpleNamespace(seek=file.seek, truncate=file.truncate, write=write)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        with pytest.raises(OSError, match="No space"):
            recorder.flush()
    assert len(read(path)) == 1
    recorder.close()
    assert read(path).norms.tolist() == [1.0, 2.0]


def test_a_new_recorder_of_a_file_closes_the_old_one(path):
    """As where a cell of a notebook is run again."""
    first = tritonclip.record(path)
    first.add_(1.0)
    second = tritonclip.record(path, append=True)
    second.add_(2.0)
    second.close()
    assert first.is_closed
    rows = [line.split(",")[:3] for line in path.read_text().splitlines()[1:]]
    assert rows == [["1", "1", "1.0"], ["2", "2", "2.0"]]
