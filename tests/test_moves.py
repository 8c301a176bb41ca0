"""A model moves after calls: torch.utils.swap_tensors refuses tensors that have weak references."""

import gc
import weakref
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import grad_of
from tritonclip import (
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByUnitNorm,
    ClippedOptimizer,
    ClipState,
    Outlier,
)

OWN = ClipByOwnHistory(warmup=1, max_norm=9.0)
ADAPTIVE = {
    "quantile": ClipByQuantile(0.9),
    "zscore": tritonclip.ClipByZScore(),
    "own-history": OWN,
    "own-quantile": ClipByOwnQuantile(0.9),
}


@pytest.fixture
def swaps(monkeypatch):
    """Modules move as those of FSDP2 and torchao do."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)


def model_of() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def backward(model: Any) -> None:
    dtype = next(model.parameters()).dtype
    (model(torch.ones(2, 3, dtype=dtype)) ** 2).sum().backward()


def by_step(rule: Any) -> Any:
    def keep(model: Any) -> Any:
        inner = torch.optim.AdamW(model.parameters())
        optimizer = ClippedOptimizer(inner, rule, skip_above=Outlier())
        optimizer.step()
        return optimizer

    return keep


def by_call(rule: Any) -> Any:
    def keep(model: Any) -> Any:
        state = ClipState()
        tritonclip.clip_(model, rule, state=None if rule.fixed else state)
        return state

    return keep


def found_nothing(model: Any) -> None:
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    tritonclip.clip_(model, 1.0)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad


def recorded(model: Any) -> Any:
    optimizer = ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)
    optimizer.step(lambda: None)
    return optimizer, optimizer.state_dict(), tritonclip.norms_by_name(model)


KEEPING: dict[str, Any] = {
    **{f"step-{name}": by_step(rule) for name, rule in ADAPTIVE.items()},
    **{f"state-{name}": by_call(rule) for name, rule in ADAPTIVE.items()},
    "step-unit": by_step(ClipByUnitNorm(0.01)),
    "call-unit": by_call(ClipByUnitNorm(0.01)),
    "number": lambda m: tritonclip.clip_(m, 1.0),
    "by-norm": lambda m: tritonclip.clip_(m.parameters(), ClipByNorm(1.0)),
    "no-gradient": found_nothing,
    "closure": recorded,
}


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING)
def test_model_moves_after_a_call(swaps, keep):
    model = model_of()
    backward(model)
    kept = keep(model)
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {grad_of(p).dtype for p in model.parameters()} == {torch.float64}
    model.cpu()
    del kept


@pytest.mark.parametrize("rule", ADAPTIVE.values(), ids=ADAPTIVE)
def test_histories_follow_moved_parameters(swaps, rule):
    moved, stays = model_of(), model_of()
    made = [ClippedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), rule) for m in (moved, stays)]
    for step in range(4):
        for model, optimizer in zip((moved, stays), made, strict=True):
            optimizer.zero_grad()
            backward(model)
            for parameter in model.parameters():
                grad_of(parameter).mul_(1 + step)
            optimizer.step()
        moved.to(torch.float64).to(torch.float32)
    ours, theirs = (optimizer.state_dict()["tritonclip"]["memory"] for optimizer in made)
    assert ours.keys() == theirs.keys()
    for owner, saved in ours.items():
        torch.testing.assert_close(
            saved["values"], theirs[owner]["values"], rtol=1e-6, atol=0.0, equal_nan=True
        )


def test_state_follows_a_moved_list(swaps):
    model, state = model_of(), ClipState()
    for _ in range(2):
        backward(model)
        tritonclip.clip_(model, OWN, state=state)
        model.double()
    assert state.steps == 2


@pytest.mark.parametrize("use", KEEPING.values(), ids=KEEPING)
def test_model_dies_with_what_knows_it(use):
    model = model_of()
    backward(model)
    use(model)
    gone = {name: weakref.ref(p) for name, p in model.named_parameters()}
    del model
    gc.collect()
    # A list without a gradient is known by its smallest parameter.
    left = ["0.weight", "0.bias", "1.weight"] if use is KEEPING["no-gradient"] else list(gone)
    assert {name: weak() for name, weak in gone.items() if name in left} == dict.fromkeys(left)
