"""Closures that one process is refused: every process raises, or none of the others has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from helpers.processes import in_processes
from helpers.refusing import check_nobody_waits, check_raises, is_first, named_parameters
from helpers.spread import assert_same_everywhere, collectives_of, mesh_of, values, whole
from tritonclip import ClippedOptimizer

INNERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=3),
}


def _closure(named: dict[str, Any], *, returns: bool) -> Callable[[], Any]:
    """Gives gradients as an evaluation does; forgets the loss in one process."""

    def evaluate() -> Any:
        for one in named.values():
            one.grad = one.grad.clone()
        return torch.ones(()) if returns else None

    return evaluate


@pytest.mark.parametrize("policy", ["propagate", "zero", "error", "skip"])
@pytest.mark.parametrize("inner", INNERS)
@in_processes(2)
def test_closure_without_a_loss_in_one_process_raises_everywhere(inner: str, policy: Any) -> None:
    named = named_parameters()
    # torch has no fused step of DTensors beside plain tensors.
    named.pop("plain")
    optimizer = ClippedOptimizer(INNERS[inner](named.values()), 0.5, nonfinite=policy)
    closure = _closure(named, returns=not is_first())
    before = [whole(one.detach()).clone() for one in named.values()]
    check_raises(lambda: optimizer.step(closure), TypeError, "return loss", [])
    for one, was in zip(named.values(), before, strict=True):
        assert torch.equal(whole(one.detach()), was)
    optimizer.step(_closure(named, returns=True))
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("policy", ["propagate", "skip"])
@in_processes(2)
def test_lbfgs_without_a_loss_in_one_process_raises_everywhere(policy: Any) -> None:
    """Where a trainer's closure left the gradients as they were."""
    named = named_parameters()
    optimizer = ClippedOptimizer(INNERS["LBFGS"](named.values()), 0.5, nonfinite=policy)
    loss = None if is_first() else torch.ones(())
    grads = [one.grad for one in named.values()]
    check_raises(lambda: optimizer.step(lambda: loss), TypeError, "LBFGS needs a closure", grads)


@pytest.mark.parametrize("policy", ["error", "skip"])
@in_processes(2)
def test_closure_without_a_loss_leaves_nobody_waiting_on_an_accelerator(policy: Any) -> None:
    named = named_parameters()
    optimizer = ClippedOptimizer(INNERS["SGD"](named.values()), 0.5, nonfinite=policy)
    closure = _closure(named, returns=not is_first())
    check_nobody_waits(lambda: optimizer.step(closure), TypeError, "return loss", policy)


@in_processes(2)
def test_lbfgs_without_a_closure_in_one_process_sends_nothing() -> None:
    """The others evaluate theirs, whose first collective waits until the call is mended."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    fully_shard(model, mesh=mesh_of(-1))
    optimizer = ClippedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), 0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(values((4, 6), dist.get_rank())).square().mean()
        loss.backward()
        return loss

    def refused() -> None:
        with pytest.raises(TypeError, match=r"expected step\(closure\)"):
            optimizer.step()

    if is_first():
        _, n = collectives_of(refused)
        assert n == 0
    optimizer.step(closure)
    assert_same_everywhere(optimizer.stats.last_norm)
    for one in model.parameters():
        assert_same_everywhere(whole(one.detach()))
