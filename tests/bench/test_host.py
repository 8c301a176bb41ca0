"""Calls on the host are counted and timed by every path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tritonclip
from bench import host


def test_host_counts_functions_and_modules_of_the_library_only():
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.ones(3)
    with host.entered() as functions:
        tritonclip.clip_([parameter], 1.0)
        [torch.nn.utils.get_total_norm([parameter]) for _ in range(3)]
    names = [name for _, name in functions]
    assert names[0] == "clip_"
    assert "get_total_norm" not in names
    assert not any(name.endswith("comp>") for name in names)
    assert all(Path(file).suffix == ".py" for file, _ in functions)


@pytest.mark.parametrize("path", ["cpu", "triton"])
def test_host_has_a_goal_for_each_kind_of_call(path):
    if path == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    rows = host.run(path, repetitions=2, longest=20)
    calls = [row for row in rows if "call" in row.case]
    assert len(calls) == 5
    assert all(row.get("functions") > 0 and row.get("functions_goal") for row in calls)
    assert [row.get("share_goal") for row in calls] == [host.SHARES[path], *[None] * 4]
    features = {
        row.get("feature"): row.get("over_us_goal") for row in rows if "feature" in row.case
    }
    others = ("a fixed limit", "torch: clip_grad_norm_, step")
    goals = dict.fromkeys(others) | {name: goal for name, (*_, goal) in host.FEATURES.items()}
    assert features == (goals if path == "cpu" else {})
    lists = {(row.get("list"), row.get("tensors")) for row in rows if "list" in row.case}
    assert lists == {(kind, n) for kind in host.LISTS for n in (10, 20)}
    growing = [row.get("list") for row in rows if row.get("us_per_tensor_goal")]
    assert growing == (["unchanged", "recreated"] if path == "triton" else [])


@pytest.mark.codegen
def test_launches_reach_a_driver_that_does_nothing():
    pytest.importorskip("triton", reason="triton is not installed")
    rows = host.run("launches", repetitions=2, longest=20)
    assert [row.get("call") for row in rows] == [
        f"norm and scale: {by}" for by in ("JIT", "library", "compiled kernel")
    ]
    assert all(row.get("total_us") > 0 for row in rows)
