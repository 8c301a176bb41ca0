"""Rules that parameter groups carry under the key `clip`: read, and kept out of checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from tritonclip.rules import Rule, as_rule

Groups = Sequence[Mapping[str, Any]]

# What users may write in its place, unless it is an option of the optimizer's own.
_LOOKALIKES = frozenset({"clips", "clipping", "clip_grad", "clip_norm", "clip_value", "grad_clip"})
_LOOKALIKES |= {"max_norm", "max_grad_norm", "need_clip"}


def check_group(number: int, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuses a group whose `clip` is no rule, or that may have meant it by another key.

    Raises:
        TypeError, ValueError: what was found, and in which group.
    """
    if "clip" in options:
        raise ValueError(
            "the optimizer has an option 'clip' of its own, the key under which a group's rule is "
            "looked for; expected an optimizer without: clip by clip_ before its step"
        )
    strange = sorted(_LOOKALIKES.intersection(group) - set(options))
    if strange:
        raise ValueError(
            f"param_groups[{number}] has the unknown key {strange[0]!r}. A group's rule is its key "
            "'clip', where None leaves the group alone; need_clip = False is an attribute of a "
            "parameter"
        )
    if "clip" in group:
        rule_of(number, group)


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
