"""`python -m tritonclip compare MODULE:NAME`: what is printed, and how bad targets end."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import tritonclip
from helpers.broken_verbs import break_norm
from helpers.workers import python
from tritonclip.backends.native import NativeBatch
from tritonclip.commands import cli

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = (ROOT / "docs" / "comparing.md").read_text()
BLOCK = PAGE.partition("```python\n")[2].partition("```")[0]
COMMANDS = re.findall(r"^python -m tritonclip compare .*$", PAGE, re.MULTILINE)

SOURCE = """
import torch

def make_model(width=4):
    return torch.nn.Linear(width, 2)

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

class Group:
    model = Net()

def with_loss():
    return make_model(), lambda model: model(torch.ones(3, 4, dtype=model.weight.dtype)).sum()

def fails():
    return make_model(), lambda model: model(torch.ones(3, 4)).sum()

def exhausts():
    return make_model(), lambda model: torch.empty(1 << 60)

def frozen():
    return make_model().requires_grad_(False)

def raises():
    raise KeyError("no such size")

def needs(width):
    return make_model(width)

number = 3
three = make_model(), 1, 2
not_a_loss = make_model(), 3.0
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command on a name of a module in the current folder, and returns its output."""
    (tmp_path / "mymodule.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    # Of another test, in another folder.
    sys.modules.pop("mymodule", None)

    def run(*arguments, status=0):
        found = cli.main(["compare", *arguments, "--seconds", "0.01"])
        printed = capsys.readouterr()
        assert found == status, printed.err
        return printed

    yield run
    sys.modules.pop("mymodule", None)


def test_compare_prints_three_calls_and_the_share_of_a_step(tmp_path):
    """As a program, without any extra."""
    (tmp_path / "mymodule.py").write_text(SOURCE)
    for name in ("click", "matplotlib", "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    target = ("mymodule:with_loss", "--seconds", "0.1")
    done = python("-m", "tritonclip", "compare", *target, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gradients of the loss: 2 with 10 elements, float32\non cpu")
    for row in ("by global norm, clipped", "by global norm, unclipped", "by value"):
        assert f"\n{row} " in done.stdout
    assert "\nshare of a training step: torch " in done.stdout


@pytest.mark.parametrize("name", ["make_model", "Net", "Group.model"])
def test_compare_takes_functions_classes_and_modules(run, name):
    said = "random gradients, because the model has none: 2 with"
    assert said in run(f"mymodule:{name}").out


def test_compare_casts_and_moves_the_model(run):
    options = ("--dtype", "bfloat16", "--device", "cpu")
    assert "10 elements, bfloat16\non cpu" in run("mymodule:with_loss", *options).out


@pytest.mark.parametrize("line", COMMANDS, ids=["float32", "bfloat16"])
def test_commands_of_the_page_run_on_its_module(run, tmp_path, line):
    (tmp_path / "mymodule.py").write_text(BLOCK)
    words = shlex.split(line)
    assert words[:4] == ["python", "-m", "tritonclip", "compare"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    printed = run(*(device if word == "cuda" else word for word in words[4:]))
    assert "gradients of the loss: 8 with 1,052,672 elements, " in printed.out
    assert ("bfloat16" in line) == ("elements, bfloat16\n" in printed.out)


def test_the_file_of_a_module_may_have_a_name_that_is_none_in_python(run, tmp_path):
    (tmp_path / "train-gpt.py").write_text(SOURCE)
    assert "2 with 10 elements" in run("train-gpt:make_model").out


# The target, options, and what the error says.
REFUSED: dict[str, tuple[list[str], str]] = {
    "no colon": (["mymodule"], "expected MODULE:NAME, as in package.mymodule:make, got 'mymodule'"),
    "no name": (["mymodule:"], "expected MODULE:NAME"),
    "no module": (["mymodul:make_model"], "ModuleNotFoundError: No module named 'mymodul'"),
    "no package": (["models.small:make"], "ModuleNotFoundError: No module named 'models'"),
    "a path": (["src/mymodule.py:make_model"], "expected MODULE:NAME, as in package.mymodule:make"),
    "a dot": ([".mymodule:make_model"], "relative import for '.mymodule'"),
    "no attribute": (["mymodule:nothing"], "module 'mymodule' has no attribute 'nothing'"),
    "number": (["mymodule:number"], "mymodule:number: expected a torch.nn.Module, or (module, "),
    "three": (["mymodule:three"], "returns the loss, got (Linear("),
    "no loss": (
        ["mymodule:not_a_loss"],
        "mymodule:not_a_loss: expected a torch.nn.Module, or (module, ",
    ),
    "arguments": (["mymodule:needs"], "Error: needs() missing 1 required"),
    "frozen": (
        ["mymodule:frozen"],
        "expected parameters that require a gradient, got none among 2",
    ),
    "raises": (["mymodule:raises"], "KeyError: 'no such size'"),
    "dtype of a loss": (["mymodule:fails", "--dtype", "bfloat16"], "RuntimeError: mat1 and mat2"),
    "memory": (["mymodule:exhausts"], "RuntimeError: "),
    "other device": (
        ["mymodule:make_model", "--device", "meta"],
        "on meta for the gradient of weight",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_ends_with_a_message(run, arguments, said):
    printed = run(*arguments, status=1)
    assert not printed.out
    last = printed.err.splitlines()[-1]
    assert last.startswith("Error: ")
    assert said in last
    # Of other code only.
    assert ("Traceback" in printed.err) == (re.match(r"Error: \w+Error: ", last) is not None)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_package", "Error: ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 +", "Error: SyntaxError: invalid syntax"),
        ("import sys; sys.exit(2)", "SystemExit: 2; what a script does belongs under if __name__"),
    ],
    ids=["import", "syntax", "exit"],
)
def test_an_error_inside_the_users_module_is_shown_with_its_line(run, tmp_path, source, said):
    (tmp_path / "other.py").write_text(source)
    printed = run("other:make_model", status=1)
    assert said in printed.err.splitlines()[-1]
    assert f'{tmp_path / "other.py"}", line 1' in printed.err


def test_a_wrong_result_ends_with_status_1_and_what_differs(run, monkeypatch):
    break_norm(monkeypatch, NativeBatch, 2.0)
    with tritonclip.use_backend("native"):
        printed = run("mymodule:make_model", status=1)
    assert "Error: by global norm, clipped: " in printed.err
    assert "norm: got " in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--dtype", "int8"], "invalid choice: 'int8' (choose from"),
        (["--device", "gpu"], "expected cpu, cuda or cuda:1, got gpu"),
        (["--seconds", "-1"], "expected a positive number, got -1"),
        (["--seconds", "many"], "expected a positive number, got many"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_options_end_with_status_2(capsys, option, said):
    assert cli.main(["compare", "mymodule:make_model", *option]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compare_on_a_gpu(run):
    assert "on cuda:0" in run("mymodule:make_model", "--device", "cuda").out
