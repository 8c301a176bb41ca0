"""State to load into, and groups as they are saved, for `torch.distributed.checkpoint`.

Its functions know an optimizer by `state`, `param_groups` and `state_dict` only. They fill an empty
state by a step, unless a gradient is there; of `state_dict` they carry the state and the groups.
"""

import io
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonclip.modes import without_grad
from tritonclip.optim.misuse import opened
from tritonclip.optim.param_groups import Groups

# The key of the wrapper's own part: statistics, the states of rules, the recorder's step.
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


@without_grad
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
        with opened(optimizer):
            optimizer.step()
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for group, rate in zip([g for g in groups if "lr" in g], rates, strict=True):
            group["lr"] = rate


def saved_groups(groups: Groups) -> list[dict[str, Any]]:
    """Groups with the keys of a checkpoint: without rules, with the wrapper's part."""
    return [
        {STATS_KEY: None, **{key: value for key, value in group.items() if key != "clip"}}
        for group in groups
    ]


def without_rules(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without the rules of groups: the program has them, and torch would not load."""
    groups = [{k: v for k, v in g.items() if k != "clip"} for g in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def with_present_rules(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with the rules that the groups have now."""
    saved = without_rules(optimizer, state_dict)["param_groups"]
    present = [{"clip": g["clip"]} if "clip" in g else {} for g in optimizer.param_groups]
    groups = [{**g, **clip} for g, clip in zip(saved, present, strict=False)]
    # Where the numbers differ, the optimizer has the message.
    return {**state_dict, "param_groups": groups + saved[len(groups) :]}


def keep_rules_out_(optimizer: Optimizer) -> None:
    """Makes checkpoints of an optimizer, taken past its wrapper, those of one without rules."""
    if without_rules not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(without_rules)
        optimizer.register_load_state_dict_pre_hook(with_present_rules)


def with_own(state_dict: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with the wrapper's own part in its groups, as bytes."""
    # torch compares the values of a group's parameters: those of bytes, where a NaN equals itself.
    buffer = io.BytesIO()
    torch.save(own, buffer)
    groups = [{**group, STATS_KEY: buffer.getvalue()} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def split_own(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A checkpoint without the wrapper's own part, and this; empty where there is none.

    Raises:
        ValueError: what is no checkpoint of an optimizer.
    """
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    if not (isinstance(groups, list) and all(isinstance(g, dict) for g in groups)):
        raise ValueError(
            "expected the result of state_dict() of a ClippedOptimizer or of the wrapped one: a "
            f"dict with param_groups, a list of dicts, got {state_dict!r:.80}"
        )
    found = [group[STATS_KEY] for group in groups if STATS_KEY in group]
    groups = [{k: v for k, v in group.items() if k != STATS_KEY} for group in groups]
    own = state_dict.get(STATS_KEY, {})
    if found and found[0] is not None:
        try:
            own = torch.load(io.BytesIO(found[0]), map_location="cpu", weights_only=True)
        except Exception as error:
            # Whatever damaged bytes raise.
            raise ValueError(
                f"the entry {STATS_KEY!r} of a parameter group must be bytes that state_dict() "
                f"saved, got {found[0]!r:.40}, which cannot be read. Nothing was loaded"
            ) from error
    rest = {key: value for key, value in state_dict.items() if key != STATS_KEY}
    return {**rest, "param_groups": groups}, own
