"""Parameter groups: the rules that they carry under the key `clip`, and what stands in them."""

from collections.abc import Container, Mapping, Sequence
from difflib import get_close_matches
from operator import is_
from typing import Any

from torch.optim import Optimizer

from tritonclip.rules import Rule, as_rule

Groups = Sequence[Mapping[str, Any]]
# Rules of parameter groups, by index: of those that have the key; None clips nothing.
OwnRules = Mapping[int, Rule | None]

# Keys that users may write in place of the first, also misspelt.
_LOOKALIKES = frozenset({"clip", "clipping", "clip_grad", "clip_grad_norm", "clip_grad_value"})
_LOOKALIKES |= {"clip_norm", "clip_value", "grad_clip", "gradient_clip", "gradient_clip_val"}
_LOOKALIKES |= {"global_clipnorm", "gradient_clipping", "max_grad_norm", "max_norm", "need_clip"}
# "clp" is as close to "clip" as 0.86; "flip" as 0.75, "grad_norm" to "max_grad_norm" as 0.82.
_CLOSE = 0.85


def are_same(items: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences have the same objects in the same order."""
    return len(items) == len(others) and all(map(is_, items, others))


def options_of(optimizer: Optimizer) -> set[str]:
    """The keys of groups that an optimizer has by itself, or that one inside it has."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return {key for holder in (optimizer, *inside) for key in holder.defaults}


def refuse_differentiable(number: int, group: Mapping[str, Any]) -> None:
    """ValueError for a group whose update is to be differentiated: clipping records no graph."""
    if group.get("differentiable"):
        raise ValueError(
            f"param_groups[{number}] has differentiable=True, and a gradient through the update "
            "would take the clip for a constant; expected False, or the bare optimizer after a "
            "clip of tritonclip.functional, such as clip_by_global_norm, which is differentiable"
        )


def check_group(number: int, group: Mapping[str, Any], options: Container[str]) -> None:
    """Refuses a group whose `clip` is no rule, or a key like it that is not in `options`."""
    if "clip" in options:
        raise ValueError(
            "the optimizer has an option 'clip' of its own, the key under which a group's rule is "
            "looked for; expected an optimizer without: clip by clip_ before its step"
        )
    for key in group:
        is_known = key in options or key == "clip"
        if not is_known and get_close_matches(str(key).lower(), _LOOKALIKES, 1, _CLOSE):
            raise ValueError(
                f"param_groups[{number}] has the unknown key {key!r}. A group's rule is its key "
                "'clip', where None leaves the group alone; need_clip = False is an attribute of a "
                "parameter"
            )
    if "clip" in group:
        rule_of(number, group)
    refuse_differentiable(number, group)


def rule_of(number: int, group: Mapping[str, Any]) -> Rule | None:
    """The rule that a parameter group carries under `clip`; None leaves the group alone."""
    clip = group["clip"]
    try:
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


def unclipped_in(groups: Groups) -> list[tuple[int, int]]:
    """The parameters that have `need_clip = False`: (group, position)."""
    return [
        (number, position)
        for number, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
        if not getattr(parameter, "need_clip", True)
    ]
