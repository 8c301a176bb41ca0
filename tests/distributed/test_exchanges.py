"""Several norms by one collective: of the rules of a step, and whatever else it measures."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

import tritonclip
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    collectives_of,
    local,
    mesh_of,
    parameter,
    with_partial,
)
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByRMS,
    ClipByUnitNorm,
    ClipByValue,
    ClippedOptimizer,
)
from tritonclip.distributed import reduction
from tritonclip.distributed.process_groups import Domain
from tritonclip.distributed.reduction import Exchange, Request, run_exchanges

CPU = torch.device("cpu")
RULES: dict[str, Any] = {
    "2": ClipByGlobalNorm(0.5),
    "0": ClipByGlobalNorm(0.5, 0.0),
    "3": ClipByGlobalNorm(0.5, 3.0),
    "6": ClipByGlobalNorm(0.5, 6.0),
    "each": ClipByNorm(0.5),
    "rms": ClipByRMS(0.05),
    "unit": ClipByUnitNorm(0.01),
}
EXTREMES: dict[str, Any] = {
    "inf": ClipByGlobalNorm(0.5, math.inf),
    "-inf": ClipByGlobalNorm(0.5, -math.inf),
    "each-inf": ClipByNorm(0.5, math.inf),
    "20": ClipByGlobalNorm(0.5, 20.0),
    "100": ClipByGlobalNorm(0.5, 100.0),
}


def _groups(rules: dict[str, Any]) -> list[Any]:
    """A group without a rule, and one for each of these."""
    mesh = mesh_of(-1)
    groups: list[Any] = []
    for seed, rule in enumerate((None, *rules.values())):
        members = [
            parameter((8, 3), mesh, [Shard(0)], seed=2 * seed),
            parameter((5,), mesh, [Replicate()], seed=2 * seed + 1),
        ]
        groups.append({"params": members} if rule is None else {"params": members, "clip": rule})
    return groups


def _optimizer(groups: list[Any], **options: Any) -> ClippedOptimizer:
    return ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0, **options)


@contextmanager
def _kinds() -> Iterator[list[str]]:
    """The operators of the collectives in a block."""
    kinds: list[str] = []
    all_reduce: Any = dist.all_reduce

    def send(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        kinds.append("max" if op == dist.ReduceOp.MAX else "sum")
        return all_reduce(tensor, op=op, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", send)
        yield kinds


@in_processes(2, 4)
def test_step_takes_one_sum_for_all_rules() -> None:
    optimizer = _optimizer(_groups(RULES))
    for _ in range(2):
        with _kinds() as kinds:
            _, n = collectives_of(optimizer.step)
        assert (n, kinds) == (1, ["sum"])


@in_processes(2)
def test_step_takes_one_maximum_beside_the_sum() -> None:
    optimizer = _optimizer(_groups({**RULES, **EXTREMES}))
    with _kinds() as kinds:
        _, n = collectives_of(optimizer.step)
    assert (n, kinds) == (2, ["max", "sum"])


MORE: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "skip": (RULES, {"nonfinite": "skip"}, 2),
    "error": ({"2": RULES["2"]}, {"nonfinite": "error"}, 1),
    "zero-by-value": ({"value": ClipByValue(0.1)}, {"nonfinite": "zero"}, 2),
    "by-value": ({"value": ClipByValue(0.1)}, {}, 1),
    "skip-above": ({"each": RULES["each"]}, {"skip_above": 1e6}, 1),
    "skip-above-inf": (EXTREMES, {"skip_above": 1e6}, 2),
}


@pytest.mark.parametrize("case", MORE)
@in_processes(2)
def test_step_counts_with_policies(case: str) -> None:
    """Checks for NaN, where norms of order 0 hide them, and for outliers travel along."""
    rules, options, expected = MORE[case]
    _, n = collectives_of(_optimizer(_groups(rules), **options).step)
    assert n == expected


@in_processes(2)
def test_step_takes_norms_by_name_along() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.csv")
        with tritonclip.record(path, each=True, write=False) as recorder:
            optimizer = _optimizer(_groups(RULES), recorder=recorder)
            _, n = collectives_of(optimizer.step)
            assert n == 1
            assert recorder.names is not None
            assert len(recorder.names) == 3 * len(RULES) + 2


@pytest.mark.parametrize("rules", ["sum", "max"])
@in_processes(2, 4)
def test_step_gives_the_bits_of_single_calls(rules: str) -> None:
    own = RULES if rules == "sum" else EXTREMES
    together, apart = _groups(own), _groups(own)
    optimizer = _optimizer(together)
    optimizer.step()
    for index, (group, other) in enumerate(zip(together, apart, strict=True)):
        norm = tritonclip.clip_(other["params"], other.get("clip", 1.0))
        ours, theirs = ([local(p.grad) for p in one["params"]] for one in (group, other))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert norm is not None
        stats = optimizer.stats
        found = stats.group_norms[index] if index else stats.last_norm
        assert torch.equal(found, norm.max())
        assert_same_everywhere(found)


@in_processes(2, 4)
def test_step_with_parts_takes_one_more_sum_for_all_rules() -> None:
    """The sums of parts come between, for each rule, and their norms travel together."""
    mesh = mesh_of(2, -1)
    groups: list[Any] = []
    for seed in range(3):
        part = parameter((6,), mesh, [Replicate(), Replicate()], seed=seed)
        with_partial(part, [Replicate(), Partial()])
        groups.append({"params": [part, parameter((8, 3), mesh, [Shard(0), Shard(1)])]})
    groups[1]["clip"] = ClipByNorm(0.5)
    groups[2]["clip"] = ClipByGlobalNorm(0.5)
    with _kinds() as kinds:
        # The update of Partial gradients takes collectives too, which are not these.
        _optimizer(groups).step()
    # Along a dimension of one process nothing is Partial.
    assert kinds == ["sum"] * (1 if dist.get_world_size() == 2 else 5)


@in_processes(2)
def test_step_under_verify_agrees() -> None:
    with tritonclip.verify():
        _optimizer(_groups({**RULES, **EXTREMES})).step()


def _asking(*requests: Request) -> Exchange[list[float]]:
    found = []
    for request in requests:
        reduced = yield request
        found.append(float(reduced.sum()))
    return found


def _request(number: float, *, largest: bool = False, early: bool = False) -> Request:
    domain = Domain((), 1, 1)
    return Request(torch.full((2,), number, dtype=torch.float64), (), domain, CPU, largest, early)


def test_together_serves_like_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    def reduce(buffer: torch.Tensor, *_: Any, largest: bool) -> torch.Tensor:
        served.append(("max" if largest else "sum", buffer.tolist()))
        return buffer * 10

    monkeypatch.setattr(reduction, "all_reduce", reduce)
    results = run_exchanges(
        [
            _asking(_request(1)),
            _asking(_request(2, largest=True, early=True), _request(3)),
            _asking(_request(4, largest=True)),
            _asking(),
        ]
    )
    assert served == [("max", [2.0, 2.0, 4.0, 4.0]), ("sum", [1.0, 1.0, 3.0, 3.0])]
    assert results == [[20.0], [40.0, 60.0], [80.0], []]


def test_together_serves_first_those_that_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose second request then travels with the others."""
    served = []

    def reduce(buffer: torch.Tensor, groups: Any, *_: Any, largest: bool) -> torch.Tensor:
        served.append((groups, len(buffer)))
        return buffer

    monkeypatch.setattr(reduction, "all_reduce", reduce)
    flags = _request(1, early=True)._replace(groups=("mesh",))  # type: ignore[arg-type]
    run_exchanges([_asking(_request(1)), _asking(flags, _request(2))])
    assert served == [(("mesh",), 2), ((), 4)]
