"""``clip_on_backward_`` clips each gradient when backward has accumulated it.

Over several processes that is before DDP's average, and after FSDP2's.
"""

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tritonclip
from helpers.cases import assert_bits, copies, grad_of, normal
from helpers.cases import parameter as parameter_of
from helpers.graphs import NEEDS_DYNAMO
from helpers.processes import in_processes
from helpers.refusals import Refused, each_refused
from tritonclip import ClipByNorm, ClipByValue, clip_on_backward_
from tritonclip.backward.on_arrival import plans
from tritonclip.engine import plan_cache

RULES = [
    pytest.param(ClipByNorm(0.05), id="by-norm"),
    pytest.param(ClipByValue(-0.01, 0.02), id="by-value"),
]


def model_of(device: Any = "cpu") -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(
        device
    )


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    """The backends of tests differ in more than their names, by which plans are kept."""
    plans.clear()


def grads_of(model: Any) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
    device = next(model.parameters()).device
    loss: torch.Tensor = model(normal((3, 5), device=device, seed=seed)).square().sum()
    return loss


def twin_after(rule: Any = None, device: Any = "cpu") -> Any:
    """The model after one backward, clipped by a rule afterwards."""
    twin = model_of(device)
    loss_of(twin).backward()
    if rule is not None:
        tritonclip.clip_(twin, rule)
    return twin


@pytest.mark.parametrize("rule", RULES)
def test_clip_on_backward_clips_as_clip_does_afterwards(backend, rule):
    model = model_of(backend.device)
    handle = clip_on_backward_(model, rule)
    loss_of(model).backward()
    assert_bits(grads_of(model), grads_of(twin_after(rule, backend.device)))
    plain = grads_of(twin_after(device=backend.device))
    assert not any(map(torch.equal, grads_of(model), plain))
    handle.remove()


@pytest.mark.parametrize("end", ["remove", "with"])
def test_handle_ends_the_clipping(end):
    model = model_of()
    handle = clip_on_backward_(model, ClipByNorm(0.05))
    if end == "remove":
        handle.remove()
        handle.remove()
    else:
        with handle:
            pass
    loss_of(model).backward()
    assert_bits(grads_of(model), grads_of(twin_after()))


def test_optimizer_that_steps_inside_backward_finds_clipped_gradients():
    """Each parameter is updated, and its gradient freed, before the next one's arrives."""
    model, rule = model_of(), ClipByNorm(0.05)
    clip_on_backward_(model, rule)
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    loss_of(model).backward()
    twin = twin_after(rule)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert_bits(model.parameters(), twin.parameters())
    assert grads_of(model) == [None] * 4


def test_accumulation_clips_each_sum_so_far():
    model, twin, rule = model_of(), model_of(), ClipByNorm(0.05)
    clip_on_backward_(model, rule)
    for seed in range(3):
        loss_of(model, seed).backward()
    for seed in range(3):
        loss_of(twin, seed).backward()
        tritonclip.clip_(twin, rule)
    assert_bits(grads_of(model), grads_of(twin))


def test_retained_graph_adds_and_clips_again():
    model, rule = model_of(), ClipByValue(0.05)
    clip_on_backward_(model, rule)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    first = copies(grads_of(model))
    loss.backward()
    added = map(torch.add, first, grads_of(twin_after()))
    assert_bits(grads_of(model), [grad.clamp(-0.05, 0.05) for grad in added])


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpointed_segments_clip_once_a_parameter(reentrant):
    model, rule = model_of(), ClipByNorm(0.05)
    clip_on_backward_(model, rule)
    x = normal((3, 5)).requires_grad_()
    checkpoint = torch.utils.checkpoint.checkpoint_sequential
    checkpoint(model, 2, x, use_reentrant=reentrant).square().sum().backward()
    assert_bits(grads_of(model), grads_of(twin_after(rule)))


class Shared(torch.nn.Module):
    """One layer that is used twice."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 5, bias=False)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(2):
            if self.reentrant is None:
                x = self.layer(x)
            else:
                x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(
    ("reentrant", "arrivals"),
    [(None, 1), (False, 1), (True, 2)],
    ids=["plain", "saved", "reentrant"],
)
def test_shared_parameters_arrive_once_but_in_reentrant_checkpoints(reentrant, arrivals):
    torch.manual_seed(0)
    model, seen = Shared(reentrant), []
    clip_on_backward_(model, ClipByNorm(0.05))
    model.layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    model(normal((3, 5)).requires_grad_()).square().sum().backward()
    torch.testing.assert_close(torch.stack(seen), torch.full((arrivals,), 0.05), rtol=1e-4, atol=0)


def test_tied_parameters_are_clipped_once():
    weight = torch.nn.Parameter(normal((5, 5)))
    handle = clip_on_backward_([weight, weight], ClipByNorm(0.05))
    (normal((3, 5)) @ weight @ weight).sum().backward()
    assert weight.grad is not None
    assert float(weight.grad.norm()) == pytest.approx(0.05, rel=1e-4)
    assert len(handle._handles) == 1


def test_sparse_gradients_are_clipped():
    table = torch.nn.Embedding(6, 3, sparse=True)
    clip_on_backward_(table, ClipByNorm(0.05))
    (table(torch.tensor([1, 1, 4])) * 3).sum().backward()
    grad: Any = table.weight.grad
    assert grad.is_sparse
    assert float(grad.to_dense().norm()) == pytest.approx(0.05, rel=1e-4)


def test_parameters_without_need_of_clipping_are_left_alone():
    model = model_of()
    clip_on_backward_(model, ClipByNorm(0.0))
    model[0].bias.need_clip = False
    loss_of(model).backward()
    assert_bits([model[0].bias.grad], [twin_after()[0].bias.grad])
    assert not any(p.grad.any() for p in model.parameters() if p is not model[0].bias)


def test_model_moves_and_dies_with_its_hooks(monkeypatch):
    """torch.utils.swap_tensors refuses tensors that have weak references."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = model_of()
    loss_of(model).backward()
    handle = clip_on_backward_(model, ClipByNorm(1.0))
    model.double()
    assert {grad.dtype for grad in grads_of(model)} == {torch.float64}
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, handle
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * 4


def test_frozen_parameters_are_clipped_when_they_are_trained():
    model = model_of().requires_grad_(False)
    model[2].requires_grad_()
    clip_on_backward_(model, ClipByNorm(0.0))
    loss_of(model).backward()
    assert [grad is None for grad in grads_of(model)] == [True, True, False, False]
    model.requires_grad_()
    loss_of(model).backward()
    assert not any(grad.any() for grad in grads_of(model))


def test_nonfinite_gradients_follow_the_policy():
    model = model_of()
    clip_on_backward_(model, ClipByNorm(1.0), nonfinite="zero")
    (loss_of(model) * torch.inf).backward()
    assert not any(grad.any() for grad in grads_of(model))


def test_nonfinite_gradients_raise_with_their_name():
    model = model_of()
    clip_on_backward_(model, ClipByNorm(1.0), nonfinite="error")
    with pytest.raises(RuntimeError, match=r"2\.bias are non-finite"):
        (model[2].bias.sum() * torch.inf).backward()


def test_writes_count_as_versions():
    weight = torch.nn.Parameter(torch.ones(3))
    clip_on_backward_(weight, ClipByNorm(0.0))
    weight.grad = torch.zeros(3)
    before = weight.grad._version
    (weight * weight).sum().backward()
    # One for the sum, one for the clipping.
    assert weight.grad._version - before == 2


def test_plans_of_the_training_loop_stay():
    """One backward of a deep model would displace them all."""
    weights = [torch.nn.Parameter(torch.ones(size)) for size in range(1, 60)]
    clip_on_backward_(weights, ClipByNorm(1.0))
    before = list(plan_cache.plans._plans)
    for _ in range(2):
        sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    assert list(plan_cache.plans._plans) == before
    assert sum(plan.n_bytes for plan in plans._plans.values()) <= plan_cache.BUDGET


def test_two_rules_hold_in_order():
    weight = torch.nn.Parameter(torch.ones(4))
    clip_on_backward_(weight, ClipByValue(1.0))
    clip_on_backward_(weight, ClipByNorm(1.0))
    (weight * torch.tensor([9.0, 1.0, 1.0, 1.0])).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((4,), 0.5), rtol=1e-6, atol=0)


def test_integer_parameters_are_left_out():
    """Quantized layers have such, which never have a gradient."""
    model = model_of()
    model.codes = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    clip_on_backward_(model, ClipByNorm(0.0))
    loss_of(model).backward()
    assert [grad is None or bool(grad.any()) for grad in grads_of(model)] == [True] + [False] * 4


def test_copies_of_a_model_are_not_clipped():
    """As documented: a copy needs a call of its own."""
    model = model_of()
    clip_on_backward_(model, ClipByNorm(0.05))
    copied = copy.deepcopy(model)
    loss_of(copied).backward()
    assert_bits(grads_of(copied), grads_of(twin_after()))


@pytest.mark.covering(1)
@NEEDS_DYNAMO
@pytest.mark.plain_empty
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("traced", [False, True], ids=["eager-backward", "compiled-autograd"])
@pytest.mark.parametrize("rule", RULES)
def test_clip_on_backward_under_compile(rule, traced):
    model, x = torch.nn.Linear(5, 3), normal((4, 5))
    model(x).square().sum().backward()
    twins = [parameter_of(grad_of(p).clone()) for p in model.parameters()]
    model.zero_grad()
    clip_on_backward_(model, rule)
    with torch._dynamo.config.patch(compiled_autograd=traced):
        torch.compile(lambda x: model(x).square().sum().backward(), backend="aot_eager")(x)
    for twin in twins:
        tritonclip.clip_(twin, rule)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twins])


def given(parameters: Any) -> Any:
    return lambda model: clip_on_backward_(parameters, ClipByNorm(1.0))


def by_rule(rule: Any, **options: Any) -> Any:
    return lambda model: clip_on_backward_(model, rule, **options)


def with_module_mark(model: Any) -> None:
    model[2].need_clip = False
    clip_on_backward_(model, ClipByNorm(1.0))


def after_a_hook(model: Any) -> None:
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    clip_on_backward_(model, ClipByNorm(1.0))


EXPECTS = "clip_on_backward_ expects .*"
REFUSED: list[Refused] = [
    (ValueError, r"for p in module\.2\.parameters\(\): ", with_module_mark),
    (ValueError, r"^0\.weight have hooks .* register them again", after_a_hook),
    (
        ValueError,
        r"results of operators: parameters\[1\]; for these there",
        given([torch.ones(1), torch.ones(1, requires_grad=True) * 2]),
    ),
    (ValueError, "expected", given(())),
    (TypeError, "expected", given([1.0]), given("weight"), given(None)),
    (TypeError, f"{EXPECTS}a norm of all gradients", by_rule(1.0)),
    (
        TypeError,
        f"{EXPECTS}before the next one is known",
        by_rule(tritonclip.ClipByGlobalNorm(1.0)),
    ),
    (TypeError, rf"{EXPECTS}write ClipByNorm\(\.\.\.\)", by_rule(ClipByNorm)),
    (TypeError, f"{EXPECTS}got None of type NoneType", by_rule(None)),
    (TypeError, f"{EXPECTS}got True of type bool", by_rule(True)),
    (
        ValueError,
        "got 'skip'; only a ClippedOptimizer can skip",
        by_rule(ClipByNorm(1.0), nonfinite="skip"),
    ),
]


@each_refused(REFUSED)
def test_a_refused_call_leaves_no_hook(call, error, message):
    model = model_of()
    with pytest.raises(error, match=message):
        call(model)
    loss_of(model).backward()
    assert_bits(grads_of(model), grads_of(twin_after()))


def batch_of(rank: int) -> torch.Tensor:
    """Gradients of the second process are larger."""
    return normal((3, 5), seed=rank) * (1 + 3 * rank)


def grads_on_each(world: int) -> list[list[Any]]:
    """The gradients that the batches of all processes give, computed here."""
    grads = []
    for rank in range(world):
        model = model_of()
        model(batch_of(rank)).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    return grads


def clipped(grads: list[Any], rule: Any) -> list[Any]:
    parameters = [torch.nn.Parameter(grad) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    tritonclip.clip_(parameters, rule)
    return [p.grad for p in parameters]


def average(lists: list[list[Any]]) -> list[Any]:
    return [torch.stack(grads).mean(0) for grads in zip(*lists, strict=True)]


@pytest.mark.parametrize("views", [False, True], ids=["buckets", "bucket-views"])
@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_ddp_averages_what_each_process_has_clipped(rule, views):
    model = model_of()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    clip_on_backward_(model.parameters(), rule)
    for _ in range(2):
        ddp.zero_grad(set_to_none=not views)
        ddp(batch_of(dist.get_rank())).square().mean().backward()
    expected = average([clipped(grads, rule) for grads in grads_on_each(2)])
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_fully_sharded_gradients_are_clipped_after_their_average(rule):
    model = model_of()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    clip_on_backward_(model, rule)
    model(batch_of(dist.get_rank())).square().mean().backward()
    expected = clipped(average(grads_on_each(2)), rule)
    torch.testing.assert_close([p.grad.full_tensor() for p in model.parameters()], expected)


@in_processes(2)
def test_ddp_is_warned_of():
    ddp = DistributedDataParallel(model_of())
    for module in (ddp, torch.nn.Sequential(ddp)):
        with pytest.warns(UserWarning, match="averages gradients after they have arrived"):
            clip_on_backward_(module, ClipByNorm(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_on_backward_(ddp.parameters(), ClipByNorm(1.0))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
@in_processes(2)
def test_fsdp1_is_refused(use_orig_params):
    """It would call no hook of original parameters."""
    module = FullyShardedDataParallel(
        model_of(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    with pytest.raises(TypeError, match="those of FullyShardedDataParallel, which accumulates"):
        clip_on_backward_(module, ClipByNorm(1.0))
