"""Parameter groups: the rules that they carry under the key `clip`, and what stands in them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tritonclip.rules import ClipByGlobalNorm, Rule, as_rule, known_rule

Groups = Sequence[Mapping[str, Any]]
# Rules of parameter groups, by index: of those that have the key; None clips nothing.
OwnRules = Mapping[int, Rule | None]


def refuse_differentiable(number: int, group: Mapping[str, Any]) -> None:
    """ValueError for a group whose update is to be differentiated: clipping records no graph."""
    if group.get("differentiable"):
        raise ValueError(
            f"param_groups[{number}] has differentiable=True, and a gradient through the update "
            "would take the clip for a constant; expected False, or the bare optimizer after a "
            "clip of tritonclip.functional, such as clip_by_global_norm, which is differentiable"
        )


def check_group(number: int, group: Mapping[str, Any]) -> None:
    """Refuses a group whose `clip` is no rule, or whose update is to be differentiated."""
    if "clip" in group:
        rule_of(number, group)
    refuse_differentiable(number, group)


def rule_of(number: int, group: Mapping[str, Any]) -> Rule | None:
    """The rule that a parameter group carries under `clip`; None leaves the group alone."""
    clip = group["clip"]
    try:
        if type(clip) in (float, int):
            # Made once: steps read the rules of groups again.
            made: Rule = known_rule(ClipByGlobalNorm, clip)
            return made
        return None if clip is None else as_rule("clip", clip)
    except (TypeError, ValueError) as error:
        raise type(error)(f"param_groups[{number}]['clip']: {error}; None clips nothing") from None


def rules_of(groups: Groups) -> dict[int, Rule | None]:
    """The rules that parameter groups carry."""
    return {index: rule_of(index, group) for index, group in enumerate(groups) if "clip" in group}


def key_of(group_index: int | None) -> str:
    """The name of a group's rule, norms and state in checkpoints and records; None: all others'."""
    return "rule" if group_index is None else f"group{group_index}"


def label_of_member(groups: Groups, index: int, position: int) -> str:
    """Names a parameter of a group in messages."""
    names = groups[index].get("param_names", ())
    # Parameters that were added to the group by hand have none.
    if position < len(names):
        return str(names[position])
    return f"param_groups[{index}]['params'][{position}]"


def label_at(groups: Groups, indices: Sequence[int], position: int) -> str:
    """As `label_of_member`, by the position among the parameters of several groups."""
    for index in indices:
        n = len(groups[index]["params"])
        if position < n:
            break
        position -= n
    return label_of_member(groups, index, position)


def unclipped_in(groups: Groups) -> list[tuple[int, int]]:
    """The parameters that have `need_clip = False`: (group, position)."""
    return [
        (number, position)
        for number, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
        if not getattr(parameter, "need_clip", True)
    ]
