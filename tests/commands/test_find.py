"""`python -m tritonclip find MODULE:NAME`: what is printed, drawn and written."""

from __future__ import annotations

import csv
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import tritonclip
from tritonclip.commands import cli

pytest.importorskip("matplotlib", reason="needs tritonclip[monitor]")
pytest.importorskip("rich", reason="needs tritonclip[monitor]")

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = (ROOT / "docs" / "finding_max_norm.md").read_text()
BLOCK = PAGE.partition("```python\n")[2].partition("```")[0]
COMMAND = re.search(r"^python -m tritonclip find (.*)$", PAGE, re.MULTILINE)

SOURCE = """
import torch
import tritonclip

def make():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)

def batches():
    generator = torch.Generator().manual_seed(0)
    for i in range(20):
        yield torch.randn(8, 4, generator=generator) * (1000 if i % 10 == 5 else 1)

def loss(model, x):
    return (model(x) - x[:, :1]).square().mean()

def fails(model, x):
    raise KeyError("no such column")

held_out = [torch.eye(4)]
rules = [tritonclip.ClipByQuantile(0.5, window=8), tritonclip.ClipByValue(0.1)]
empty = []
"""


@pytest.fixture
def find(tmp_path, monkeypatch, capsys):
    """Runs the command on a training in the current folder, and returns its output."""
    (tmp_path / "training.py").write_text(SOURCE)
    (tmp_path / "mymodule.py").write_text(BLOCK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def find(*options, target=("training:make", *USUAL), status=0):
        assert cli.main(["find", *target, *options]) == status
        return capsys.readouterr()

    yield find
    for name in ("training", "mymodule"):
        sys.modules.pop(name, None)


USUAL = ("--loss", "training:loss", "--steps", "20", "--seeds", "2")


def test_find_prints_the_answer_of_find_max_norm(find):
    printed = find().out
    training = sys.modules["training"]
    given = {"loss": training.loss, "steps": 20, "seeds": 2}
    found = tritonclip.find_max_norm(training.make, training.batches, **given)
    assert printed == f"{found}\n"
    assert found.max_norm is not None


def test_find_takes_limits_rules_and_held_out_batches(find):
    options = ["--limits", "0.5", "2", "--rules", "training:rules"]
    held_out = ["--held-out", "training:held_out", "--batches", "training:batches"]
    printed = find(*options, *held_out).out
    for name in ("0.5 ", "2 ", "no limit ", "ClipByQuantile(", "ClipByValue("):
        assert f"\n{name}" in printed


def test_find_draws_and_writes_every_trial(find, tmp_path):
    printed = find("--figure", "found.svg", "--csv", "found.csv")
    assert printed.out.endswith("found.svg\nfound.csv\n")
    elements = ET.parse(tmp_path / "found.svg").iter()
    texts = {element.text for element in elements if element.tag.endswith("text")}
    rows = [*csv.DictReader((tmp_path / "found.csv").read_text().splitlines())]
    assert {row["limit"] for row in rows} <= texts
    assert "recommended" in texts
    assert {row["seed"] for row in rows if row["limit"] == "no limit"} == {"0", "1"}
    assert all(float(row["loss"]) > 0 for row in rows)


def test_find_works_without_rich(find, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    printed = find()
    assert "at most" in printed.err
    assert "recommended" in printed.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--figure", "found.pdf"], "write found.png"),
        (["--batches", "training"], "expected MODULE:NAME"),
        (["--batches", "training:empty"], "batches ran out"),
        (["--limits", "1"], "two or more limits"),
    ],
)
def test_find_says_what_is_wrong(find, options, said):
    printed = find(*options, status=1)
    assert printed.err.splitlines()[-1].startswith("Error: ")
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_find_shows_where_the_users_code_raised(find):
    printed = find("--loss", "training:fails", status=1).err
    assert 'raise KeyError("no such column")' in printed
    assert printed.splitlines()[-1].startswith("Error: KeyError")


def test_the_page_has_a_command_that_runs(find, tmp_path):
    assert COMMAND is not None
    # As the page has it, but shorter.
    printed = find("--steps", "12", "--seeds", "1", target=COMMAND[1].split())
    assert "recommended" in printed.out
    assert (tmp_path / "found.png").stat().st_size > 1000
