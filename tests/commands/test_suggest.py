"""`python -m tritonclip suggest FILE`: what is printed, and how bad input ends."""

from __future__ import annotations

import pytest

import tritonclip
from helpers.workers import python


def test_suggest_prints_candidates_spikes_and_the_recommendation(spiky, run):
    suggestion = tritonclip.suggest_max_norm(spiky)
    printed = run("suggest", spiky).out
    lines = printed.splitlines()
    assert printed.endswith(f"\n{suggestion}\nmax_norm: {suggestion.max_norm:g}\n")
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


def test_a_command_that_fails_ends_the_program_with_status_1(path):
    failed = python("-m", "tritonclip", "suggest", str(path))
    assert failed.returncode == 1
    assert "expected a history file, got none" in failed.stderr


@pytest.mark.parametrize("options", [[], ["a.csv", "--warmup", "-1"]], ids=["no file", "warmup"])
def test_wrong_usage_ends_with_status_2(run, options):
    assert "usage: python -m tritonclip suggest" in run("suggest", *options, status=2).err


IMPORTED = """
import sys, torch
before = set(sys.modules)
import tritonclip

assert "tritonclip.advice.suggestion" not in sys.modules
tritonclip.suggest_max_norm([1.0 + i % 7 for i in range(99)])
extras = {"accelerate", "lightning", "matplotlib", "pandas", "rich", "scipy", "transformers"}
found = {name.split(".")[0] for name in set(sys.modules) - before}
assert not found & extras, found & extras
"""


def test_suggestion_is_imported_late_and_imports_no_extra():
    done = python("-c", IMPORTED)
    assert done.returncode == 0, done.stderr
