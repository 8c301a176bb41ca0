"""`python -m tritonclip plot FILE`: the figure that is written, and how bad input ends."""

from __future__ import annotations

import pytest

from helpers.workers import python

pytest.importorskip("matplotlib", reason="needs tritonclip[monitor]")


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


@pytest.mark.parametrize("package", ["matplotlib", "numpy"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package):
    code = f"import sys; sys.modules[{package!r}] = None; from tritonclip.commands.cli import main"
    done = python("-c", f"{code}; sys.exit(main(['plot', 'a.csv']))")
    assert done.returncode == 1
    assert f"needs {package}, which is not installed" in done.stderr
    assert 'pip install "tritonclip[monitor]"' in done.stderr
    assert "tritonclip suggest works without it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_file_ends_with_status_2(run):
    assert "usage: python -m tritonclip plot" in run("plot", "a.csv", "b.png", status=2).err


def test_plot_draws_the_list_with_most_calls_or_one_by_number(path, run):
    rows = [
        f'{step},{1 + step % 7},"{1 + step % 3 % 2}: 1 tensor, 2 elements"' for step in range(90)
    ]
    path.write_text("\n".join(["step,norm,list", *rows, ""]))
    assert "of the list 1: 1 tensor, 2 elements, one of 2" in run("plot", path).err
    assert not run("plot", path, "--list", 2, "--out", path.with_suffix(".svg")).err
