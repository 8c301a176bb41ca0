"""Rules that parameter groups carry under the key `clip`: read, and kept out of checkpoints."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from tritonclip.rules import Rule, as_rule


def rule_of(number: int, group: Mapping[str, Any]) -> Rule | None:
    """The rule that a parameter group carries under `clip`; None leaves the group alone.

    Raises:
        TypeError, ValueError: what is no rule, and in which group.
    """
    clip = group["clip"]
    try:
        return None if clip is None else as_rule(clip)
    except (TypeError, ValueError) as error:
        raise type(error)(f"param_groups[{number}]['clip']: {error}; None clips nothing") from None


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
