"""FlatGradients in a training loop: the wrapper, scalers, autocast, checkpoints, compile, DDP.

The truth is the same run with gradients of their own.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

import tritonclip
from helpers import training
from helpers.cases import assert_bits, grad_of, unchanged
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
    model: torch.nn.Module, rule: Any, *, flat: bool = True, **options: Any
) -> ClippedOptimizer:
    held = FlatGradients(model) if flat else None
    return ClippedOptimizer(AdamW(model.parameters(), lr=0.01), rule, flat=held, **options)


def flat_of(optimizer: ClippedOptimizer) -> FlatGradients:
    assert optimizer.flat is not None
    return optimizer.flat


def trained(loss: Any = torch.sum, *, outside: bool = False, **options: Any) -> Any:
    """A model after one backward, its bias, and its optimizer.

    With `outside`, FlatGradients leave out that bias, and a frozen one.
    """
    model: Any = model_of()
    bias = model[0].bias
    if outside:
        bias.need_clip = False
        model[2].bias.requires_grad_(False)
    optimizer = optimizer_of(model, **{"rule": 1.0} | options)
    loss(model(torch.ones(4, 6))).backward()
    return model, bias, optimizer


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
    models, stats = [model_of(), model_of()], []
    for model, flat in zip(models, (True, False), strict=True):
        optimizer = optimizer_of(model, rule, flat=flat, nonfinite=nonfinite)
        train(model, optimizer, batches_a_step=accumulate)
        stats.append(optimizer.stats.summary())
        if flat:
            flat_of(optimizer).check()
    assert_close(*models)
    torch.testing.assert_close(*stats, equal_nan=True, **CLOSE)
    assert stats[0]["skipped_steps"] == (nonfinite == "skip") * accumulate


@RULES
@pytest.mark.parametrize("scaler", training.SCALERS)
def test_wrapper_trains_as_without_under_a_scaler(rule, scaler):
    ours, theirs = model_of(), model_of()
    train(ours, optimizer_of(ours, rule), scaler=scaler("cpu", init_scale=256.0))
    train(theirs, optimizer_of(theirs, rule, flat=False))
    assert_close(ours, theirs)


def test_zero_grad_of_the_wrapper_never_drops_a_view():
    model, _, optimizer = trained()
    optimizer.zero_grad(set_to_none=True)
    flat_of(optimizer).check()
    assert not any(grad_of(p).any() for p in model.parameters())


def test_zero_grad_of_the_model_is_noticed_at_the_step():
    model = model_of()
    optimizer = optimizer_of(model, 1.0)
    model.zero_grad()
    model(torch.ones(4, 6)).sum().backward()
    gone = pytest.raises(RuntimeError, match=r"no longer a view of FlatGradients")
    with unchanged(model.parameters()), gone:
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_outside_are_stepped_and_zeroed_but_not_clipped(set_to_none):
    _, bias, optimizer = trained(
        lambda y: y.square().sum(), outside=True, rule=1e-3, nonfinite="skip"
    )
    with unchanged([grad_of(bias)]):
        optimizer.step()
    optimizer.zero_grad(set_to_none)
    assert bias.grad is None if set_to_none else not bias.grad.any()
    assert optimizer.stats.clipped_steps == 1


def test_zero_grad_that_finds_a_lost_view_leaves_gradients_outside():
    model, bias, optimizer = trained(outside=True)
    model[2].weight.grad = None
    gone = pytest.raises(RuntimeError, match="no longer a view of FlatGradients")
    with unchanged([grad_of(bias)]), gone:
        optimizer.zero_grad()


@pytest.mark.parametrize("change", [list.reverse, list.pop])
def test_zero_grad_finds_parameters_outside_where_groups_have_changed(change):
    model = model_of()
    parameters = [*model.parameters()]
    parameters[-1].requires_grad_(False)
    optimizer = optimizer_of(model, 1.0)
    model(torch.ones(4, 6)).sum().backward()
    change(optimizer.param_groups[0]["params"])
    optimizer.zero_grad()
    flat_of(optimizer).check()
    assert not any(grad_of(p).any() for p in parameters[:-1])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients_outside_that_inference_mode_made(set_to_none):
    """They cannot be written."""
    _, bias, optimizer = trained(outside=True)
    with torch.inference_mode():
        grad = torch.ones(bias.shape)
    bias.grad = grad
    optimizer.zero_grad(set_to_none)
    assert bias.grad is None


def test_parameter_that_was_unfrozen_later_is_noticed():
    model = model_of()
    weight = model[0].weight  # type: ignore[index]
    weight.requires_grad_(False)
    optimizer = optimizer_of(model, 1.0)
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
    optimizer = optimizer_of(model, 1.0)
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
    def run(flat: bool) -> Any:
        model: Any = model_of()
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters()},
            {"params": [*model[2:].parameters()], "clip": ClipByValue(0.01)},
        ]
        held = FlatGradients(model) if flat else None
        train(model, ClippedOptimizer(SGD(groups, lr=0.1), 0.5, flat=held))
        return model

    assert_bits(run(True).parameters(), run(False).parameters())


def test_checkpoint_comes_back():
    model = model_of()
    optimizer = optimizer_of(model, 0.5)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)

    loaded = model_of(seed=1)
    again = optimizer_of(loaded, 0.5)
    saved = torch.load(file, weights_only=True)
    loaded.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    train(model, optimizer)
    train(loaded, again)
    assert_bits(loaded.parameters(), model.parameters())
    assert again.stats.summary() == optimizer.stats.summary()


def test_deepcopy_of_model_and_wrapper_trains_on():
    model = model_of()
    optimizer = optimizer_of(model, 0.5)
    train(model, optimizer)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer)
    train(twin, twin_optimizer)
    assert_bits(twin.parameters(), model.parameters())
    flat_of(twin_optimizer).check()


@pytest.mark.parametrize("flat", [False, True])
def test_deepcopy_of_the_wrapper_leaves_out_what_was_left_out(flat):
    """A copy of a parameter, as torch makes it, has lost the attribute."""
    model: Any = model_of()
    model[0].bias.need_clip = False
    optimizer = optimizer_of(model, 1e-5, flat=flat)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for one, stepped in ((model, optimizer), (twin, twin_optimizer)):
        one(torch.ones(4, 6)).square().sum().backward()
        stepped.step()
    assert grad_of(twin[0].bias).norm() > 1e-3
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
    message = rf"parameters\[{at}\].*a? ?[Nn]ew"
    noticed = pytest.raises((RuntimeError, ValueError), match=message)
    with unchanged([*now, now[at].grad]), noticed:
        optimizer.step()
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
    results = []
    for compile_ in (partial(torch.compile, backend="aot_eager", fullgraph=True), lambda f: f):
        model = model_of()
        flat = FlatGradients(model)
        model(torch.ones(4, 6)).square().sum().backward()
        norm = compile_(lambda: tritonclip.clip_(flat, rule))()  # noqa: B023
        results.append([norm, *map(grad_of, model.parameters())])
        flat.check()
    torch.testing.assert_close(*results, **CLOSE)


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
    optimizer = optimizer_of(model, 1.0)
    optimizer.optimizer.add_param_group({"params": more.parameters()})
    model(torch.ones(4, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"lacks param_groups\[1\]\['params'\]\[0\]"):
        optimizer.step()
