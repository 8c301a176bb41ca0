"""`python -m tritonclip suggest|plot FILE`: what is printed, and how bad input ends."""

from __future__ import annotations

import random
import sys

import pytest

import tritonclip
from helpers.workers import python
from tritonclip.commands.cli import main

pytest.importorskip("matplotlib", reason="needs tritonclip[monitor]")

COMMANDS = ("doctor", "run", "find", "suggest", "plot")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.csv"


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


def test_suggest_prints_candidates_spikes_and_the_recommendation(spiky, run):
    suggestion = tritonclip.suggest_max_norm(spiky)
    printed = run("suggest", spiky).out
    lines = printed.splitlines()
    assert lines[-1] == f"max_norm: {suggestion.max_norm:g}"
    assert suggestion.reason[:50] in printed
    for candidate in suggestion.candidates:
        (row,) = [line for line in lines if f"  {candidate.origin}  " in line]
        assert row.startswith(f"{candidate.max_norm:g} ")
        assert f" {candidate.share:.1%} " in row
        assert f"x {candidate.coefficients[0]:.3g} " in row
    for spike in suggestion.spikes:
        assert f"{spike.norm:.4g} at step {spike.step}" in printed


def test_suggest_says_where_no_step_stands_out(path, run):
    with tritonclip.record(path) as recorder:
        for step in range(100):
            recorder.add_(1.0 + step % 7 / 10 + step / 1e4)
    printed = run("suggest", path).out
    assert "No step stands out" in printed
    assert printed.endswith("max_norm: none\n")


def test_suggest_says_where_something_else_clipped(path, run):
    path.write_text("norm\n" + "".join(f"{min(1, 0.5 + i % 7 / 10)}\n" for i in range(99)))
    printed = run("suggest", path).out
    assert "something clips before the norm is measured" in printed
    assert printed.endswith("max_norm: none\n")
    assert "clips  " not in printed


def test_suggest_names_a_limit_beside_drift_as_second_best(path, run):
    norms = [(30 if i % 30 == 29 else 1 + i % 7 / 10) * 0.99**i for i in range(400)]
    path.write_text("norm\n" + "".join(f"{norm}\n" for norm in norms))
    assert run("suggest", path).out.endswith(", if the limit has to be fixed\n")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], "no norm is NaN, inf or 0"),
        (["nan"], "left out: 1 that are NaN or inf"),
        (["0", "0"], "left out: 2 that are 0"),
    ],
    ids=["none", "nan", "zero"],
)
def test_suggest_counts_only_what_was_left_out(path, run, bad, said):
    path.write_text("\n".join(["norm", *bad, *(str(1 + i % 7) for i in range(40))]))
    assert f"; {said}.\n" in run("suggest", path).out


def test_suggest_leaves_out_the_warmup_that_is_given(spiky, run):
    printed = run("suggest", spiky, "--warmup", 100).out
    assert "by the norms of 500 steps, without a warm-up of 100 steps" in printed


@pytest.mark.parametrize("out", ["a.png", "a.svg", None])
def test_plot_writes_a_figure_and_prints_its_path(spiky, tmp_path, run, out):
    target = spiky.with_suffix(".png") if out is None else tmp_path / out
    options = [] if out is None else ["--out", target]
    assert run("plot", spiky, *options).out == f"{target}\n"
    assert target.stat().st_size > 5000


def test_plot_replaces_a_figure_only_where_it_is_named(spiky, run):
    target = spiky.with_suffix(".png")
    target.write_text("mine")
    assert f"write --out {target}" in run("plot", spiky, status=1).err
    assert target.read_text() == "mine"
    run("plot", spiky, "--out", target)
    assert target.stat().st_size > 5000


def test_plot_draws_a_run_that_is_too_short_for_a_suggestion(path, run):
    path.write_text("norm\n1\n2\n")
    assert "The figure has no candidates: expected at least 20" in run("plot", path).err
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("command", ["suggest", "plot"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a history file, got none"),
        ("loss\n1\n", "is not a history file: line 1: expected a column 'norm'"),
        ("", "is not a history file: expected at least one row"),
    ],
    ids=["missing", "other", "empty"],
)
def test_a_file_that_is_no_history_ends_with_a_message(path, run, command, text, message):
    if text is not None:
        path.write_text(text)
    printed = run(command, path, status=1)
    assert not printed.out
    assert printed.err.startswith("Error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["find"],
        ["run", "--record", "a.csv"],
        ["suggest"],
        ["suggest", "a.csv", "--warmup", "-1"],
        ["plot", "a.csv", "b.png"],
    ],
    ids=["command", "no target", "no script", "no file", "warmup", "two files"],
)
def test_wrong_usage_ends_with_status_2(run, arguments):
    assert "usage: python -m tritonclip" in run(*arguments, status=2).err


@pytest.mark.parametrize(
    "arguments",
    [["run", "--bogus", "x.py"], ["suggest", "a.csv", "--bogus"], ["doctor", "--bogus"]],
)
def test_an_unknown_option_is_answered_by_the_usage_of_its_command(run, arguments):
    first, *_, last = run(*arguments, status=2).err.splitlines()
    assert first.startswith(f"usage: python -m tritonclip {arguments[0]} ")
    assert last.endswith("unrecognized arguments: --bogus")


@pytest.mark.parametrize("options", [[], ["--compare"], ["-m"]], ids=["none", "compare", "-m"])
def test_run_without_a_script_asks_for_a_script_or_a_module(run, options):
    last = run("run", *options, status=2).err.splitlines()[-1]
    assert last.endswith("the following arguments are required: SCRIPT or -m MODULE")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_every_command(run, option):
    printed = run(option).out
    assert all(f"\n    {command} " in printed for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    assert f"usage: python -m tritonclip {command}" in run(command, "-h").out


def test_version_is_that_of_the_package(run):
    assert run("--version").out == f"tritonclip {tritonclip.__version__}\n"


def test_a_command_that_fails_ends_the_program_with_status_1(path):
    failed = python("-m", "tritonclip", "suggest", str(path))
    assert failed.returncode == 1
    assert "expected a history file, got none" in failed.stderr


def test_suggest_prints_the_suggestion_and_its_limit(spiky, run):
    suggestion = tritonclip.suggest_max_norm(spiky)
    printed, limit = run("suggest", spiky).out.rstrip().rsplit("\n", 1)
    assert printed.endswith(f"\n{suggestion}")
    assert limit == f"max_norm: {suggestion.max_norm:g}"


@pytest.mark.parametrize("package", ["matplotlib", "numpy"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package):
    code = f"import sys; sys.modules[{package!r}] = None; from tritonclip.commands.cli import main"
    done = python("-c", f"{code}; sys.exit(main(['plot', 'a.csv']))")
    assert done.returncode == 1
    assert f"needs {package}, which is not installed" in done.stderr
    assert 'pip install "tritonclip[monitor]"' in done.stderr
    assert "tritonclip suggest works without it" in done.stderr
    assert "Traceback" not in done.stderr


# torch first: what torch imports by itself is not ours.
IMPORTED = """
import sys, torch
before = set(sys.modules)
import tritonclip

def found(*names):
    return {name for name in set(sys.modules) - before if name.split(".")[0] in names}

extras = "accelerate", "click", "lightning", "matplotlib", "pandas", "rich", "scipy", "transformers"
assert not found("triton", *extras), found("triton", *extras)
own = found("tritonclip")
assert not own & {"tritonclip.monitor.recorder", "tritonclip.advice.suggestion"}, own
assert not [name for name in own if "kernels" in name], own
tritonclip.record, tritonclip.Recorder, tritonclip.norms_by_name
tritonclip.suggest_max_norm([1.0 + i % 7 for i in range(99)])
assert not found(*extras), found(*extras)
"""


def test_import_and_suggestion_import_no_recorder_no_triton_and_no_extra():
    done = python("-c", IMPORTED)
    assert done.returncode == 0, done.stderr


def test_public_names_are_listed():
    names = {"Recorder", "find_max_norm", "norms_by_name", "record", "suggest_max_norm"}
    assert names <= set(tritonclip.__all__)
    assert names <= set(dir(tritonclip))
    assert isinstance(sys.modules["tritonclip"].Recorder, type)
