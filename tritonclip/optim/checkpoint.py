"""The part that a wrapper adds to a checkpoint, and the rules of groups, which are left out.

Savers such as `torch.distributed.checkpoint` carry only the state and groups of an optimizer. If
they flatten these, they load only entries that the optimizer already has, and copy each group's
keys for every parameter. So a few numbers stand in the groups under the key `tritonclip`: bytes in
a checkpoint, None in the optimizer. Many numbers, such as a row for each parameter, are tensors in
the state of one parameter, the holder: in checkpoints only, never in the optimizer's own state.
"""

import json
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonclip.engine.arguments import FSDP_MARK
from tritonclip.optim.clip_groups import Groups
from tritonclip.rules.arguments import saved_count
from tritonclip.rules.rule import RULE_CLASSES
from tritonclip.rules.state import dtype_on

# The key of the wrapper's part: statistics, the states of rules, the recorder's step.
STATS_KEY = "tritonclip"
_LEFT_OUT = ("clip", STATS_KEY)
# Stands for numbers in the holder's state, whose name is the prefix and then the rule's name.
IN_STATE = "in state"
_PREFIX = f"{STATS_KEY}_"
# The wrappers of each optimizer; shallow copies of a wrapper share one.
WRAPPERS: WeakKeyDictionary[Optimizer, WeakSet[Any]] = WeakKeyDictionary()
# Stands for a rule in every saved group: torch asks for each key that the loading program has.
_NOT_SAVED = "not saved"


def mark_(groups: Groups) -> None:
    """Adds the key that savers carry to the groups of a wrapped optimizer."""
    for group in groups:
        group.setdefault(STATS_KEY, None)  # type: ignore[attr-defined]  # a dict


def drop_loaded_(optimizer: Optimizer) -> None:
    """Removes placeholders and numbers of rules, which a bare optimizer loaded from a checkpoint.

    The key `tritonclip` of its groups stays.
    """
    for group in optimizer.param_groups:
        if group.get("clip") == _NOT_SAVED:
            del group["clip"]
    for entry in optimizer.state.values():
        for name in _names_in(entry):
            del entry[name]


def may_make_state(groups: Groups, *, has_shards: bool) -> bool:
    """Whether a step under no_grad, of an optimizer without state, may serve only to make it.

    All rates and gradients are 0. A shard may be 0 on one process only, so the norm of all decides.
    """
    grads = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    rates = [group.get("lr", 0) for group in groups]
    # torch makes its rates on the default device. Reading another would wait, even in a capture.
    here = torch.get_default_device().type
    return (
        not any((isinstance(rate, Tensor) and rate.device.type != here) or rate for rate in rates)
        and all(grad is not None and not grad.is_sparse for grad in grads)
        and (has_shards or all(map(is_zero, grads)))
    )


def is_zero(number: Tensor) -> bool:
    """Whether all elements are 0, which waits for the device; True for DTensors and on meta."""
    return number.is_meta or hasattr(number, "full_tensor") or not number.any()


def without_rules(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Removes the rules of groups: the program has them, and torch may refuse to load them."""
    groups = [
        {k: v for k, v in g.items() if k not in _LEFT_OUT} for g in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def with_present_rules(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Puts the groups' present rules into a checkpoint, and drops rules' numbers from its state."""
    saved = without_rules(optimizer, state_dict)["param_groups"]
    state_dict = {**state_dict, "state": _split_state(state_dict["state"])[0]}
    present = [{k: g[k] for k in _LEFT_OUT if k in g} for g in optimizer.param_groups]
    groups = [{**g, **keys} for g, keys in zip(saved, present, strict=False)]
    # If the numbers of groups differ, the optimizer raises.
    return {**state_dict, "param_groups": groups + saved[len(groups) :]}


def begin_(optimizer: Optimizer, wrapper: object) -> None:
    """Prepares an optimizer for a wrapper's checkpoints, and for its own without rules.

    This lasts until `end_` or until the wrapper is garbage-collected.
    """
    # Made first and so called last, when a dead wrapper has left WRAPPERS.
    finalize(wrapper, _end_of_dead, ref(optimizer)).atexit = False
    mark_(optimizer.param_groups)
    # Some trainers save param groups with their rules, and load them with weights_only=True.
    torch.serialization.add_safe_globals(RULE_CLASSES)
    if without_rules not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(without_rules)
        optimizer.register_load_state_dict_pre_hook(with_present_rules)
    WRAPPERS.setdefault(optimizer, WeakSet()).add(wrapper)


def end_(optimizer: Optimizer, wrapper: object) -> None:
    """Removes keys and hooks, unless the optimizer has another wrapper."""
    wrappers = WRAPPERS.get(optimizer, WeakSet())
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


def _end_of_dead(wrapped: ref[Optimizer]) -> None:
    """Calls `end_` for a wrapper that was garbage-collected."""
    optimizer = wrapped()
    if optimizer is not None:
        # The wrapper has left WRAPPERS already, so that any other object stands in for it.
        end_(optimizer, optimizer)


def holder_in(
    state: Mapping[Any, Any],
    keys: Iterable[Any],
    parameters: Iterable[Tensor],
    *,
    has_stepped: bool,
) -> Any:
    """Chooses the holder, in whose state a checkpoint has many numbers; returns its key or None.

    Optimizers take a parameter with an entry for one with its whole state, so the holder must have
    state, unless the optimizer `has_stepped` and keeps none.
    """
    # FSDP1 cuts the state of its parameters to shards.
    pairs = zip(keys, parameters, strict=False)
    trained = [key for key, p in pairs if p.requires_grad and not hasattr(p, FSDP_MARK)]
    holder = next((key for key in trained if state.get(key)), None)
    if holder is None and has_stepped and not any(state.values()):
        holder = next(iter(trained), None)
    return holder


def with_part(
    state_dict: dict[str, Any], part: dict[str, Any], groups: Groups, *, has_stepped: bool
) -> dict[str, Any]:
    """Adds the wrapper's part to a checkpoint as it is, and once more in its groups and state."""
    state, memory = state_dict["state"], part.get("memory", {})
    part["has_state"] = torch.tensor(int(any(state.values())), device="cpu")
    parameters = [p for group in groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    many = {owner: saved for owner, saved in memory.items() if isinstance(saved["values"], Tensor)}
    holder = holder_in(state, keys, parameters, has_stepped=has_stepped) if many else None
    if holder is not None:
        device = parameters[keys.index(holder)].device
        for saved in many.values():
            # torch expects state on the parameter's device. `part` shares it, so it is saved once.
            if device.type != "meta":
                saved["values"] = saved["values"].to(device, dtype_on(device))
        if not part["has_state"]:
            # If one parameter has an entry, torch asks for one of every parameter.
            state = {key: {} for key in keys}
        names = {f"{_PREFIX}{owner}": saved["values"] for owner, saved in many.items()}
        state = {**state, holder: {**state[holder], **names}}
    small = {**part, "memory": dict(memory)}
    for owner, saved in many.items():
        if not saved["steps"]:
            # The rule starts with these values, so the groups need none.
            small["memory"][owner] = {**saved, "values": None}
        elif holder is not None:
            small["memory"][owner] = {**saved, "values": IN_STATE}
    # torch compares a group's values between its parameters: as bytes, a NaN equals itself.
    # All groups have the same objects, which pickle writes once.
    added = {STATS_KEY: json.dumps(small, default=_as_numbers).encode(), "clip": _NOT_SAVED}
    saved_groups = [{**group, **added} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": saved_groups, STATS_KEY: part}


def _as_numbers(tensor: Tensor) -> Any:
    """Converts a tensor to numbers for JSON; those on meta become NaN, or 0 for integers."""
    if tensor.is_meta:
        tensor = torch.zeros_like(tensor, device="cpu")
        tensor = tensor / 0 if tensor.is_floating_point() else tensor
    return tensor.tolist()


def is_unflattening() -> bool:
    """Whether torch's loader of flattened checkpoints is reading the caller's property `state`.

    It may read the property through other optimizers around this one.
    """
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_code.co_name == "_unflatten_optim_state_dict":
            return True
        frame = frame.f_back or frame
    return False


def with_names(
    optimizer: Optimizer, owners: Iterable[str], *, has_stepped: bool
) -> MutableMapping[Any, Any]:
    """Returns an optimizer's state, in which the holder also has the names of owners' numbers."""
    state = optimizer.state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = dict.fromkeys([f"{_PREFIX}{owner}" for owner in owners])
    holder = holder_in(state, parameters, parameters, has_stepped=has_stepped) if names else None
    return (
        state if holder is None else ChainMap({holder: {**state.get(holder, {}), **names}}, state)
    )


def split_part(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Splits a checkpoint into the wrapped optimizer's and the wrapper's part, {} without one."""
    given = state_dict if isinstance(state_dict, dict) else {}
    groups, has_state = given.get("param_groups"), isinstance(given.get("state"), dict)
    if not (has_state and isinstance(groups, list) and all(isinstance(g, dict) for g in groups)):
        raise ValueError(
            "expected the result of state_dict() of a ClippedOptimizer or of the wrapped one: "
            f"state, a dict, and param_groups, a list of dicts, got {state_dict!r:.80}"
        )
    found = [group[STATS_KEY] for group in groups if group.get(STATS_KEY) is not None]
    groups = [{k: v for k, v in group.items() if k != STATS_KEY} for group in groups]
    rest = {key: value for key, value in state_dict.items() if key != STATS_KEY}
    rest["state"], many = _split_state(rest["state"])
    part = state_dict.get(STATS_KEY)
    if part is None:
        part = _read(found[0], many) if found else {}
    had_state = isinstance(part, dict) and saved_count("has_state", part.get("has_state", 0))
    if had_state and not any(rest["state"].values()):
        refuse_missing("state of the optimizer")
    return {**rest, "param_groups": groups}, part


def _split_state(state: dict[Any, Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Splits the state of a checkpoint into the optimizer's and the numbers of rules, by name."""
    own, many = dict(state), dict[str, Any]()
    for key, entry in state.items():
        if names := _names_in(entry):
            own[key] = {name: value for name, value in entry.items() if name not in names}
            many |= {name.removeprefix(_PREFIX): entry[name] for name in names}
    # If the optimizer keeps no state, `with_part` had added empty entries.
    return own if not many or any(own.values()) else {}, many


def _names_in(entry: Any) -> list[str]:
    """Lists the names of rules' numbers in the state of a parameter."""
    if not isinstance(entry, dict):
        return []
    return [name for name in entry if isinstance(name, str) and name.startswith(_PREFIX)]


def refuse_missing(what: str) -> NoReturn:
    """Raises ValueError for a checkpoint that torch loaded only in part."""
    raise ValueError(
        f"the checkpoint was saved with {what}, and it is missing here. "
        "torch.distributed.checkpoint loads state into an optimizer that has some, and makes "
        "it only where no parameter has a gradient; expected get_state_dict() before the first "
        "backward. Nothing was loaded"
    )


def _read(saved: Any, many: dict[str, Any]) -> Any:
    """Reads the wrapper's part from a group's bytes, and puts in the numbers from the state."""
    try:
        part = json.loads(saved)
        for owner, state in part.get("memory", {}).items():
            if state["values"] == IN_STATE and isinstance(many.get(owner), Tensor):
                state["values"] = many[owner]
        return part
    except Exception as error:
        # Damaged bytes may raise anything.
        raise ValueError(
            f"the entry {STATS_KEY!r} of a parameter group must be bytes that state_dict() "
            f"saved, got {saved!r:.40}, which cannot be read. Nothing was loaded"
        ) from error
