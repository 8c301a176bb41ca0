"""Files of a run, from a recorder or from elsewhere; files that are none say what to do."""

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
    ],
    ids=["norms", "steps", "spreadsheet", "blank", "gaps"],
)
def test_read_takes_files_from_elsewhere(write, name, text):
    history = read(write(name, text))
    assert history.norms.tolist() == [1.5, 2.0]
    assert history.steps.tolist() == [1, 2]
    assert history.limits.isnan().all()
    assert not history.is_clipped.any()
    assert not history.is_skipped.any()
    assert history.named_norms == {}


_LOGGED = """{"global_step": 20, "log_history": [
    {"step": 10, "loss": 3.0, "grad_norm": 1.5, "learning_rate": 1e-4},
    {"step": 15, "eval_loss": 2.0},
    {"step": 20, "loss": 2.5, "grad_norm": 2.0, "learning_rate": 1e-4},
    {"step": 20, "train_runtime": 9.0, "train_loss": 2.7}
]}"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "epoch,step,train_loss,grad_norm\n0,10,3.0,1.5\n0,20,2.5,2.0\n"),
        (
            "a.csv",
            '"Step","one - train/grad_norm","one - train/grad_norm__MIN","one - train/loss",'
            '"one - eval/loss"\n"10","1.5","1.5","3.0",""\n"15","","","","2"\n'
            '"20","2.0","2.0","2.5",""\n',
        ),
        ("a.csv", "_step,train/global_step,train/grad_norm,train/loss\n0,10,1.5,3\n1,20,2,2.5\n"),
        ("trainer_state.json", _LOGGED),
    ],
    ids=["columns", "wandb-chart", "wandb-run", "huggingface"],
)
def test_read_takes_norms_and_losses_that_others_log(write, name, text):
    history = read(write(name, text))
    assert history.steps.tolist() == [10, 20]
    assert history.norms.tolist() == [1.5, 2.0]
    assert history.losses.tolist() == [3.0, 2.5]


def test_read_takes_a_scalar_of_tensorboard(write):
    history = read(write("a.csv", "Wall time,Step,Value\n1.7e9,10,1.5\n1.7e9,20,NaN\n"))
    assert history.steps.tolist() == [10, 20]
    assert history.norms[0] == 1.5
    assert history.norms[1].isnan()


def test_read_takes_a_column_that_is_named(write):
    path = write("a.csv", "step,norm,gnorm\n1,9,1.5\n2,9,2\n")
    assert read(path, "gnorm").norms.tolist() == [1.5, 2.0]
    with pytest.raises(ValueError, match="expected a column 'g', got columns 'step', 'norm', 'gn"):
        read(path, "g")


def test_read_takes_no_norm_of_two_by_chance(write):
    path = write("a.csv", "a - train/grad_norm,b - train/grad_norm\n1,2\n")
    with pytest.raises(ValueError, match="expected one column of norms, or --column, got columns"):
        read(path)


@pytest.mark.parametrize("text", ["[1]", '{"step": 1}', '{"log_history": [1]}', "no json"])
def test_read_refuses_other_json(write, text):
    with pytest.raises(ValueError, match=r"a\.json is not a history file: "):
        read(write("a.json", text))


@pytest.mark.parametrize(
    ("text", "norm"),
    [
        *(("nan", math.nan), ("NaN", math.nan), ("inf", math.inf), ("Infinity", math.inf)),
        pytest.param("9" * 400, math.inf, id="too many digits"),
    ],
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "step,norm,limit\n1,1,1\n2,2,1\n3,"),
        ("a.csv", "step,norm\n1,1\n2,2\n3,4.5e-"),
        ("a.csv", "step,norm\n1,1\n2,2\n3,3.2"),
    ],
    ids=["csv", "number", "shorter number"],
)
def test_a_last_line_that_was_cut_off_is_left_out(write, name, text):
    assert read(write(name, text)).norms.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "at least one row with a norm, got none"),
        ("a.csv", "step,norm\n", "at least one row with a norm, got none"),
        ("a.csv", "step,norm\n1,\n", "at least one row with a norm, got none"),
        ("a.csv", "step,loss\n1,2\n", "line 1: expected a column 'norm', got columns 'step', 'lo"),
        ("a.csv", "1,2\n3,4\n", "line 1: expected a column 'norm', got columns '1', '2'"),
        ("a.csv", "norm,step\n1\n2,2\n", "line 2: expected 2 cells, as the first line has, got 1"),
        ("a.csv", "norm\n1\nhello\n2\n", "line 3: expected norm to be a number, got 'hello'"),
        ("a.csv", "norm\n1\n-2\n", "line 3: expected norm 0 or more, got -2.0"),
        ("a.csv", "norm,step\n1,1.5\n", "line 2: expected step to be a whole number, got 1.5"),
        ("a.csv", "norm,step\n1,\n", "line 2: expected step to be a whole number, got nan"),
        ("a.csv", "norm,step\n1,1e300\n", r"line 2: expected step to be a whole .*, got 1e\+300"),
        ("a.csv", "norm,step\n1,5\n2,5\n", "line 3: expected a step over 5, got 5: a file has the"),
        ("a.csv", "norm,step\n1,5\n2,1\n", "line 3: expected a step over 5, got 1: a file has the"),
        ("a.csv", b"\x89PNG\r\n\x1a\n\xff\xfe", "expected text in UTF-8, got other bytes"),
        ("a.csv", 'norm\n"' + "1" * 200_000 + '"\n', "expected comma-separated values"),
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
    with pytest.raises(ValueError, match=r"ends in \.csv, got \.txt; rename"):
        read(write("a.txt", "norm\n1\n"))


# Real lines, parts of which a file of another program, or a broken one, may have.
_LINES = b"step,norm,coefficient,limit,skipped,norm/a,x\n1,2.5,0.4,1.0,0,2.0,0.5\n"
_PIECES = [
    *(b"\n", b",", b'"', b"9" * 400, b"-", b"1e300", b"NaN", b"\x00", b"\r", b"\xff", b"\\ud800"),
    *(b"\x1b", b"norm/", b"step", b"\xef\xbb\xbf", b"true"),
]


@hypothesis.example(1, [(45, 1, b"1e300")])
@hypothesis.given(
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
def test_read_gives_a_history_of_any_bytes_or_a_value_error(tmp_path_factory, repeats, edits):
    """Real rows, in which bytes are replaced by others; a recorder that resumes refuses them."""
    data = _LINES * repeats
    for at, n, piece in edits:
        data = data[:at] + piece + data[at + n :]
    path = tmp_path_factory.mktemp("runs") / "run.csv"
    path.write_bytes(data)
    said = ""
    try:
        history = read(path)
        assert all(len(column) == len(history) for column in history.columns.values())
        assert len(history) > 0
        assert history.steps.tolist() == history.columns["step"].tolist()
    except ValueError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) < 1000
    recorder = tritonclip.record(path, every=1)
    recorder.load_state_dict({"steps": 1})
    if data:
        with pytest.raises(ValueError, match="expected the same, got step,norm,coefficient,limit"):
            recorder.add_(1.0)
    assert path.read_bytes() == data


@hypothesis.given(
    names=st.lists(
        st.text(st.characters() | st.sampled_from("$\\\n\r ,\"'[]:\x1b\ud800\u2028\t"), min_size=1),
        min_size=1,
        max_size=4,
        unique_by=printable,
    ),
)
def test_read_gives_the_names_back_as_they_are_printed(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("runs") / "run.csv"
    for steps in range(2):
        with tritonclip.record(path) as recorder:
            if steps:
                recorder.load_state_dict({"steps": steps})
            recorder.add_(1.0, norms={name: float(i) for i, name in enumerate(names)})
    named = read(path).named_norms
    assert {name: norms.tolist() for name, norms in named.items()} == {
        printable(name): [float(i)] * 2 for i, name in enumerate(names)
    }
    assert all(map(str.isprintable, named))
