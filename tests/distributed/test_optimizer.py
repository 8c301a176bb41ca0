"""ClippedOptimizer and scalers over sharded models: every process takes or skips a step alike."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Shard

import tritonclip
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    gathered,
    grads_of,
    local,
    loss_of,
    mesh_of,
    parameter,
    sharded_network,
    shared_folder,
    unchanged,
    values,
    weights_of,
    whole,
)
from helpers.training import MODES, SCALERS
from tritonclip import (
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByRMS,
    ClipByZScore,
    ClippedOptimizer,
    ClipState,
    Outlier,
)


def _spoil(model: nn.Module, bad: float) -> None:
    """Makes one element bad, in one process."""
    if dist.get_rank() == 1:
        local(grads_of(model.parameters())[0]).view(-1)[0] = bad


@pytest.mark.parametrize("p", [2.0, math.inf])
@in_processes(2)
def test_step_by_each_norm_clips_nothing_where_no_parameter_needs_clip(p: float) -> None:
    one = parameter((4, 3), mesh_of(-1), [Shard(0)])
    one.need_clip = False
    right = whole(one.detach()) - 0.1 * whole(one.grad)
    ClippedOptimizer(torch.optim.SGD([one], lr=0.1), ClipByNorm(0.5, p), nonfinite="skip").step()
    torch.testing.assert_close(whole(one.detach()), right)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "error", "skip"])
@in_processes(2)
def test_step_equals_one_process(mode: str, nonfinite: Any) -> None:
    models = [sharded_network(), sharded_network(sharded=False)]
    inners = [torch.optim.AdamW(m.parameters(), lr=0.1, **MODES[mode]) for m in models]
    wrappers = [ClippedOptimizer(inner, 0.05, nonfinite=nonfinite) for inner in inners]
    for step in range(4):
        for sharded, model, wrapper in zip((True, False), models, wrappers, strict=True):
            loss_of(model, step, sharded=sharded).backward()
            wrapper.step()
            wrapper.zero_grad()
    # Adam divides by roots of squares, which makes differences of 1e-7 a thousand times larger.
    torch.testing.assert_close(*map(weights_of, models), rtol=1e-4, atol=1e-5)
    ours, theirs = (wrapper.stats.summary() for wrapper in wrappers)
    assert ours["clipped_steps"] == theirs["clipped_steps"] == 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@in_processes(2)
def test_step_is_skipped_everywhere(mode: str, bad: float) -> None:
    model = sharded_network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, **MODES[mode])
    wrapper = ClippedOptimizer(inner, 0.05, nonfinite="skip")
    loss_of(model, 0).backward()
    wrapper.step()
    _spoil(model, bad)
    with unchanged(model.parameters()):
        wrapper.step()
    summary = wrapper.stats.summary()
    assert (summary["steps"], summary["skipped_steps"]) == (1, 1)


@in_processes(2)
def test_step_raises_everywhere() -> None:
    model = sharded_network()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    wrapper = ClippedOptimizer(optimizer, 0.05, nonfinite="error")
    loss_of(model, 0).backward()
    _spoil(model, math.nan)
    error = pytest.raises(RuntimeError, match=r"0\.weight \(on rank 1\)")
    with unchanged(model.parameters()), error:
        wrapper.step()


@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "replicated"])
@in_processes(2)
def test_loss_of_one_process_skips_the_step_everywhere(is_sharded: bool) -> None:
    """The mean over all is judged; replicas exchange nothing else."""
    one = parameter((6,), mesh_of(-1) if is_sharded else None, [Shard(0)])
    wrapper = ClippedOptimizer(torch.optim.SGD([one], lr=0.1), 0.5, skip_above=Outlier(6.0, 8))
    for step in range(12):
        wrapper.loss = torch.tensor(-1.0 - 0.1 * (step % 3) + 0.01 * dist.get_rank())
        if step == 9 and dist.get_rank() == 1:
            wrapper.loss = torch.tensor(20.0)
        wrapper.step()
    assert int(wrapper.stats.skipped_steps) == 1
    values = wrapper.state_dict()["tritonclip"]["memory"]["losses"]["values"]
    assert_same_everywhere(torch.tensor(values))


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("mode", ["foreach", "fused"])
@in_processes(2)
def test_scaler_skips_everywhere(scaler: Any, mode: str) -> None:
    model, alone = sharded_network(), sharded_network(sharded=False)
    wrappers = [
        # torch has no fused SGD for DTensors.
        ClippedOptimizer(torch.optim.AdamW(m.parameters(), lr=0.1, **MODES[mode]), 0.05)
        for m in (model, alone)
    ]
    scalers = [scaler("cpu", init_scale=1024.0) for _ in wrappers]
    taken: list[int] = []
    wrappers[0].register_step_post_hook(lambda *_: taken.append(step))
    for step in range(4):
        for sharded, one, wrapper, its in zip(
            (True, False), (model, alone), wrappers, scalers, strict=True
        ):
            wrapper.zero_grad()
            its.scale(loss_of(one, step, sharded=sharded)).backward()
            if step == 2:
                if sharded:
                    _spoil(one, math.inf)
                else:
                    grads_of(one.parameters())[0].view(-1)[0] = math.inf
            its.step(wrapper)
            its.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    # A fused optimizer is told on the device.
    assert taken == ([0, 1, 2, 3] if mode == "fused" else [0, 1, 3])
    torch.testing.assert_close(weights_of(model), weights_of(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["group", "mesh"])
@in_processes(2)
def test_scaler_measures_in_a_process_without_gradients(is_sharded: bool) -> None:
    """The others wait for it, and an overflow of theirs is its own too."""
    mesh = mesh_of(-1) if is_sharded else None
    one = parameter((6,), mesh, [Shard(0)], seed=1)
    options: Any = {} if is_sharded else {"process_group": dist.group.WORLD}
    optimizer = ClippedOptimizer(torch.optim.SGD([one], lr=0.1), 0.5, **options)
    scaler = tritonclip.GradScaler("cpu", init_scale=1024.0)
    for bad, expected in ((None, 1024.0), (math.inf, 512.0)):
        scaler.scale(torch.ones(()))
        if dist.get_rank() == 0:
            one.grad = None
        elif bad is not None:
            local(one.grad)[0] = bad
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
    assert int(optimizer.stats.steps) == 1
    assert_same_everywhere(optimizer.stats.last_norm)


@in_processes(2)
def test_groups_have_their_rules() -> None:
    model, alone = sharded_network(), sharded_network(sharded=False)
    wrappers = []
    for one in (model, alone):
        first, _, last = one.children()
        groups: Any = [
            {"params": first.parameters()},
            {"params": [last.weight], "clip": ClipByNorm(0.01)},
            {"params": [last.bias], "clip": None},
        ]
        wrappers.append(ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 0.05, nonfinite="skip"))
    for sharded, one, wrapper in zip((True, False), (model, alone), wrappers, strict=True):
        loss_of(one, 0, sharded=sharded).backward()
        wrapper.step()
    torch.testing.assert_close(weights_of(model), weights_of(alone), rtol=1e-5, atol=1e-7)
    assert wrappers[0].stats.summary() == pytest.approx(wrappers[1].stats.summary(), rel=1e-5)


@in_processes(2)
def test_checkpoint_holds_the_same_statistics_everywhere() -> None:
    model = sharded_network()
    wrapper = ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 0.05)
    loss_of(model, 0).backward()
    wrapper.step()
    saved = wrapper.state_dict()
    for value in saved["tritonclip"].values():
        assert_same_everywhere(value)
    wrapper.load_state_dict(saved)


@in_processes(2)
def test_clip_leaves_out_parameters_that_need_none() -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((4, 3), mesh, [Shard(0)], seed=i) for i in range(3)]
    parameters[1].need_clip = False
    before = whole(parameters[1].grad)
    norm = tritonclip.clip_(parameters, 0.1)
    expected = torch.cat([values((4, 3), i).flatten() for i in (0, 2)]).norm()
    torch.testing.assert_close(norm, expected)
    assert torch.equal(whole(parameters[1].grad), before)


@in_processes(2)
def test_clip_waits_for_pieces_that_are_on_their_way() -> None:
    """The local tensor of a DTensor may be the result of a collective that still runs."""
    one = parameter((4, 3), mesh_of(-1), [Shard(0)])
    total = torch.stack(gathered(one.grad._local_tensor)).sum(0)
    world: Any = dist.group.WORLD
    coming = all_reduce(one.grad._local_tensor, "sum", world)
    assert isinstance(coming, AsyncCollectiveTensor)
    one.grad._local_tensor = coming
    norm = tritonclip.clip_([one], 0.1)
    torch.testing.assert_close(norm, total.norm() * math.sqrt(dist.get_world_size()))
    right = total * (0.1 / (norm + 1e-6))
    torch.testing.assert_close(coming.wait(), right, rtol=1e-6, atol=0)


def _trained_by(rule: Any, *, sharded: bool, **options: Any) -> Any:
    """A model after twelve steps under a rule that follows the norms, and its optimizer."""
    model = sharded_network(sharded=sharded)
    optimizer = ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule, **options)
    for step in range(12):
        optimizer.zero_grad()
        (loss_of(model, step, sharded=sharded) * (100.0 if step % 5 == 4 else 1.0)).backward()
        if step == 6:
            # A gradient that no process has in this step.
            next(iter(model.parameters())).grad = None
        optimizer.step()
    return model, optimizer


FOLLOWING = [ClipByQuantile(0.5, 6), ClipByZScore(warmup=4), ClipByOwnHistory(warmup=3)]


@pytest.mark.parametrize("rule", [*FOLLOWING, ClipByOwnQuantile(0.5, 6), ClipByRMS(0.05)], ids=str)
@in_processes(2)
def test_limits_that_follow_are_those_of_one_process(rule):
    model, optimizer = _trained_by(rule, sharded=True, skip_above=Outlier(5.0, 6))
    alone, other = _trained_by(rule, sharded=False, skip_above=Outlier(5.0, 6))
    # Sums of the shards' gradients are rounded in another order.
    torch.testing.assert_close(weights_of(model), weights_of(alone), rtol=1e-4, atol=1e-6)
    assert int(optimizer.stats.skipped_steps) == int(other.stats.skipped_steps)
    for state in optimizer.state_dict()["tritonclip"].get("memory", {}).values():
        if state["values"] is not None:
            assert_same_everywhere(torch.tensor(state["values"]).nan_to_num(-1))


@pytest.mark.parametrize("rule", [ClipByOwnHistory(warmup=1, max_norm=math.inf), ClipByQuantile()])
@in_processes(2)
def test_memories_follow_groups_and_shards_that_move(rule: Any) -> None:
    """Beside one process, through reordered parameters and groups, and a group that shrinks."""
    wrappers = []
    for mesh in (mesh_of(-1), None):
        shards = [parameter((4, 3), mesh, [Shard(0)], size=10.0**at) for at in range(4)]
        groups: list[Any] = [{"params": shards[:2]}, {"params": shards[2:], "clip": rule}]
        wrappers.append(ClippedOptimizer(torch.optim.SGD(groups, lr=0.0), rule))

    def norms(seed: int, factor: float = 1.0) -> list[list[float]]:
        found = []
        for wrapper in wrappers:
            every = [p for group in wrapper.param_groups for p in group["params"]]
            for param in every:
                mesh = getattr(param, "device_mesh", None)
                size = factor * sizes[wrapper][param]
                param.grad = parameter(param.shape, mesh, [Shard(0)], seed=seed, size=size).grad
            wrapper.step()
            found.append([float(whole(grad).norm()) for grad in grads_of(every)])
        torch.testing.assert_close(*found, rtol=1e-5, atol=0)
        return found

    sizes: Any = {
        wrapper: {
            param: 10.0 ** (2 * number + at)
            for number, group in enumerate(wrapper.param_groups)
            for at, param in enumerate(group["params"])
        }
        for wrapper in wrappers
    }
    norms(0)
    for wrapper in wrappers:
        wrapper.param_groups[0]["params"].reverse()
        wrapper.param_groups.reverse()
    before = norms(0)
    for wrapper in wrappers:
        del wrapper.param_groups[0]["params"][0]
    after = norms(0, 100.0)
    if rule.per_gradient:
        assert after[0] == pytest.approx([1.05 * norm for norm in before[0][1:]], rel=1e-5)


@pytest.mark.parametrize("rule", [ClipByOwnHistory(warmup=1), ClipByQuantile(0.5, 4)])
@in_processes(2)
def test_memories_come_back_from_a_distributed_checkpoint(rule: Any) -> None:
    folder = shared_folder()
    model, states = sharded_network(), [ClipState(), ClipState()]
    inners = [torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2)]
    wrappers = [ClippedOptimizer(inner, rule, skip_above=Outlier(5.0, 6)) for inner in inners]

    def train(at: int, steps: range) -> list[torch.Tensor]:
        for step in steps:
            clip = partial(tritonclip.clip_, model, rule, state=states[at])
            for call in (wrappers[at].step, clip):
                model.zero_grad()
                loss_of(model, step).backward()
                call()
        return [whole(grad) for grad in grads_of(model.parameters())]

    train(0, range(3))
    saved, template = (
        dict[str, Any](clip=state, optimizer=wrapper.state_dict())
        for state, wrapper in zip(states, wrappers, strict=True)
    )
    save(saved, checkpoint_id=folder)
    load(template, checkpoint_id=folder)
    wrappers[1].load_state_dict(template["optimizer"])
    ours, theirs = train(1, range(3, 5)), train(0, range(3, 5))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    memories = [str(wrapper.state_dict()["tritonclip"]["memory"]) for wrapper in wrappers]
    assert memories[0] == memories[1]
    assert states[0].steps == states[1].steps == 5


@pytest.mark.parametrize("form", ["nested", "flattened", "whole"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@in_processes(2)
def test_memories_come_back_from_the_state_of_a_sharded_model(form: str, momentum: float) -> None:
    """Every process saves its shards, or the first one all, from which it then tells the others.

    torch itself cannot tell them a flattened state, nor one of Adam, whose steps it mixes up.
    """
    whole_state = form == "whole"
    options = StateDictOptions(
        flatten_optimizer_state_dict=form == "flattened",
        full_state_dict=whole_state,
        broadcast_from_rank0=whole_state,
    )

    def program() -> tuple[nn.Module, ClippedOptimizer]:
        model = sharded_network()
        rule, above = ClipByOwnQuantile(0.5, 6), Outlier(5.0, 20)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        return model, ClippedOptimizer(inner, rule, skip_above=above)

    def train(model: nn.Module, optimizer: ClippedOptimizer, steps: range) -> str:
        for step in steps:
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return str(optimizer.state_dict()["tritonclip"]["memory"])

    first, second = program(), program()
    memory = train(*first, range(3))
    saved = get_optimizer_state_dict(*first, options=options)
    if whole_state:
        saved = saved if dist.get_rank() == 0 else {}
    else:
        folder = shared_folder()
        save({"optimizer": saved}, checkpoint_id=folder)
        saved = get_optimizer_state_dict(*second, options=options)
        load({"optimizer": saved}, checkpoint_id=folder)
    set_optimizer_state_dict(*second, saved, options=options)
    assert train(*second, range(0)) == memory
    assert not any("tritonclip" in name for entry in second[1].state.values() for name in entry)
    set_model_state_dict(second[0], get_model_state_dict(first[0]))
    assert train(*second, range(3, 5)) == train(*first, range(3, 5))


@pytest.mark.parametrize(
    "rule", [tritonclip.ClipByQuantile(0.9), tritonclip.ClipByOwnHistory()], ids=lambda r: r.name
)
@in_processes(2)
def test_model_of_fsdp2_moves_after_a_step(rule: Any) -> None:
    model: Any = sharded_network()
    optimizer = ClippedOptimizer(torch.optim.AdamW(model.parameters()), rule)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()
        model.cpu()
    assert int(optimizer.stats.steps) == 2
