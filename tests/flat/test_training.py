"""FlatGradients in a training loop: the wrapper, scalers, autocast, checkpoints, compile, DDP.

The truth is the same run with gradients of their own.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

import tritonclip
from helpers import training
from helpers.cases import assert_bits, copies, grad_of
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer, FlatGradients

RULES = pytest.mark.parametrize(
    "rule",
    [ClipByGlobalNorm(0.5), ClipByNorm(0.2), ClipByValue(0.02)],
    ids=["global", "by-norm", "value"],
)
# The norm is added up in another order: one rounding of a float32 a step, and what it grows to.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5), torch.nn.LayerNorm(5)
    )


def batches(n: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        yield torch.randn(4, 6, generator=generator)


def optimizer_of(
    model: torch.nn.Module, rule: Any, *, flat: bool, **options: Any
) -> ClippedOptimizer:
    return ClippedOptimizer(
        AdamW(model.parameters(), lr=0.01),
        rule,
        flat=FlatGradients(model) if flat else None,
        **options,
    )


def train(
    model: torch.nn.Module, optimizer: ClippedOptimizer, batches_a_step: int = 1, **options: Any
) -> None:
    """Six steps; the third batch of each six is NaN for those that skip."""

    def losses() -> Iterator[Tensor]:
        for number, batch in enumerate(batches(6 * batches_a_step), 1):
            spoiled = optimizer.nonfinite == "skip" and number % 6 == 3
            yield model(batch).square().sum() * (math.nan if spoiled else 1.0)

    training.train(optimizer, losses(), accumulate=batches_a_step, **options)


def assert_close(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], **CLOSE)


@RULES
@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "skip", "error"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_wrapper_trains_as_without(rule, nonfinite, accumulate):
    ours, theirs = model_of(), model_of()
    one = optimizer_of(ours, rule, flat=True, nonfinite=nonfinite)
    other = optimizer_of(theirs, rule, flat=False, nonfinite=nonfinite)
    train(ours, one, batches_a_step=accumulate)
    train(theirs, other, batches_a_step=accumulate)
    assert_close(ours, theirs)
    assert one.flat is not None
    one.flat.check()
    torch.testing.assert_close(one.stats.summary(), other.stats.summary(), equal_nan=True, **CLOSE)
    assert one.stats.summary()["skipped_steps"] == (nonfinite == "skip") * (
        1 if accumulate == 1 else 3
    )


@RULES
@pytest.mark.parametrize("scaler", training.SCALERS)
def test_wrapper_trains_as_without_under_a_scaler(rule, scaler):
    ours, theirs = model_of(), model_of()
    train(ours, optimizer_of(ours, rule, flat=True), scaler=scaler("cpu", init_scale=256.0))
    train(theirs, optimizer_of(theirs, rule, flat=False))
    assert_close(ours, theirs)


def test_zero_grad_of_the_wrapper_never_drops_a_view():
    model = model_of()
    optimizer = optimizer_of(model, 1.0, flat=True)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.zero_grad(set_to_none=True)
    assert optimizer.flat is not None
    optimizer.flat.check()
    assert not any(grad_of(p).any() for p in model.parameters())


def test_zero_grad_of_the_model_is_noticed_at_the_step():
    model = model_of()
    optimizer = optimizer_of(model, 1.0, flat=True)
    model.zero_grad()
    model(torch.ones(4, 6)).sum().backward()
    before = copies(model.parameters())
    with pytest.raises(RuntimeError, match=r"no longer a view of FlatGradients"):
        optimizer.step()
    assert_bits(model.parameters(), before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_outside_are_stepped_and_zeroed_but_not_clipped(set_to_none):
    model = model_of()
    bias = model[0].bias  # type: ignore[index]
    bias.need_clip = False
    model[2].weight.requires_grad_(False)  # type: ignore[index]
    optimizer = optimizer_of(model, 1e-3, flat=True, nonfinite="skip")
    model(torch.ones(4, 6)).square().sum().backward()
    outside = grad_of(bias).clone()
    optimizer.step()
    assert_bits([grad_of(bias)], [outside])
    optimizer.zero_grad(set_to_none)
    assert bias.grad is None if set_to_none else not bias.grad.any()
    assert optimizer.stats.clipped_steps == 1


def test_zero_grad_that_finds_a_lost_view_leaves_gradients_outside():
    model = model_of()
    bias = model[0].bias  # type: ignore[index]
    bias.need_clip = False
    optimizer = optimizer_of(model, 1.0, flat=True)
    model(torch.ones(4, 6)).sum().backward()
    outside = grad_of(bias).clone()
    model[2].weight.grad = None  # type: ignore[index]
    with pytest.raises(RuntimeError, match="no longer a view of FlatGradients"):
        optimizer.zero_grad()
    assert_bits([grad_of(bias)], [outside])


@pytest.mark.parametrize("change", [list.reverse, list.pop])
def test_zero_grad_finds_parameters_outside_where_groups_have_changed(change):
    model = model_of()
    parameters = [*model.parameters()]
    parameters[-1].requires_grad_(False)
    optimizer = optimizer_of(model, 1.0, flat=True)
    model(torch.ones(4, 6)).sum().backward()
    change(optimizer.param_groups[0]["params"])
    optimizer.zero_grad()
    assert optimizer.flat is not None
    optimizer.flat.check()
    assert not any(grad_of(p).any() for p in parameters[:-1])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients_outside_that_inference_mode_made(set_to_none):
    """They cannot be written."""
    model = model_of()
    bias = model[0].bias  # type: ignore[index]
    bias.need_clip = False
    optimizer = optimizer_of(model, 1.0, flat=True)
    with torch.inference_mode():
        grad = torch.ones(bias.shape)
    bias.grad = grad
    optimizer.zero_grad(set_to_none)
    assert bias.grad is None


def test_parameter_that_was_unfrozen_later_is_noticed():
    model = model_of()
    weight = model[0].weight  # type: ignore[index]
    weight.requires_grad_(False)
    optimizer = optimizer_of(model, 1.0, flat=True)
    weight.requires_grad_(True)
    model(torch.ones(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"\['params'\]\[0\] has a gradient, but was left out"):
        optimizer.step()
    optimizer.flat = FlatGradients(model)
    optimizer.step()
    assert optimizer.stats.steps == 1


def test_flat_of_other_parameters_is_refused():
    model, other = model_of(), model_of()
    inner = SGD(model.parameters())
    with pytest.raises(ValueError, match=r"holds 0\.weight, .*, which the optimizer does not"):
        ClippedOptimizer(inner, 1.0, flat=FlatGradients(other))
    with pytest.raises(ValueError, match=r"lacks param_groups\[0\]\['params'\]\[0\], .* updates"):
        ClippedOptimizer(inner, 1.0, flat=FlatGradients(list(model.parameters())[1:]))
    with pytest.raises(TypeError, match="flat must be a FlatGradients or None, got int"):
        ClippedOptimizer(inner, 1.0, flat=3)  # type: ignore[arg-type]
    # What was refused does not count as a wrapper.
    ClippedOptimizer(inner, 1.0)


def test_group_is_added_with_a_new_one():
    model, more = model_of(), torch.nn.Linear(2, 2)
    optimizer = optimizer_of(model, 1.0, flat=True)
    with pytest.raises(ValueError, match="set flat to None, add the group, and set flat to a new"):
        optimizer.add_param_group({"params": more.parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.flat = None
    optimizer.add_param_group({"params": more.parameters()})
    optimizer.flat = FlatGradients([*model.parameters(), *more.parameters()])
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    assert optimizer.stats.steps == 1


def test_groups_with_rules_of_their_own_keep_them():
    def run(flat: bool) -> torch.nn.Module:
        model = model_of()
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters()},  # type: ignore[index]
            {"params": [*model[2:].parameters()], "clip": ClipByValue(0.01)},  # type: ignore[index]
        ]
        optimizer = ClippedOptimizer(
            SGD(groups, lr=0.1), 0.5, flat=FlatGradients(model) if flat else None
        )
        train(model, optimizer)
        return model

    assert_bits(run(True).parameters(), run(False).parameters())


def test_checkpoint_comes_back():
    model = model_of()
    optimizer = optimizer_of(model, 0.5, flat=True)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)

    loaded = model_of(seed=1)
    again = optimizer_of(loaded, 0.5, flat=True)
    saved = torch.load(file, weights_only=True)
    loaded.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    train(model, optimizer)
    train(loaded, again)
    assert_bits(loaded.parameters(), model.parameters())
    assert again.stats.summary() == optimizer.stats.summary()


def test_deepcopy_of_model_and_wrapper_trains_on():
    model = model_of()
    optimizer = optimizer_of(model, 0.5, flat=True)
    train(model, optimizer)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer)
    train(twin, twin_optimizer)
    assert_bits(twin.parameters(), model.parameters())
    assert twin_optimizer.flat is not None
    twin_optimizer.flat.check()


@pytest.mark.parametrize("flat", [False, True])
def test_deepcopy_of_the_wrapper_leaves_out_what_was_left_out(flat):
    """A copy of a parameter, as torch makes it, has lost the attribute."""
    model = model_of()
    bias = model[0].bias  # type: ignore[index]
    bias.need_clip = False
    optimizer = optimizer_of(model, 1e-5, flat=flat)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for one, stepped in ((model, optimizer), (twin, twin_optimizer)):
        one(torch.ones(4, 6)).square().sum().backward()
        stepped.step()
    assert grad_of(twin[0].bias).norm() > 1e-3  # type: ignore[index]
    assert_bits(map(grad_of, twin.parameters()), map(grad_of, model.parameters()))
    assert_bits(twin.parameters(), model.parameters())


def _densify(optimizer: ClippedOptimizer, at: int) -> Any:
    """Puts a new parameter in the place of another, with its state, as Gaussian splatting does."""
    (group,) = optimizer.param_groups
    old = group["params"][at]
    group["params"][at] = torch.nn.Parameter(old.detach().clone())
    optimizer.state[group["params"][at]] = optimizer.state.pop(old, {})
    return old


@pytest.mark.parametrize("at", [0, 31, 59])
@pytest.mark.parametrize("kept", [False, True], ids=["gone", "kept"])
def test_parameter_that_was_replaced_in_a_group_is_noticed_at_the_next_step(kept, at):
    params: list[Any] = [torch.nn.Parameter(torch.full((2,), float(i))) for i in range(60)]
    optimizer = ClippedOptimizer(AdamW(params, lr=0.1), 0.5, flat=FlatGradients(params))
    optimizer.step()
    old = _densify(optimizer, at)
    if not kept:
        del old, params
    now = optimizer.param_groups[0]["params"]
    now[at].grad = torch.tensor([3.0, 4.0])
    before = copies(now)
    with pytest.raises((RuntimeError, ValueError), match=rf"parameters\[{at}\].*a? ?[Nn]ew"):
        optimizer.step()
    assert_bits(now, before)
    assert grad_of(now[at]).tolist() == [3.0, 4.0]
    optimizer.flat = FlatGradients(now)
    optimizer.step()
    assert optimizer.stats.last_norm == 5


def test_sparse_embedding_adds_to_its_dense_view():
    table = torch.nn.Embedding(10, 3, sparse=True)
    flat = FlatGradients(table)
    table(torch.tensor([1, 1, 4])).sum().backward()
    flat.check()
    assert grad_of(table.weight).sum(1).tolist() == [0, 6, 0, 0, 3, 0, 0, 0, 0, 0]


@RULES
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_call_equals_eager(rule):
    ours, theirs = model_of(), model_of()
    flats = [FlatGradients(ours), FlatGradients(theirs)]
    for model in (ours, theirs):
        model(torch.ones(4, 6)).square().sum().backward()
    compiled = torch.compile(
        lambda: tritonclip.clip_(flats[0], rule), backend="aot_eager", fullgraph=True
    )
    norm, expected = compiled(), tritonclip.clip_(flats[1], rule)
    torch.testing.assert_close(norm, expected, **CLOSE)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(grad_of(one), grad_of(other), **CLOSE)
    flats[0].check()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_norm_and_zero_equal_eager():
    model = model_of()
    flat = FlatGradients(model)
    model(torch.ones(4, 6)).square().sum().backward()
    expected = tritonclip.get_total_norm(flat)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def norm_and_zero() -> Tensor:
        norm = tritonclip.get_total_norm(flat)
        flat.zero_()
        return norm

    torch.testing.assert_close(norm_and_zero(), expected, **CLOSE)
    assert not any(grad_of(p).any() for p in model.parameters())
    flat.check()


def test_group_added_behind_the_wrapper_is_noticed():
    model, more = model_of(), torch.nn.Linear(2, 2)
    optimizer = optimizer_of(model, 1.0, flat=True)
    optimizer.optimizer.add_param_group({"params": more.parameters()})
    model(torch.ones(4, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"lacks param_groups\[1\]\['params'\]\[0\]"):
        optimizer.step()
