"""verify() over several processes: right calls pass; wrong ones and those that differ do not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import tritonclip
from helpers import reference
from helpers.broken_verbs import break_norm, break_scale
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.refusing import is_first
from helpers.spread import grads_of, mesh_of, network, parameter, unchanged, values, with_partial
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByValue,
    ClippedOptimizer,
    ClipState,
    Outlier,
    Rule,
)
from tritonclip.backends.native import NativeBatch


def _mixed() -> list[Any]:
    mesh = mesh_of(-1)
    return [
        parameter((9, 3), mesh, [Shard(0)], seed=1),
        parameter((5,), mesh, [Replicate()], seed=2),
        with_partial(parameter((6,), mesh, [Replicate()]), [Partial()]),
        parameter((3, 3), None, seed=4),
        parameter((1,), mesh, [Shard(0)], seed=5, dtype=torch.float64),
    ]


@pytest.mark.covering(1)
@pytest.mark.parametrize("p", [2.0, 1.0, 20.0, math.inf])
@in_processes(2, 4)
def test_verify_passes_right_calls(p: float) -> None:
    with tritonclip.verify():
        for rule in (ClipByGlobalNorm(0.5, p), ClipByNorm(0.5, p)):
            for options in ({}, {"nonfinite": "zero"}, {"grad_scale": 8.0}):
                tritonclip.clip_(_mixed(), rule, **options)
        parameters = _mixed()
        if dist.get_rank():
            parameters[0].grad = None
        tritonclip.clip_(parameters, ClipByGlobalNorm(0.5, p))
        sharded = [parameters[0], parameters[4]]
        for one in sharded:
            if dist.get_rank():
                one.grad = None
        tritonclip.clip_(sharded, ClipByGlobalNorm(0.5, p))
        tritonclip.get_total_norm([_mixed()[0].grad], p)


@in_processes(2)
def test_verify_passes_right_calls_with_policies() -> None:
    with tritonclip.verify():
        for rule in (ClipByValue(0.5), ClipByNorm(0.5), ClipByGlobalNorm(0.5)):
            parameters = _mixed()[:2]
            if dist.get_rank():
                parameters[0].grad.to_local()[0] = math.nan
            tritonclip.clip_(parameters, rule, nonfinite="zero")
            assert not parameters[0].grad.to_local().any()


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.5), ClipByNorm(0.5), ClipByValue(0.1)])
@in_processes(2)
def test_verify_finds_a_wrong_write(rule: Rule) -> None:
    """Of a shard in each process."""
    verb = "clamp_" if rule.clamps else "scale_"
    parameters = _mixed()
    del parameters[2 if verb == "clamp_" else 0]
    wrong: Any = parameters[1].grad.to_local()
    found = pytest.raises(tritonclip.VerificationError, match=r"parameters\[1\]\[3\]: got")
    with pytest.MonkeyPatch.context() as patch, tritonclip.verify(), found:
        break_scale(patch, NativeBatch, lambda: wrong[3].mul_(1.01), verb)
        tritonclip.clip_(parameters, rule)
    dist.barrier()


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.5), ClipByNorm(0.5)])
@in_processes(2)
def test_verify_finds_a_norm_that_is_off(rule: Rule) -> None:
    """Of the shards of every process."""
    found = pytest.raises(tritonclip.VerificationError, match=r"norm.*: got")
    with pytest.MonkeyPatch.context() as patch, tritonclip.verify(), found:
        break_norm(patch, NativeBatch, 1 + 1e-4)
        tritonclip.clip_(_mixed()[:2], rule)
    dist.barrier()


@in_processes(2)
def test_verify_passes_sums_that_are_rounded() -> None:
    """Terms are added up in their dtype, where nearly all of them cancels out."""
    one = parameter((40,), mesh_of(-1), [Replicate()], dtype=torch.bfloat16)
    with_partial(one, [Partial()])
    one.grad.to_local().add_(100 if is_first() else -100)
    for rule in (ClipByGlobalNorm(0.5), ClipByNorm(0.5)):
        with tritonclip.verify():
            tritonclip.clip_([one], rule)


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1.0), ClipByNorm(1.0)])
@in_processes(2)
def test_verify_finds_lists_that_differ(rule: Any) -> None:
    parameters = _mixed()
    if dist.get_rank():
        del parameters[1]
    with (
        tritonclip.verify(),
        pytest.raises(ValueError, match=r"at position 1: rank 0 has .*rank 1"),
    ):
        tritonclip.clip_(parameters, rule)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "none": lambda group: group.update(clip=None),
    "no-key": lambda group: group.pop("clip"),
    "another": lambda group: group.update(clip=ClipByNorm(0.5)),
}


@pytest.mark.parametrize("policy", ["propagate", "skip"])
@pytest.mark.parametrize("all_groups", [False, True], ids=["one-group", "all-groups"])
@pytest.mark.parametrize("change", CHANGES)
@in_processes(2)
def test_verify_finds_rules_of_groups_that_differ(
    change: str, all_groups: bool, policy: Any
) -> None:
    """A rule that is valid, in one process only; each list by itself is alike."""
    parameters = _mixed()[:2]
    groups: list[Any] = [{"params": [one], "clip": 0.5} for one in parameters]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0, nonfinite=policy)
    if dist.get_rank():
        for group in groups if all_groups else groups[1:]:
            CHANGES[change](group)
    error = pytest.raises(ValueError, match="expected the same rules")
    with unchanged(grads_of(parameters)), tritonclip.verify(), error:
        optimizer.step()
    dist.barrier()


@in_processes(4)
def test_verify_passes_parameters_on_meshes_of_others() -> None:
    """A process holds no piece of some, and a sharded one lies on two processes."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i, mesh in enumerate(meshes)]
    own = dist.get_rank() // 2
    for p in (2.0, math.inf):
        with tritonclip.verify():
            norms = tritonclip.clip_(parameters, ClipByNorm(math.inf, p))
        expected = [reference.norm(values((8, 3), own), p) if i == own else 0.0 for i in range(2)]
        assert_norm(norms, expected)


class _Own(Rule):
    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def limit(self, measured: Any) -> float:
        return self.max_norm


def _twins() -> dict[str, Any]:
    """Two parameters of one shape."""
    mesh = mesh_of(-1)
    return {name: parameter((6, 3), mesh, [Shard(0)], seed=ord(name)) for name in "ab"}


def _clip(named: dict[str, Any], clip: Any = 0.5, state: Any = None, **options: Any) -> object:
    """A number in place of a state is that of the calls that it has seen."""
    if isinstance(state, int):
        state = _state_after(named, clip, state)
    return tritonclip.clip_(named.items(), clip, state=state, **options)


def _state_after(named: dict[str, Any], rule: Any, n: int) -> ClipState:
    """A state after some calls, of all processes, that the others forget."""
    state, other = ClipState(), ClipState()
    for at in range(2):
        grads = [one.grad for one in named.values()]
        for one in named.values():
            one.grad = one.grad.clone()
        _clip(named, rule, state=state if at < n else other)
        for one, grad in zip(named.values(), grads, strict=True):
            one.grad = grad
    return state


def _step(named: dict[str, Any], clip: Any = 0.5, **options: Any) -> None:
    loss, scale = options.pop("loss", None), options.pop("grad_scale", None)
    optimizer = ClippedOptimizer(torch.optim.SGD([*named.items()], lr=0.1), clip, **options)
    if loss is not None:
        optimizer.loss = loss
    optimizer.step(grad_scale=scale)


# The options of the first process, those of the other one, and what the error names.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "limit": ({"clip": 0.5}, {"clip": 0.25}, "the rule"),
    "value": ({"clip": ClipByValue(0.5)}, {"clip": 0.5}, "the rule"),
    "values": ({"clip": ClipByValue(1.5)}, {"clip": ClipByValue(0.5)}, "the rule"),
    "quantile": ({"clip": ClipByQuantile(0.5, 4)}, {"clip": ClipByQuantile(0.9, 4)}, "the rule"),
    "policy": ({"nonfinite": "zero"}, {"nonfinite": "propagate"}, "the policy"),
    "loss-scale": ({"grad_scale": 3.0}, {"grad_scale": 2.0}, "the loss scale"),
}
OF_CLIP: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "order": ({"clip": ClipByGlobalNorm(0.5, 2)}, {"clip": ClipByGlobalNorm(0.5, 1)}, "the rule"),
    "maximum": ({"clip": ClipByGlobalNorm(0.5, math.inf)}, {"clip": 0.5}, "the rule"),
    "each": ({"clip": ClipByNorm(0.5)}, {"clip": 0.5}, "the rule"),
    "own": ({"clip": _Own(0.5)}, {"clip": _Own(0.25)}, "the rule"),
    "schedule": (
        {"clip": ClipByGlobalNorm(lambda step: 1.5), "state": ClipState()},
        {"clip": ClipByGlobalNorm(lambda step: 0.5), "state": ClipState()},
        "the rule",
    ),
    "state": (
        {"clip": ClipByQuantile(0.5, 4), "state": 2},
        {"clip": ClipByQuantile(0.5, 4), "state": 1},
        "the state",
    ),
    "state-of-each": (
        {"clip": ClipByOwnHistory(), "state": 2},
        {"clip": ClipByOwnHistory(), "state": 1},
        "the state",
    ),
    "policy-of-values": (
        {"clip": ClipByValue(0.5), "nonfinite": "error"},
        {"clip": ClipByValue(0.5)},
        "the policy",
    ),
}
OF_STEPS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "skip-above": ({"skip_above": 1001.0}, {"skip_above": 1000.0}, "skip_above"),
    "outlier": ({"skip_above": Outlier(7.0)}, {"skip_above": Outlier(6.0)}, "skip_above"),
    "skips": (
        {"nonfinite": "skip", "max_consecutive_skips": 3},
        {"nonfinite": "skip"},
        "max_consecutive_skips: rank 0 has 3",
    ),
    "loss": (
        {"skip_above": Outlier(), "loss": 1.0},
        {"skip_above": Outlier()},
        "optimizer.loss: rank 0 has a loss",
    ),
}


def _check_differ(call: Callable[[dict[str, Any], bool], object], message: str) -> None:
    """A call, given whether the process is the first, raises in each and changes nothing."""
    named, error = _twins(), rf"differ in {message}.* and rank 1 has"
    tensors = [*grads_of(named.values()), *named.values()]
    with unchanged(tensors), tritonclip.verify(), pytest.raises(ValueError, match=error):
        call(named, is_first())
    dist.barrier()


@pytest.mark.parametrize(
    ("call", "what"),
    [(_clip, what) for what in OPTIONS | OF_CLIP] + [(_step, what) for what in OPTIONS | OF_STEPS],
)
@in_processes(2)
def test_verify_finds_options_that_differ(call: Any, what: str) -> None:
    first, other, message = (OPTIONS | OF_CLIP | OF_STEPS)[what]
    _check_differ(lambda named, is_one: call(named, **(first if is_one else other)), message)


@pytest.mark.parametrize(("call", "where"), [(_clip, ""), (_step, " of the optimizer")])
@in_processes(2)
def test_verify_finds_parameters_in_another_order(call: Any, where: str) -> None:
    _check_differ(
        lambda named, first: call(named if first else dict(reversed(named.items()))),
        f"the parameter at position 0{where}: rank 0 has a of",
    )


@pytest.mark.parametrize("call", [_clip, _step])
@in_processes(2)
def test_verify_finds_rules_of_a_group_that_differ(call: Any) -> None:
    def differ(_: Any, first: bool) -> None:
        own = {"plain": parameter((5 + first,), None)}
        call(own, 0.5 + first, process_group=dist.group.WORLD)

    _check_differ(differ, "the rule")


# For each: the call of a process, given whether it is the first; and what the error names.
CALLS: dict[str, tuple[Callable[[dict[str, Any], bool], object], str]] = {
    "by-name": (
        lambda named, first: (
            tritonclip.norms_by_name(named.items())
            if first
            else tritonclip.get_total_norm(grads_of(named.values()))
        ),
        "the call",
    ),
    "total": (
        lambda named, first: (
            _clip(named) if first else tritonclip.get_total_norm(grads_of(named.values()))
        ),
        "the call: rank 0 has clip",
    ),
    "given": (
        lambda named, first: tritonclip.clip_grads_with_norm_(
            named.values(), 0.5, torch.tensor(1.0 + first)
        ),
        "the total norm",
    ),
}


@pytest.mark.parametrize("what", CALLS)
@in_processes(2)
def test_verify_finds_calls_that_differ(what: str) -> None:
    _check_differ(*CALLS[what])


def _step_after(named: dict[str, Any], first: bool) -> None:
    """A step of processes of which one has loaded the norms of an earlier run."""
    optimizer = ClippedOptimizer(
        torch.optim.SGD([*named.items()], lr=0.1), 0.5, skip_above=Outlier(window=16)
    )
    saved = optimizer.state_dict()
    optimizer.step()
    if first:
        optimizer.load_state_dict(saved)
    with tritonclip.verify():
        optimizer.step()


@in_processes(2)
def test_verify_finds_steps_whose_states_differ() -> None:
    with pytest.raises(ValueError, match="differ in the state of outliers"):
        _step_after(_twins(), is_first())
    dist.barrier()


@in_processes(2)
def test_verify_finds_replicas_of_ddp_that_differ() -> None:
    model = DistributedDataParallel(network())
    model(values((4, 3), dist.get_rank())).square().sum().backward()
    with unchanged(grads_of(model.parameters())), tritonclip.verify():
        tritonclip.clip_(model, math.inf)
        scale = torch.tensor(1.0, dtype=torch.float64 if is_first() else torch.float32)
        tritonclip.clip_(model, math.inf, grad_scale=scale)
        with pytest.raises(ValueError, match="differ in the rule: rank 0"):
            tritonclip.clip_(model, 0.5 + is_first())


@in_processes(2)
def test_verify_leaves_no_replica_of_ddp_waiting() -> None:
    """For a process that raises, or has no gradient."""
    model = DistributedDataParallel(network())
    model(values((4, 3), 0)).square().sum().backward()
    first = next(model.parameters())
    with tritonclip.verify():
        if is_first():
            first.grad = torch.zeros(1).expand_as(first)
            with pytest.raises(ValueError, match="overlap"):
                tritonclip.clip_(model, 1.0)
        else:
            tritonclip.clip_(model, 1.0)
        if is_first():
            model.zero_grad()
        with pytest.raises(ValueError, match="differ in the parameter at position 0"):
            tritonclip.clip_(model, 1.0)


@in_processes(2)
def test_verify_passes_rules_without_text() -> None:
    """A function's text, and an object's, has an address, which differs between processes.

    So does what a rule keeps of earlier calls, such as of a list that one process has alone.
    """
    addresses = [[object() for _ in range(7 * dist.get_rank())]]
    named, state, by_value = _twins(), ClipState(), ClipByValue(0.5)
    if is_first():
        tritonclip.clip_tensors_([torch.ones(2)], by_value)
    with tritonclip.verify():
        _clip(named, _Own(0.5))
        _clip(named, by_value)
        for _ in range(2):
            _clip(named, ClipByGlobalNorm(lambda step: 1.0 + step), state=state)
            _step(named, ClipByNorm(lambda step: 1.0 + step))
    assert len(addresses) == 1


# Some arguments are of a wrong type.
CLIP: Any = tritonclip.clip_
WRONG_ARGUMENTS: dict[str, Callable[[Any, bool], object]] = {
    "limit": lambda one, wrong: CLIP([one], -1.0 if wrong else 1.0),
    "type": lambda one, wrong: CLIP([one], None if wrong else 1.0),
    "policy": lambda one, wrong: CLIP([one], 1.0, nonfinite="?" if wrong else "zero"),
    "loss scale": lambda one, wrong: CLIP([one], 1.0, grad_scale=-1.0 if wrong else 2.0),
    "tensors": lambda one, wrong: tritonclip.clip_tensors_([one.grad], -1.0 if wrong else 1.0),
    "drop-in": lambda one, wrong: tritonclip.clip_grad_norm_([one], -1.0 if wrong else 1.0),
    "order": lambda one, wrong: tritonclip.clip_grad_norm_([one], 1.0, math.nan if wrong else 2.0),
    "norm": lambda one, wrong: tritonclip.get_total_norm([one.grad], math.nan if wrong else 2.0),
}


@pytest.mark.parametrize("what", WRONG_ARGUMENTS)
@in_processes(2)
def test_verify_lets_all_raise_an_argument_that_one_has_wrong(what: str) -> None:
    one = parameter((7, 5), mesh_of(-1), [Shard(0)], seed=1)
    wrong = dist.get_rank() == 1
    said = None if wrong else "rank 1 raised, so no gradient was clipped on any rank"
    with (
        unchanged(grads_of([one])),
        tritonclip.verify(),
        pytest.raises((TypeError, ValueError), match=said),
    ):
        WRONG_ARGUMENTS[what](one, wrong)
