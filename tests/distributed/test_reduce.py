"""How the numbers travel: on a device of the group, and by how many collectives."""

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

import tritonclip
from helpers.cases import NoHostRead
from helpers.processes import in_processes
from helpers.refusing import as_on_accelerator
from helpers.serving import decided_on_device
from helpers.spread import (
    assert_same_everywhere,
    check_clip,
    collectives_at,
    collectives_of,
    local,
    mesh_of,
    parameter,
    unchanged,
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


class _SentError(Exception):
    pass


@pytest.mark.parametrize(
    ("config", "device"),
    [("meta:nccl,xpu:xccl", "meta"), ("meta:nccl,cpu:gloo", "cpu"), ("gloo", "cpu")],
    ids=["offload", "both", "one"],
)
@pytest.mark.parametrize("p", [2.0, 8.0, math.inf])
@in_processes(2)
def test_clip_sends_numbers_on_a_device_of_the_group(p: float, config: str, device: str) -> None:
    """With CPU offload gradients lie on the CPU, for which NCCL has no collective."""
    parameters = [parameter((8, 3), mesh_of(-1), [Shard(0)])]

    def send(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        # Nothing but its device can be seen of a tensor of another kind here.
        assert tensor.device.type == device
        raise _SentError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: config)
        patch.setattr(dist, "all_reduce", send)
        with pytest.raises(_SentError):
            tritonclip.clip_(parameters, ClipByGlobalNorm(1.0, p))
    # The device was found for one domain; another mesh has its own.
    tritonclip.clip_([parameter((8, 3), mesh_of(-1), [Shard(0)])], 1.0)


RULES = [ClipByGlobalNorm(0.1, p) for p in (2.0, 100.0, math.inf)]


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("rule", [*RULES, ClipByNorm(0.1), ClipByUnitNorm(0.01), ClipByValue(0.1)])
@in_processes(2)
def test_clip_waits_for_no_device(rule: Any, policy: Any) -> None:
    """As on an accelerator: from the norm to the writing nothing is read on the host."""
    mesh = mesh_of(-1)
    parameters = [
        parameter((8, 3), mesh, [Shard(0)], seed=1),
        parameter((4,), mesh, [Replicate()], seed=2),
        parameter((5, 2), None, seed=3),
    ]
    if not (rule.per_unit or rule.clamps):
        parameters.append(with_partial(parameter((6,), mesh, [Replicate()]), [Partial()]))
    if rule.clamps:
        # Rounded on the host, once.
        rule.bounds[torch.float32]
    with decided_on_device(), as_on_accelerator(), tritonclip.use_backend("torch"), NoHostRead():
        for _ in range(2):
            tritonclip.clip_(parameters, rule, nonfinite=policy)


@pytest.mark.parametrize("rule", [*RULES, ClipByNorm(0.1)])
@in_processes(2)
def test_clip_is_right_where_reading_a_number_would_wait(rule: Any) -> None:
    parameters = [
        parameter((8, 3), mesh_of(-1), [Shard(0)], seed=1),
        parameter((4,), mesh_of(-1), [Replicate()], seed=2),
    ]
    with as_on_accelerator():
        check_clip(parameters, rule, collectives=collectives_at(rule.norm_type))


@in_processes(2)
def test_clip_by_default_sends_one_number_and_a_mark() -> None:
    """The mark tells that a process refuses its gradients."""
    parameters = [parameter((8, 3), mesh_of(-1), [Shard(0)], seed=i) for i in range(3)]
    all_reduce, sizes = dist.all_reduce, []

    def send(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append((tensor.numel(), tensor.dtype))
        return all_reduce(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", send)
        tritonclip.clip_(parameters, 1.0)
        tritonclip.clip_(parameters, tritonclip.ClipByNorm(1.0))
    assert sizes == [(2, torch.float64), (4, torch.float64)]


@in_processes(2)
def test_clip_bumps_versions() -> None:
    one = parameter((8, 3), mesh_of(-1), [Shard(0)])
    before = one.grad._version, one.grad._local_tensor._version
    tritonclip.clip_([one], math.inf)
    assert before == (one.grad._version, one.grad._local_tensor._version)
    tritonclip.clip_([one], 0.1)
    assert one.grad._version > before[0]
    assert one.grad._local_tensor._version > before[1]
    before = one.grad._version, one.grad._local_tensor._version
    # Nothing to clip, but a loss scale to divide by.
    tritonclip.clip_([one], math.inf, grad_scale=2.0)
    assert one.grad._version > before[0]
    assert one.grad._local_tensor._version > before[1]


@in_processes(2)
def test_clipped_optimizer_rules_share_a_domain() -> None:
    """A group whose own parameters lie on a part of the mesh, and one of plain tensors."""
    mesh = mesh_of(1, -1, names=("dp", "tp"))
    whole_mesh = parameter((8, 3), mesh, [Replicate(), Shard(0)], seed=1)
    part = parameter((8,), mesh["tp"], [Shard(0)], seed=2)
    plain = parameter((5,), None, seed=3)
    left_out = parameter((5,), None, seed=4)
    left_out.need_clip = False
    if dist.get_rank():
        plain.grad[0] = math.nan
        left_out.grad = None
    groups: Any = [
        {"params": [whole_mesh, left_out]},
        {"params": [part], "clip": 0.5},
        {"params": [plain], "clip": ClipByGlobalNorm(0.5)},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0, nonfinite="skip")
    with unchanged((whole_mesh, part, plain)):
        _, n = collectives_of(optimizer.step)
    # A sum for each rule, a maximum for the gradient that has none.
    assert n == 4
    assert optimizer.stats.summary()["skipped_steps"] == 1


EVERY_RULE: list[Any] = [
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
    optimizer, apart = _optimizer(EVERY_RULE), _groups(EVERY_RULE)
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
        _optimizer(EVERY_RULE).step()
