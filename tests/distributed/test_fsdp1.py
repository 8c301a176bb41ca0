"""FullyShardedDataParallel: flat parameters are plain tensors, of which the group is to be said."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import tritonclip
from helpers import reference
from helpers.cases import assert_bits, assert_norm, copies, grad_of, parameters
from helpers.processes import in_processes
from helpers.spread import assert_same_everywhere, grads_of, values
from tritonclip import ClipByNorm, ClipByQuantile, ClipByValue, ClippedOptimizer


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _backward(model: nn.Module, part: int | None = None) -> None:
    batch = values((8, 6), 1)
    if part is not None:
        batch = batch.chunk(dist.get_world_size())[part]
    model(batch).square().mean().backward()


def _norm_alone() -> float:
    alone = _model()
    _backward(alone)
    return reference.total_norm(grads_of(alone.parameters()))


def _sharded(
    model: nn.Module, strategy: str = "FULL_SHARD", *, original: bool = False
) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
    )


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@in_processes(2)
def test_clip_flat_parameters_by_group(strategy: str, original: bool) -> None:
    expected, sharded = _norm_alone(), _sharded(_model(), strategy, original=original)
    _backward(sharded, dist.get_rank())
    group = sharded.process_group
    with pytest.raises(TypeError, match="expected process_group="):
        tritonclip.clip_(sharded, 1.0)
    norm = tritonclip.clip_(sharded, expected / 2, process_group=group)
    assert_norm(norm, expected)
    assert_same_everywhere(norm)
    clipped = tritonclip.clip_(sharded, float("inf"), process_group=group)
    assert float(clipped) == pytest.approx(expected / 2, rel=1e-5)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@in_processes(1)
def test_parameters_of_one_process_are_whole(original: bool) -> None:
    """Also where all are 1-d, as views of a shard are, and where a plan is known."""
    module = _sharded(nn.LayerNorm(6), original=original)
    _backward(module, 0)
    expected = reference.total_norm(grads_of(module.parameters()))
    for limit in (1e9, expected / 2):
        assert_norm(tritonclip.clip_(module, limit), expected)
    clipped = reference.total_norm(grads_of(module.parameters()))
    assert clipped == pytest.approx(expected / 2, rel=1e-5)


@in_processes(2)
def test_clip_copied_flat_parameters_by_group_and_copies() -> None:
    """NO_SHARD keeps all of them everywhere."""
    expected, copied = _norm_alone(), _sharded(_model(), "NO_SHARD")
    _backward(copied, dist.get_rank())
    world, n = dist.group.WORLD, dist.get_world_size()
    norm = tritonclip.clip_(copied, 1.0, process_group=world, copies=lambda parameter: n)
    assert_norm(norm, expected)


@in_processes(2)
def test_clipped_optimizer_of_flat_parameters_trains_as_one_process() -> None:
    alone = _model()
    sharded = _sharded(_model())
    inner, group = torch.optim.SGD(sharded.parameters(), lr=0.1), sharded.process_group
    optimizers = [
        ClippedOptimizer(torch.optim.SGD(alone.parameters(), lr=0.1), 0.05),
        ClippedOptimizer(inner, 0.05, process_group=group),
    ]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _backward(alone)
        _backward(sharded, dist.get_rank())
        for optimizer in optimizers:
            optimizer.step()
    ours, theirs = (optimizer.stats.summary() for optimizer in optimizers)
    assert ours["clipped_steps"] == 5
    assert theirs == pytest.approx(ours, rel=1e-5)
    with FullyShardedDataParallel.summon_full_params(sharded):
        flat = [[p.flatten() for p in model.parameters()] for model in (sharded, alone)]
        torch.testing.assert_close(*flat, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@in_processes(2)
def test_memories_come_back_from_a_checkpoint_of_flat_parameters(
    original: bool, flatten: bool
) -> None:
    """They are in the groups: the state of a flat parameter is cut as the parameter is."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def program() -> tuple[nn.Module, ClippedOptimizer]:
        model = _sharded(_model(), original=original)
        inner, group = torch.optim.AdamW(model.parameters()), model.process_group
        return model, ClippedOptimizer(inner, ClipByQuantile(0.5, 20), process_group=group)

    (model, optimizer), (twin, other) = program(), program()
    for _ in range(3):
        _backward(model, dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(twin, other, saved, options=options)
    ours, theirs = (str(one.state_dict()["tritonclip"]) for one in (other, optimizer))
    assert ours == theirs
    assert int(other.stats.steps) == 3


FORMS: list[Callable[[torch.nn.Module], Any]] = [
    lambda module: module,
    lambda module: torch.nn.ModuleList([torch.nn.Linear(2, 2), module]),
    lambda module: list(module.parameters()),
    lambda module: module.named_parameters(),
]
FORMS_OF_SHARDS = pytest.mark.parametrize(
    ("strategy", "original"),
    [*itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True))],
)


def _module(strategy: str, original: bool) -> torch.nn.Module:
    """A model after its backward; the second process may have no gradient at all."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    module = _sharded(layers, strategy, original=original)
    module(torch.ones(2, 5)).sum().backward()
    return module


@FORMS_OF_SHARDS
@in_processes(2)
def test_clip_refuses_shards(strategy: str, original: bool) -> None:
    module = _module(strategy, original)
    grads = grads_of(module.parameters())
    before = copies(grads)
    for form, rule in itertools.product(FORMS, (1.0, ClipByNorm(1.0))):
        with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
            tritonclip.clip_(form(module), rule)
    with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
        tritonclip.clip_grad_norm_(module.parameters(), 1.0)
    if grads:
        optimizer = ClippedOptimizer(torch.optim.SGD(module.parameters(), lr=0.0), 1.0)
        with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
            optimizer.step()
    assert_bits(grads, before)


@FORMS_OF_SHARDS
@in_processes(2)
def test_clip_refuses_shards_behind_another_parameter(strategy: str, original: bool) -> None:
    """A list of the same form, of whole gradients, has left a plan."""
    module = _module(strategy, original)
    shards = [p for p in module.parameters() if p.grad is not None]
    if not shards:
        return
    first, *wholes = parameters([torch.ones(2), *copies(map(grad_of, shards))])
    tritonclip.clip_([first, *wholes], 1.0)
    with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
        tritonclip.clip_([first, *shards], 1.0)


@FORMS_OF_SHARDS
@in_processes(2)
def test_clip_by_value_of_shards(strategy: str, original: bool) -> None:
    """Elements are clamped alike wherever they lie."""
    module = _module(strategy, original)
    grads = grads_of(module.parameters())
    before = copies(grads)
    tritonclip.clip_(module, ClipByValue(0.1))
    assert_bits(grads, [reference.clamped(grad, -0.1, 0.1) for grad in before])


@FORMS_OF_SHARDS
@in_processes(2)
def test_clip_of_shards_by_a_known_norm(strategy: str, original: bool) -> None:
    """The norm of all processes is known, so that shards are scaled rightly."""
    module = _module(strategy, original)
    grads = grads_of(module.parameters())
    before = copies(grads)
    total = torch.tensor(4.0)
    tritonclip.clip_grads_with_norm_(module.parameters(), 1.0, total)
    assert_bits(grads, [reference.scaled(g, reference.coefficient(total, 1.0)) for g in before])
