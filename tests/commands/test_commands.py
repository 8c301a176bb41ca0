"""`python -m tritonclip`: the help, wrong usage, and what an import of the package imports."""

import pytest

import tritonclip
from helpers.workers import python
from tritonclip.commands import cli


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_every_command(run, option):
    printed = run(option).out
    assert all(f"\n    {command} " in printed for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(run, command):
    assert f"usage: python -m tritonclip {command}" in run(command, "-h").out


def test_version_is_that_of_the_package(run):
    assert run("--version").out == f"tritonclip {tritonclip.__version__}\n"


def test_an_unknown_command_ends_with_status_2(run):
    assert "usage: python -m tritonclip" in run("nonsense", status=2).err


def test_an_unknown_option_is_answered_by_the_usage_of_its_command(run):
    first, *_, last = run("doctor", "--bogus", status=2).err.splitlines()
    assert first.startswith("usage: python -m tritonclip doctor ")
    assert last.endswith("unrecognized arguments: --bogus")


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
assert not own & {"tritonclip.monitor.recorder", "tritonclip.optim.step"}, own
assert not [name for name in own if "kernels" in name], own
tritonclip.record, tritonclip.norms_by_name
assert not found(*extras), found(*extras)
"""


def test_import_imports_no_recorder_no_triton_and_no_extra():
    done = python("-c", IMPORTED)
    assert done.returncode == 0, done.stderr


IMPORTED_ALONE = """
import atexit, copyreg, signal, sys, warnings
import torch, torch.nn.utils

def state():
    tree = torch.utils._pytree
    return [
        repr(warnings.filters), torch.serialization.get_safe_globals(),
        dict(copyreg.dispatch_table), sys.excepthook,
        signal.getsignal(signal.SIGTERM), atexit._ncallbacks(),
        {*tree.SUPPORTED_NODES}, torch.get_default_dtype(), torch.get_num_threads(),
        [vars(torch.nn.utils)[name] for name in dir(torch.nn.utils)], sys.path[:],
    ]

before = state()
import tritonclip
for was, now in zip(before, state()):
    assert was == now, (was, now)
"""


def test_import_changes_nothing_global():
    done = python("-c", IMPORTED_ALONE)
    assert done.returncode == 0, done.stderr
