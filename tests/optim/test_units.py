"""ClippedOptimizer with a rule by unit: steps, statistics, scalers, policies and copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import NoHostRead, copies
from helpers.units import assert_clipped, expected
from tritonclip import ClipByUnitNorm, ClippedOptimizer


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 6)).square().sum()
    return loss


def grads(model: torch.nn.Module) -> list[torch.Tensor]:
    return copies(p.grad for p in model.parameters() if p.grad is not None)


def evaluated(
    make_rule: Any, lr: float = 0.1
) -> tuple[torch.nn.Sequential, ClippedOptimizer, list[torch.Tensor]]:
    """A model after backward, its optimizer under the rule made of it, and its gradients."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = ClippedOptimizer(inner, make_rule(model))
    loss_of(model).backward()
    return model, optimizer, grads(model)


def test_step_clips_each_unit_and_leaves_what_is_excluded():
    model, optimizer, before = evaluated(lambda model: ClipByUnitNorm(0.01, exclude=model[2]), 0.0)
    rule: Any = optimizer.clip
    optimizer.step()
    for i, (one, grad) in enumerate(zip(model.parameters(), before, strict=True)):
        assert one.grad is not None
        if i < 2:
            assert_clipped(one.grad, expected(grad, one, rule))
        else:
            assert torch.equal(one.grad, grad)


def test_step_refuses_to_exclude_parameters_of_another_model():
    other = make_model()
    model, optimizer, before = evaluated(lambda _: ClipByUnitNorm(0.01, exclude=other[2]))
    before += copies(model.parameters())
    with pytest.raises(ValueError, match="none of which is among the 4"):
        optimizer.step()
    now = [*grads(model), *model.parameters()]
    assert all(map(torch.equal, now, before))


def test_a_rule_of_groups_may_exclude_parameters_of_one_of_them():
    model = make_model()
    rule = ClipByUnitNorm(0.0, exclude=model[2])
    groups = [{"params": layer.parameters(), "clip": rule} for layer in (model[0], model[2])]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0)
    loss_of(model).backward()
    optimizer.step()
    assert [bool(grad.any()) for grad in grads(model)] == [False, False, True, True]


def test_stats_have_the_least_coefficient_of_all_units():
    rule = ClipByUnitNorm(0.01)
    model, optimizer, before = evaluated(lambda _: rule, 0.0)
    least = min(
        float((torch.from_numpy(expected(g, p, rule)) / g.double()).nan_to_num(nan=1.0).min())
        for g, p in zip(before, model.parameters(), strict=True)
    )
    optimizer.step()
    stats = optimizer.stats.summary()
    assert stats["coefficient"] == pytest.approx(least, rel=1e-5)
    assert stats["norm"] == pytest.approx(max(float(g.norm()) for g in before), rel=1e-6)
    assert (stats["clipped_steps"], stats["clipped_share"]) == (1, 1.0)


def test_a_step_within_all_limits_is_not_counted_as_clipped():
    _, optimizer, _ = evaluated(lambda _: ClipByUnitNorm(1e6))
    optimizer.step()
    stats = optimizer.stats.summary()
    assert (stats["steps"], stats["clipped_steps"], stats["coefficient"]) == (1, 0, 1.0)


def test_parameter_groups_may_have_rules_by_unit():
    model = make_model()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "clip": ClipByUnitNorm(0.001)},
        {"params": model[2].parameters()},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1e9)
    loss_of(model).backward()
    before, weights = grads(model), copies(model.parameters())
    optimizer.step()
    after = grads(model)
    assert_clipped(after[0], expected(before[0], weights[0], ClipByUnitNorm(0.001)))
    assert torch.equal(after[2], before[2])
    assert optimizer.stats.group_coefficients[0] < 1
    assert optimizer.stats.last_coefficient == 1


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, tritonclip.GradScaler])
def test_scaler_unscales_before_the_comparison_also_what_is_excluded(kind):
    plain, scaled = make_model(), make_model()
    for model, scaler in ((plain, None), (scaled, kind("cpu", init_scale=1024.0))):
        rule = ClipByUnitNorm(0.01, exclude=model[2])
        optimizer = ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule)
        for _ in range(3):
            optimizer.zero_grad()
            if scaler is None:
                loss_of(model).backward()
                optimizer.step()
            else:
                scaler.scale(loss_of(model)).backward()
                scaler.step(optimizer)
                scaler.update()
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("together", [True, False], ids=["with-model", "alone"])
def test_copied_optimizer_excludes_the_parameters_of_the_copy(together):
    model = make_model()
    rule = ClipByUnitNorm(0.0, exclude=model[2])
    optimizer = ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule)
    _, twin = copy.deepcopy((model if together else None, optimizer))
    members = twin.param_groups[0]["params"]
    for one in members:
        one.grad = torch.ones_like(one)
    twin.step()
    assert [bool(one.grad.any()) for one in members] == [False, False, True, True]


def test_step_waits_for_no_device(backend):
    if backend.host_decides:
        pytest.skip("a CPU is not waited for")
    model = make_model().to(backend.device)
    rule = ClipByUnitNorm(0.01, exclude=model[2])
    optimizer = ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule)
    model(torch.ones(4, 6, device=backend.device)).square().sum().backward()
    optimizer.step()
    with NoHostRead():
        optimizer.step()
    assert optimizer.stats.summary()["clipped_steps"] == 2
