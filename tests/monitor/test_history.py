"""Files of a run, from a recorder or from elsewhere; files that are none say what to do."""

from __future__ import annotations

import contextlib
import math

import hypothesis
import pytest
from hypothesis import strategies as st

import tritonclip
from tritonclip.messages import printable
from tritonclip.monitor.history import read


@pytest.fixture
def write(tmp_path):
    """Writes a file and returns its path."""

    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "norm\n1.5\n2\n"),
        ("a.csv", "step,norm\n1,1.5\n2,2\n"),
        ("a.csv", "\ufeffstep, norm ,loss\r\n1,1.5,a\r\n2,2,\r\n"),
        ("a.csv", "step,norm\n1,1.5\n\n2,2\n"),
        ("a.CSV", "step,norm,lr\n1,1.5,\n1.0,,0.1\n2.0,2,\n"),
        ("a.jsonl", '{"norm": 1.5, "lr": "x"}\n\n{"norm": 2}\n'),
        ("a.jsonl", '{"step": 1, "norm": "1.5"}\n{"step": 2, "norm": 2, "extra": [1]}\n'),
    ],
    ids=["norms", "steps", "spreadsheet", "blank", "gaps", "json", "json text"],
)
def test_read_takes_files_from_elsewhere(write, name, text):
    history = read(write(name, text))
    assert history.norms.tolist() == [1.5, 2.0]
    assert history.steps.tolist() == [1, 2]
    assert history.limits.isnan().all()
    assert not history.is_clipped.any()
    assert not history.is_skipped.any()
    assert history.named_norms == {}


@pytest.mark.parametrize(
    ("text", "norm"),
    [("nan", math.nan), ("NaN", math.nan), ("inf", math.inf), ("Infinity", math.inf)],
)
def test_read_takes_norms_that_are_not_finite(write, text, norm):
    (found,) = read(write("a.csv", f"norm\n{text}\n")).norms.tolist()
    assert found == norm or (math.isnan(found) and math.isnan(norm))


def test_read_takes_truth_values_in_words(write):
    text = "norm,limit,skipped\n3,1,true\n3,1,False\n3,1,\n0.5,1,0\n"
    history = read(write("a.csv", text))
    assert history.is_skipped.tolist() == [True, False, False, False]
    assert history.is_clipped.tolist() == [False, True, True, False]


def test_coefficients_decide_before_limits(write):
    text = "norm,coefficient,limit\n3,1,1\n0.5,0.1,1\n3,,1\nnan,0.5,1\ninf,0,1\n"
    assert read(write("a.csv", text)).is_clipped.tolist() == [False, True, True, False, False]


def test_rows_of_a_resumed_run_take_the_place_of_earlier_ones(write):
    text = "run,step,norm\n1,1,1\n1,2,2\n1,3,99\n1,4,99\n1,3,3\n1,4,4\n1,5,99\n1,5,5\n"
    history = read(write("a.csv", text))
    assert history.steps.tolist() == [1, 2, 3, 4, 5]
    assert history.norms.tolist() == [1, 2, 3, 4, 5]
    assert history.replaced == 3


@pytest.mark.parametrize(
    ("steps", "runs"),
    [
        ([1, 2, 3, 1, 2], [[1, 2, 3], [1, 2]]),
        ([1, 2, 3, 3, 4], [[1, 2, 3, 4]]),
        ([5, 6, 5, 6, 7, 6, 3, 4], [[5, 6], [5, 6, 7], [6], [3, 4]]),
        ([3, 2, 1], [[3], [2], [1]]),
    ],
    ids=["again", "twice", "from before", "backwards"],
)
def test_without_a_column_a_run_begins_where_steps_fall(write, steps, runs):
    history = read(write("a.csv", "step,norm\n" + "".join(f"{step},1\n" for step in steps)))
    assert [run.steps.tolist() for run in history.runs] == runs
    assert history.replaced == len(steps) - sum(map(len, runs))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "run,step,norm\nb,1,1\na,1,2\nb,2,3\na,1,4\n"),
        ("a.csv", "run,norm\nb,1\na,4\nb,3\n"),
        ("a.jsonl", '{"run": 7, "norm": 1}\n{"run": null, "norm": 4}\n{"run": 7, "norm": 3}\n'),
    ],
    ids=["names", "no steps", "json"],
)
def test_the_column_run_tells_runs_apart(write, name, text):
    history = read(write(name, text))
    assert [run.norms.tolist() for run in history.runs] == [[1.0, 3.0], [4.0]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "step,norm,limit\n1,1,1\n2,2,1\n3,"),
        ("a.csv", "step,norm\n1,1\n2,2\n3,4.5e-"),
        ("a.csv", "step,norm\n1,1\n2,2\n3,3.2"),
        ("a.jsonl", '{"step": 1, "norm": 1}\n{"step": 2, "norm": 2}\n{"step": 3, "no'),
    ],
    ids=["csv", "number", "shorter number", "json"],
)
def test_a_last_line_that_was_cut_off_is_left_out(write, name, text):
    assert read(write(name, text)).norms.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "at least one row with a norm, got none"),
        ("a.csv", "step,norm\n", "at least one row with a norm, got none"),
        ("a.csv", "step,norm\n1,\n", "at least one row with a norm, got none"),
        ("a.csv", "step,loss\n1,2\n", "line 2: expected a column 'norm', got columns 'step', 'lo"),
        ("a.csv", "1,2\n3,4\n", "line 2: expected a column 'norm', got columns '1', '2'"),
        ("a.csv", "norm,step\n1\n2,2\n", "line 2: expected 2 cells, as the first line has, got 1"),
        ("a.csv", "norm\n1\nhello\n2\n", "line 3: expected norm to be a number, got 'hello'"),
        ("a.csv", "norm\n1\n-2\n", "line 3: expected norm 0 or more, got -2.0"),
        ("a.csv", "norm,step\n1,1.5\n", "line 2: expected step to be a whole number, got 1.5"),
        ("a.csv", "norm,step\n1,\n", "line 2: expected step to be a whole number, got nan"),
        ("a.csv", "norm,step\n1,1e300\n", r"line 2: expected step to be a whole .*, got 1e\+300"),
        ("a.csv", b"\x89PNG\r\n\x1a\n\xff\xfe", "expected text in UTF-8, got other bytes"),
        ("a.csv", 'norm\n"' + "1" * 200_000 + '"\n', "expected comma-separated values"),
        ("a.jsonl", "step,norm\n1,2\n", "line 1: expected a JSON object"),
        ("a.jsonl", "[1, 2]\n", r"line 1: expected a JSON object, got '\[1, 2\]'"),
        ("a.jsonl", "[" * 200_000 + "\n", "line 1: expected a JSON object: maximum recursion"),
        ("a.jsonl", '{"norm": 1, "run": []}\n', "line 1: expected run to be a number, got list"),
        ("a.jsonl", '{"norm": 1}\n{"norm": [2]}\n', "line 2: expected norm to be a number"),
        ("a.jsonl", '{"norm": 1}\n{"loss": 2}\n', "line 2: expected a column 'norm'"),
        ("a.jsonl", '{"norm": 1, "step": 1}\n{"norm": 2}\n', "line 2: expected 'step' in every"),
    ],
)
def test_read_says_what_is_wrong_with_a_file_and_what_to_do(write, name, text, message):
    path = write(name, text)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} is not a history file: ")
    assert "recorder writes" in str(caught.value) or "record(...) writes" in str(caught.value)


def test_read_says_where_there_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a history file, got none; .* flush"):
        read(tmp_path / "run.csv")


def test_read_refuses_other_endings(write):
    with pytest.raises(ValueError, match=r"ends in \.csv or \.jsonl.*got \.txt; rename"):
        read(write("a.txt", "norm\n1\n"))


def test_a_norm_with_too_many_digits_is_infinite(write):
    assert read(write("a.jsonl", '{"norm": ' + "9" * 400 + "}\n")).norms.tolist() == [math.inf]


def test_names_that_a_hundredth_of_the_rows_have_are_read(write):
    some = ", ".join(f'"norm/{i}": 1' for i in range(100))
    rows = [f'{{"norm": 1, {some}}}\n', *['{"norm": 1}\n'] * 99]
    assert len(read(write("a.jsonl", "".join(rows * 200))).named_norms) == 100


def test_largest_orders_names_by_median_and_leaves_out_dead_ones(write):
    text = (
        "step,norm,norm/a,norm/b,norm/spike,norm/dead,norm/nan\n"
        "3,9,1,5,1,0,nan\n"
        "4,9,2,inf,900,0,nan\n"
        "5,9,3,7,1,0,nan\n"
        "6,9,,6,nan,0,nan\n"
    )
    largest = read(write("a.csv", text)).largest()
    expected = [("b", 6.0, 7.0, 5), ("a", 2.0, 3.0, 5), ("spike", 1.0, 900.0, 4)]
    assert largest == expected
    assert read(write("a.csv", text)).largest(2) == largest[:2]


def test_dead_names_count_the_steps_since_their_last_norm(write):
    text = (
        "norm,norm/always,norm/lately,norm/before,norm/nan,norm/unknown\n"
        "9,0,1,0,0,0\n"
        "9,0,nan,0,0,0\n"
        "9,0,0,1,nan,\n"
    )
    assert read(write("a.csv", text)).dead() == {"always": 3, "lately": 1}


def test_files_without_norms_by_name_have_no_largest_and_no_dead(write):
    history = read(write("a.csv", "norm\n0\n0\n"))
    assert history.largest() == []
    assert history.dead() == {}


# Real lines, parts of which a file of another program, or a broken one, may have.
_LINES = {
    "csv": b"run,step,norm,coefficient,limit,skipped,norm/a,x\n1,1,2.5,0.4,1.0,0,2.0,0.5\n",
    "jsonl": b'{"run": 1, "step": 1, "norm": 2.5, "skipped": true, "norm/a": [1], "x": null}\n',
}
_PIECES = [
    *(b"\n", b",", b'"', b"{", b"[" * 3000, b"9" * 400, b"-", b"1e300", b"NaN", b"null", b"\x00"),
    *(b"\r", b"\xff", b"\\ud800", b"\x1b", b"norm/", b"step", b"run", b"\xef\xbb\xbf", b"true"),
]


@hypothesis.example("jsonl", 1, [(0, 400, b"[" * 200_000 + b"\n")])
@hypothesis.example("jsonl", 1, [(30, 3, b"9" * 400)])
@hypothesis.example("csv", 1, [(57, 1, b"1e300")])
@hypothesis.given(
    ending=st.sampled_from([*_LINES]),
    repeats=st.integers(0, 4),
    edits=st.lists(
        st.tuples(
            st.integers(0, 400),
            st.integers(0, 20),
            st.sampled_from(_PIECES) | st.binary(max_size=20),
        ),
        max_size=8,
    ),
)
def test_read_gives_a_history_of_any_bytes_or_a_value_error(
    tmp_path_factory, ending, repeats, edits
):
    """Real rows, in which bytes are replaced by others; `record` takes or refuses them."""
    data = _LINES[ending] * repeats
    for at, n, piece in edits:
        data = data[:at] + piece + data[at + n :]
    path = tmp_path_factory.mktemp("runs") / f"run.{ending}"
    path.write_bytes(data)
    said = ""
    try:
        history = read(path)
        assert all(len(column) == len(history) for column in history.columns.values())
        assert sum(map(len, history.runs)) == len(history) > 0
        assert history.steps.tolist() == history.columns["step"].tolist()
    except ValueError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) < 1000
    with contextlib.suppress(ValueError):
        tritonclip.record(path, append=True)
    assert path.read_bytes() == data


@hypothesis.given(
    names=st.lists(
        st.text(st.characters() | st.sampled_from("$\\\n\r ,\"'[]:\x1b\ud800\u2028\t"), min_size=1),
        min_size=1,
        max_size=4,
        unique_by=printable,
    ),
    ending=st.sampled_from(["csv", "jsonl"]),
)
def test_read_gives_the_names_back_as_they_are_printed(tmp_path_factory, names, ending):
    path = tmp_path_factory.mktemp("runs") / f"run.{ending}"
    for _ in range(2):
        with tritonclip.record(path, append=True) as recorder:
            recorder.add_(1.0, norms={name: float(i) for i, name in enumerate(names)})
    named = read(path).named_norms
    assert {name: norms.tolist() for name, norms in named.items()} == {
        printable(name): [float(i)] * 2 for i, name in enumerate(names)
    }
    assert all(map(str.isprintable, named))
