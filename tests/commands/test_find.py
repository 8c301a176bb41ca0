"""`python -m tritonclip find MODULE:NAME`: what is printed."""

import re
import sys
from pathlib import Path

import pytest

import tritonclip
from tritonclip.advice import finder
from tritonclip.commands import cli

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = (ROOT / "docs" / "choosing_max_norm.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# The set-up of the page and its training.
MODULE = BLOCKS[0] + next(one.partition("found =")[0] for one in BLOCKS if "def train" in one)
COMMAND = re.search(r"^python -m tritonclip find (\S+)", PAGE, re.MULTILINE)

SOURCE = """
import torch
import tritonclip

def train(clip):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        for i in range(10):
            x = torch.randn(8, 4) * (1000 if i == 5 else 1)
            optimizer.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            clip(model.parameters())
            optimizer.step()
            yield loss

def fails(clip):
    yield {}["no such column"]

rules = [tritonclip.ClipByQuantile(0.5, window=8), tritonclip.ClipByValue(0.1)]
"""


@pytest.fixture
def find(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with trainings, and returns what was printed."""
    (tmp_path / "training.py").write_text(SOURCE)
    (tmp_path / "mymodule.py").write_text(MODULE)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train-it.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def find(target, *options, status=0):
        assert cli.main(["find", target, "--steps", "20", "--seeds", "2", *options]) == status
        return capsys.readouterr()

    yield find
    for name in ("training", "mymodule", "train-it"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("training:train", "training"),
        ("training.py:train", "training"),
        ("scripts/train-it.py:train", "train-it"),
    ],
)
def test_find_prints_the_answer_of_find_max_norm(find, target, module):
    printed = find(target)
    found = tritonclip.find_max_norm(sys.modules[module].train, steps=20, seeds=2)
    assert printed.out == f"{found}\n"
    assert found.max_norm is not None
    assert printed.err.startswith("find_max_norm: at most 480 training steps, 24 times 20; ")


def test_find_takes_limits_and_rules(find):
    options = ["--limits", "0.5", "2", "--rules", "training:rules"]
    printed = find("training:train", *options).out
    for name in ("0.5 ", "2 ", "no limit ", "ClipByQuantile(", "ClipByValue("):
        assert f"\n{name}" in printed


def test_find_leaves_the_length_of_trials_open_within_seconds(find, monkeypatch):
    monkeypatch.setattr(finder, "_FIRST_STEPS", 16)
    assert "Losses after 16 steps" in find("training:train", "--seconds", "0.001").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["training"], "expected MODULE:NAME or FILE.py:NAME"),
        (["nothing.py:train"], "expected a file, got nothing.py; there is none in"),
        (["nothing.here:train"], "there is no module nothing in"),
        (["training:rules"], "expected a generator function train(clip)"),
        (["training:train", "--limits", "1"], "two or more limits"),
        (["training:train", "--seeds", "0"], "seeds must be 1 or more, got 0"),
        (["training:train", "--seconds", "-1"], "seconds must be 0 or more, got -1.0"),
    ],
)
def test_find_says_what_is_wrong(find, arguments, said):
    printed = find(*arguments, status=1)
    assert printed.err.splitlines()[-1].startswith("Error: ")
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_find_shows_where_the_users_code_raised(find):
    printed = find("training:fails", status=1).err
    assert 'yield {}["no such column"]' in printed
    assert printed.splitlines()[-1].startswith("Error: KeyError")


def test_the_page_has_a_command_that_runs(find):
    assert COMMAND is not None
    # As the page has it, but shorter.
    assert "recommended" in find(COMMAND[1], "--steps", "12", "--seeds", "1").out


def test_find_without_a_target_ends_with_status_2(capsys):
    assert cli.main(["find"]) == 2
    assert "usage: python -m tritonclip find" in capsys.readouterr().err
