"""The part of a checkpoint that a wrapper adds, and the rules of groups, which it leaves out.

Savers such as `torch.distributed.checkpoint` carry the state and the groups of an optimizer, and
nothing beside them; flattened, the keys of its groups that it has while it loads. So the groups of
a wrapped optimizer have the key `tritonclip`, whose value is bytes in a checkpoint, else None.
"""

import io
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonclip.optim.param_groups import Groups
from tritonclip.rules.arguments import saved_count
from tritonclip.rules.rule import RULE_CLASSES

# The key of the wrapper's own part: statistics, the states of rules, the recorder's step.
STATS_KEY = "tritonclip"
_LEFT_OUT = ("clip", STATS_KEY)
# Copies share an optimizer.
_WRAPPERS: WeakKeyDictionary[Optimizer, WeakSet[Any]] = WeakKeyDictionary()
# In place of rules, also of those that the program which loads may have: torch asks for its keys.
_NOT_SAVED = "not saved"


def mark_(groups: Groups) -> None:
    """Gives groups of a wrapped optimizer the key that a saver has to carry."""
    for group in groups:
        group.setdefault(STATS_KEY, None)  # type: ignore[attr-defined]  # a dict


def drop_placeholders_(groups: Groups) -> None:
    """Takes away what the bare optimizer got in place of rules, from a wrapper's checkpoint."""
    for group in groups:
        if group.get("clip") == _NOT_SAVED:
            del group["clip"]  # type: ignore[attr-defined]  # a dict


def may_make_state(groups: Groups, *, has_shards: bool) -> bool:
    """Whether a step without a graph, of an optimizer without state, is one that makes that state.

    Rates and gradients are then 0; the norm says it of shards, which may be 0 on one process alone.
    """
    grads = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    rates = [group.get("lr", 0) for group in groups]
    # torch makes its rates there. Any other would be waited for, also while a graph is captured.
    here = torch.get_default_device().type
    return (
        not any((isinstance(rate, Tensor) and rate.device.type != here) or rate for rate in rates)
        and all(grad is not None and not grad.is_sparse for grad in grads)
        and (has_shards or all(map(is_zero, grads)))
    )


def is_zero(number: Tensor) -> bool:
    """Whether all elements are 0; waits for the device. Those on meta are nothing else."""
    return number.is_meta or hasattr(number, "full_tensor") or not number.any()


def without_rules(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without the rules of groups: the program has them, and torch would not load."""
    groups = [
        {k: v for k, v in g.items() if k not in _LEFT_OUT} for g in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def with_present_rules(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with the rules that the groups have now."""
    saved = without_rules(optimizer, state_dict)["param_groups"]
    present = [{k: g[k] for k in _LEFT_OUT if k in g} for g in optimizer.param_groups]
    groups = [{**g, **keys} for g, keys in zip(saved, present, strict=False)]
    # Where the numbers differ, the optimizer has the message.
    return {**state_dict, "param_groups": groups + saved[len(groups) :]}


def begin_(optimizer: Optimizer, wrapper: object) -> None:
    """Makes an optimizer ready for checkpoints of a wrapper, and of its own without rules."""
    mark_(optimizer.param_groups)
    # Trainers that save param groups by themselves, with rules among their keys, load weights only.
    torch.serialization.add_safe_globals(RULE_CLASSES)
    if without_rules not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(without_rules)
        optimizer.register_load_state_dict_pre_hook(with_present_rules)
    _WRAPPERS.setdefault(optimizer, WeakSet()).add(wrapper)


def end_(optimizer: Optimizer, wrapper: object) -> None:
    """Takes the keys and hooks away, unless another wrapper of the optimizer is left."""
    wrappers = _WRAPPERS.get(optimizer, WeakSet())
    wrappers.discard(wrapper)
    if wrappers:
        return
    for group in optimizer.param_groups:
        group.pop(STATS_KEY, None)
    for hooks, ours in (
        (optimizer._optimizer_state_dict_post_hooks, without_rules),
        (optimizer._optimizer_load_state_dict_pre_hooks, with_present_rules),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]


def with_part(state_dict: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with the wrapper's own part, as it is, and in the groups as bytes."""
    part["has_state"] = torch.tensor(int(any(state_dict["state"].values())), device="cpu")
    # torch compares the values of a group's parameters: those of bytes, where a NaN equals itself.
    buffer = io.BytesIO()
    torch.save(part, buffer)
    # The same objects in all groups, which pickle writes once.
    keys = {STATS_KEY: buffer.getvalue(), "clip": _NOT_SAVED}
    groups = [{**group, **keys} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups, STATS_KEY: part}


def split_part(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A checkpoint without the wrapper's own part, and this; empty where there is none."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    if not (isinstance(groups, list) and all(isinstance(g, dict) for g in groups)):
        raise ValueError(
            "expected the result of state_dict() of a ClippedOptimizer or of the wrapped one: a "
            f"dict with param_groups, a list of dicts, got {state_dict!r:.80}"
        )
    found = [group[STATS_KEY] for group in groups if group.get(STATS_KEY) is not None]
    groups = [{k: v for k, v in group.items() if k != STATS_KEY} for group in groups]
    rest = {key: value for key, value in state_dict.items() if key != STATS_KEY}
    part = state_dict.get(STATS_KEY)
    if part is None:
        part = _read(found[0]) if found else {}
    had_state = isinstance(part, dict) and saved_count("has_state", part.get("has_state", 0))
    if had_state and not any(rest["state"].values()):
        raise ValueError(
            "the checkpoint was saved with state of the optimizer, and it is missing here. "
            "torch.distributed.checkpoint loads state into an optimizer that has some, and makes "
            "it only where no parameter has a gradient; expected get_state_dict() before the first "
            "backward. Nothing was loaded"
        )
    return {**rest, "param_groups": groups}, part


def _read(saved: Any) -> Any:
    """The wrapper's own part from a group."""
    try:
        return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    except Exception as error:
        # Whatever damaged bytes raise.
        raise ValueError(
            f"the entry {STATS_KEY!r} of a parameter group must be bytes that state_dict() "
            f"saved, got {saved!r:.40}, which cannot be read. Nothing was loaded"
        ) from error
