"""``clip_on_backward_`` clips each gradient when backward has accumulated it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits, copies, grad_of, normal
from helpers.cases import parameter as parameter_of
from helpers.graphs import NEEDS_DYNAMO
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


def test_marks_on_modules_are_refused():
    model = model_of()
    model[2].need_clip = False
    with pytest.raises(ValueError, match=r"for p in module\.2\.parameters\(\): "):
        clip_on_backward_(model, ClipByNorm(1.0))


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


def test_earlier_hooks_are_refused():
    model = model_of()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"^0\.weight have hooks .* register them again"):
        clip_on_backward_(model, ClipByNorm(1.0))
    loss_of(model).backward()
    assert float(model[2].weight.grad.norm()) > 1.0


def test_results_of_operators_are_refused():
    with pytest.raises(ValueError, match=r"results of operators: parameters\[1\]; for these there"):
        clip_on_backward_([torch.ones(1), torch.ones(1, requires_grad=True) * 2], ClipByNorm(1.0))


@pytest.mark.parametrize(
    ("parameters", "error"),
    [((), ValueError), ([1.0], TypeError), ("weight", TypeError), (None, TypeError)],
    ids=["none", "number", "text", "nothing"],
)
def test_other_parameters_are_refused(parameters, error):
    with pytest.raises(error, match="expected"):
        clip_on_backward_(parameters, ClipByNorm(1.0))


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


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (1.0, "a norm of all gradients"),
        (tritonclip.ClipByGlobalNorm(1.0), "before the next one is known"),
        (ClipByNorm, r"write ClipByNorm\(\.\.\.\)"),
        (None, "got None of type NoneType"),
        (True, "got True of type bool"),
    ],
    ids=["number", "global", "class", "none", "bool"],
)
def test_rules_for_several_gradients_are_refused(rule, message):
    with pytest.raises(TypeError, match=rf"clip_on_backward_ expects .*{message}"):
        clip_on_backward_(model_of(), rule)


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="got 'skip'; only a ClippedOptimizer can skip"):
        clip_on_backward_(model_of(), ClipByNorm(1.0), nonfinite="skip")
