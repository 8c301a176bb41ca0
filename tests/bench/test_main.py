"""The commands measure, check and write; an interrupt keeps the rows so far."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bench_cases import ROW
from workers import python

from bench import results, speed, workloads
from bench.workloads import RULES


def test_speed_measures_checks_and_writes(tmp_path, command):
    out = tmp_path / "rows.json"
    options = ["--quick", "--workload", "lenet5", "--device", "cpu", "--samples", "2"]
    done = command("speed", *options, "--provider", "torch", "--out", out)
    assert done.exit_code == 0, done.output
    origin, rows = results.read(out)
    assert origin["device"] == "cpu"
    assert "plan" not in origin
    assert {(row.get("rule"), row.get("step")) for row in rows} == {
        (rule, step) for rule in RULES[:3] for step in ("unclipped", "clipped")
    }
    assert {row.get("provider") for row in rows} == {"tritonclip", "torch"}
    assert all(row.correct for row in rows)
    assert "lenet5" in done.output


# Whatever pytest was started with, Ctrl-C interrupts.
INTERRUPTIBLE = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from bench import timing
from bench.__main__ import main
timing.COPIED["cpu"] = 2**16
main()
"""


def test_interrupted_run_keeps_its_rows_and_says_so(tmp_path):
    out, cases = tmp_path / "rows.json", 2 * len(workloads.SMALL) * len(RULES[:3])
    lists = [option for n in workloads.SMALL for option in ("--workload", f"small_{n}")]
    options = ["speed", "--quick", *lists, "--device", "cpu", "--provider", "torch", "--out", out]
    command = [sys.executable, "-c", INTERRUPTIBLE, *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            while run.poll() is None and not out.exists():
                time.sleep(0.01)
            run.send_signal(signal.SIGINT)
            said = run.communicate(timeout=60)[0]
        finally:
            run.kill()
    origin, rows = results.read(out)
    assert run.returncode == 130
    assert f"interrupted: {len(rows)} rows in {out}" in said.replace("\n", "")
    assert origin["plan"] == "not finished"
    assert 0 < len(rows) < 2 * cases
    assert all(row.correct and row.get("wall_us") for row in rows)
    assert list(tmp_path.iterdir()) == [out]


def test_interrupt_before_the_first_rows_leaves_the_file_as_it_was(tmp_path, command, monkeypatch):
    out = tmp_path / "rows.json"
    results.write(out, {"torch": "2"}, [ROW])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "measure", interrupted)
    done = command("speed", "--workload", "small_1", "--device", "cpu", "--out", out)
    assert (done.exit_code, "interrupted: no rows" in done.output) == (130, True)
    assert results.read(out) == ({"torch": "2"}, [ROW])


def test_functional_measures_checks_and_writes(tmp_path, command):
    out = tmp_path / "rows.json"
    options = ["--workload", "small_1", "--device", "cpu", "--samples", "2"]
    done = command("functional", *options, "--out", out)
    assert done.exit_code == 0, done.output
    rows = results.read(out)[1]
    assert {(row.get("rule"), row.get("step")) for row in rows} == {
        (rule, step) for rule in RULES[:3] for step in ("unclipped", "clipped")
    }
    ours = [row for row in rows if row.get("provider") == "tritonclip"]
    assert all(row.correct and row.get("baseline").startswith("torch ") for row in ours)


def test_speed_refuses_buffers_after_a_backward_pass(command):
    result = command("speed", "--training", "--provider", "tritonclip flat")
    assert result.exit_code == 2
    assert "in no buffer" in result.output


def test_speed_refuses_an_unknown_provider(command):
    done = command("speed", "--provider", "nobody")
    assert done.exit_code == 2
    assert "'nobody' is not one of" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
@pytest.mark.parametrize("part", ["speed", "functional", "accuracy"])
def test_a_device_that_is_not_there_ends_with_a_message(command, part):
    done = command(part, "--device", "cuda")
    assert done.exit_code == 2
    assert "no GPU was found" in done.output
    assert "--device cpu" in done.output


@pytest.mark.parametrize(
    ("package", "arguments", "remedy"),
    [
        ("click", ["speed"], "pip install -e '.[dev]'"),
        ("rich", ["--help"], "pip install -e '.[dev]'"),
        ("matplotlib", ["report"], "pip install -e '.[dev]'"),
        ("triton", ["codegen"], "pip install triton"),
        ("triton", ["host"], "pip install triton"),
    ],
    ids=["click", "rich", "matplotlib", "triton-codegen", "triton-host"],
)
def test_a_missing_package_ends_with_a_message(package, arguments, remedy):
    done = python(
        "-c",
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv[1:] = {arguments}\n"
        "runpy.run_module('bench', run_name='__main__')",
    )
    assert done.returncode == 1
    assert package in done.stderr
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_of_a_quick_run_are_not_for_the_repository():
    root = Path(results.RESULTS).parents[1]
    if not (root / ".git").exists():
        pytest.skip("asks git, which knows nothing of an archive")
    for name in ("cpu-quick.json", "cuda-quick-training.json", "cpu-quick-busy2.json.part"):
        asked = ["git", "check-ignore", "--quiet", str(results.RESULTS / name)]
        assert subprocess.run(asked, cwd=root).returncode == 0, name
