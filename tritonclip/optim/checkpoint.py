"""What `torch.distributed.checkpoint` needs: state to load into, and groups as they are saved.

Its functions know an optimizer by `state`, `param_groups` and `state_dict` only. They fill an empty
state by a step, unless a gradient is there; of `state_dict` they carry the state and the groups.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonclip.optim.param_groups import Groups

# Under this key the statistics stand in each group of such a checkpoint.
STATS_KEY = "tritonclip"


def filled_state(optimizer: Optimizer) -> defaultdict[Tensor, Any]:
    """The state, filled where it was empty; never false, for an optimizer that has none.

    As torch does it: by a step with a learning rate of 0 and gradients of 0. The values serve as
    memory to load into. Gradients stay as they are, also views of FlatGradients.
    """
    if not optimizer.state:
        _fill_(optimizer)
    if optimizer.state:
        return optimizer.state
    return defaultdict(dict, {torch.empty(0, device="cpu"): {}})


@torch.no_grad()
def _fill_(optimizer: Optimizer) -> None:
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups if "lr" in group]
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    grads = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in groups:
            if "lr" in group:
                rate = group["lr"]
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for group, rate in zip([g for g in groups if "lr" in g], rates, strict=True):
            group["lr"] = rate


def saved_groups(groups: Groups) -> list[dict[str, Any]]:
    """Groups with the keys that they have in a checkpoint: without rules, with statistics."""
    return [
        {STATS_KEY: None, **{key: value for key, value in group.items() if key != "clip"}}
        for group in groups
    ]


def with_stats(state_dict: dict[str, Any], numbers: Sequence[float]) -> dict[str, Any]:
    """A checkpoint with the statistics in its groups, as plain numbers."""
    groups = [{**group, STATS_KEY: list(numbers)} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def split_stats(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Sequence[float] | None]:
    """A checkpoint without the statistics in its groups, and these."""
    groups = state_dict["param_groups"]
    found = [group[STATS_KEY] for group in groups if STATS_KEY in group]
    if not found:
        return state_dict, None
    groups = [{k: v for k, v in group.items() if k != STATS_KEY} for group in groups]
    return {**state_dict, "param_groups": groups}, found[0]
