"""The benchmark of several processes: rows of every layout, ours right by one collective."""

from __future__ import annotations

import json

import pytest
from processes import in_processes
from workers import python

from bench import distributed

# Those whose Partial gradients, or whose parts of a sum, take one more.
TWO = "FSDP2 beside a Partial gradient"


@pytest.mark.parametrize("layout", distributed.LAYOUTS)
@in_processes(4)
def test_layout_rows_are_right(layout: str) -> None:
    torchs, ours = distributed.layout_rows([layout], ["torch", "tritonclip"])
    assert ours.correct is True
    assert ours.get("collectives") == (2 if layout == TWO else 1)
    assert ours.get("norm_error") <= 1e-6
    assert ours.get("outcome") is None
    assert torchs.correct is None


@in_processes(4)
def test_layout_rows_say_what_others_do() -> None:
    expected = {
        "FSDP2": None,
        "FSDP2 beside a plain tensor": "raises RuntimeError",
        "FSDP2, elements of 1e30": "norm inf",
        "FSDP2, elements of 1e-30": "norm 0",
        "FSDP2, order inf": "differs by process",
        "an empty shard, order inf": "hangs: not run",
    }
    rows = distributed.layout_rows(list(expected), ["torch"])
    assert [row.get("outcome") for row in rows] == list(expected.values())


def test_host_rows_compare_with_torch() -> None:
    code = (
        "import json; from bench import distributed; distributed.SIZES = (3, 1000); "
        "print(json.dumps([row.values for row in distributed.host_rows(2)]))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    short, long = json.loads(done.stdout.splitlines()[-1])
    assert "share_goal" not in short
    assert long["share_goal"] == distributed.SHARE
    assert long["torch_us"] > 0
