"""How many collectives a step takes: one for each norm."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import tritonclip
from helpers.processes import in_processes
from helpers.spread import assert_same_everywhere, collectives_of, local, mesh_of, parameter
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByRMS,
    ClipByUnitNorm,
    ClipByValue,
    ClippedOptimizer,
)

RULES: list[Any] = [
    ClipByGlobalNorm(0.5),
    ClipByGlobalNorm(0.5, 3.0),
    ClipByGlobalNorm(0.5, math.inf),
    ClipByGlobalNorm(0.5, 20.0),
    ClipByNorm(0.5),
    ClipByNorm(0.5, math.inf),
    ClipByRMS(0.05),
    ClipByUnitNorm(0.01),
]


def _groups(rules: list[Any]) -> list[Any]:
    """A group without a rule, and one for each of these."""
    mesh = mesh_of(-1)
    groups: list[Any] = []
    for seed, rule in enumerate((None, *rules)):
        members = [
            parameter((8, 3), mesh, [Shard(0)], seed=2 * seed),
            parameter((5,), mesh, [Replicate()], seed=2 * seed + 1),
        ]
        groups.append({"params": members} if rule is None else {"params": members, "clip": rule})
    return groups


def _optimizer(rules: list[Any], **options: Any) -> ClippedOptimizer:
    return ClippedOptimizer(torch.optim.SGD(_groups(rules), lr=0.1), 1.0, **options)


# Rules beside the norm of the others, options, and how many collectives a step takes.
STEPS: dict[str, tuple[list[Any], dict[str, Any], int]] = {
    "one-rule": ([], {}, 1),
    "skip": ([], {"nonfinite": "skip"}, 1),
    "error": ([], {"nonfinite": "error"}, 1),
    "skip-above": ([], {"skip_above": 1e6}, 1),
    "by-value": ([ClipByValue(0.1)], {}, 1),
    "zero-by-value": ([ClipByValue(0.1)], {"nonfinite": "zero"}, 2),
    "two-rules": ([ClipByNorm(0.5)], {}, 2),
    "skip-above-of-two": ([ClipByNorm(0.5)], {"skip_above": 1e6}, 2),
    "skip-above-beside-inf": ([ClipByNorm(0.5, math.inf)], {"skip_above": 1e6}, 3),
    # A maximum before the sum.
    "order-20": ([ClipByGlobalNorm(0.5, 20.0)], {}, 3),
}


@pytest.mark.parametrize("case", STEPS)
@in_processes(2)
def test_step_takes_one_collective_for_each_norm(case: str) -> None:
    rules, options, expected = STEPS[case]
    optimizer = _optimizer(rules, **options)
    for _ in range(2):
        _, n = collectives_of(optimizer.step)
        assert n == expected


@in_processes(2)
def test_step_takes_one_more_for_norms_by_name() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.csv")
        with tritonclip.record(path, each=True, write=False) as recorder:
            _, n = collectives_of(_optimizer([], recorder=recorder).step)
            assert n == 2
            assert recorder.names is not None
            assert len(recorder.names) == 2


@in_processes(2, 4)
def test_step_gives_the_bits_of_single_calls() -> None:
    optimizer, apart = _optimizer(RULES), _groups(RULES)
    optimizer.step()
    for index, (group, other) in enumerate(zip(optimizer.param_groups, apart, strict=True)):
        norm = tritonclip.clip_(other["params"], other.get("clip", 1.0))
        ours, theirs = ([local(p.grad) for p in one["params"]] for one in (group, other))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert norm is not None
        stats = optimizer.stats
        found = stats.group_norms[index] if index else stats.last_norm
        assert torch.equal(found, norm.max())
        assert_same_everywhere(found)


@in_processes(2)
def test_step_under_verify_agrees() -> None:
    with tritonclip.verify():
        _optimizer(RULES).step()
