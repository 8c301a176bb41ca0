"""The commands check and write; an interrupt keeps the rows so far."""

from __future__ import annotations

import pytest
from bench_cases import ROW
from click.testing import CliRunner
from workers import python

from bench import accuracy, results
from bench.__main__ import main


def interrupted_after(rows, out):
    def measure(*_):
        if not rows:
            raise KeyboardInterrupt
        yield rows.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "measure", measure)
        options = ["--shrink", "100000", "--device", "cpu", "--out", str(out)]
        return CliRunner().invoke(main, ["accuracy", *options])


def test_interrupted_run_keeps_its_rows_and_says_so(tmp_path):
    out = tmp_path / "rows.json"
    done = interrupted_after([ROW], out)
    assert done.exit_code == 130
    assert f"interrupted: 1 rows in {out}" in done.output.replace("\n", "")
    origin, rows = results.read(out)
    assert (origin["plan"], rows) == ("not finished", [ROW])
    assert list(tmp_path.iterdir()) == [out]


def test_interrupt_before_the_first_rows_leaves_the_file_as_it_was(tmp_path):
    out = tmp_path / "rows.json"
    results.write(out, {"torch": "2"}, [ROW])
    done = interrupted_after([], out)
    assert (done.exit_code, "interrupted: no rows" in done.output) == (130, True)
    assert results.read(out) == ({"torch": "2"}, [ROW])


@pytest.mark.parametrize(
    ("package", "arguments", "remedy"),
    [
        ("click", ["accuracy"], "pip install -e '.[dev]'"),
        ("rich", ["--help"], "pip install -e '.[dev]'"),
        ("matplotlib", ["report"], "pip install -e '.[dev]'"),
        ("triton", ["codegen"], "pip install -e '.[triton]'"),
        ("triton", ["host"], "pip install -e '.[triton]'"),
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
