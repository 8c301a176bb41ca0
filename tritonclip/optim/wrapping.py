"""A proxy in front of an optimizer: its interface, its refusals, and questions to the optimizer."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

# Where Optimizer keeps its registered hooks.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def _of_wrapped(name: str) -> Any:
    """Makes a property that reads and writes an attribute of the wrapped optimizer."""

    def read(proxy: OptimizerProxy) -> Any:
        return getattr(proxy.optimizer, name)

    def write(proxy: OptimizerProxy, value: Any) -> None:
        setattr(proxy.optimizer, name, value)

    return property(read, write, doc="The wrapped optimizer's.")


class OptimizerProxy(Optimizer):
    """A `torch.optim.Optimizer` with the parameter groups, state and defaults of another one.

    Hooks that are registered here run around the whole step, and hooks of the wrapped optimizer
    around its update. A step that the host leaves out runs no post-hook. Global step hooks run
    once, for the wrapped optimizer. Public attributes and methods that only the wrapped optimizer
    has can be used through this one. An attribute that is set here stays here.
    """

    optimizer: Optimizer
    param_groups: list[dict[str, Any]] = _of_wrapped("param_groups")
    state: defaultdict[Tensor, Any] = _of_wrapped("state")
    defaults: dict[str, Any] = _of_wrapped("defaults")
    _save: Callable[[], dict[str, Any]]
    _load: Callable[[dict[str, Any]], None]

    # Does not call Optimizer.__init__, which would make new groups.
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        for name in _HOOKS:
            setattr(self, name, OrderedDict())

    # Hidden from type checkers, which would let every name pass.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            optimizer = vars(self).get("optimizer")
            has_own = any(name in vars(cls) for cls in type(self).__mro__)
            if has_own or name.startswith("_") or not hasattr(optimizer, name):
                # Raises AttributeError; a property that raised one before says why once more.
                return object.__getattribute__(self, name)
            return getattr(optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, as the wrapped optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Runs the pre-hooks of a step; returns its arguments, which they may replace."""
        for before in tuple(self._optimizer_step_pre_hooks.values()):
            result = before(self, args, kwargs)
            if result is not None:
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise RuntimeError(
                        "a step pre-hook must return None or a tuple of (new_args, new_kwargs), "
                        f"got {result!r:.80}"
                    )
                args, kwargs = result
        return args, kwargs

    def state_dict(self) -> dict[str, Any]:
        """Returns a checkpoint that this class and the bare optimizer can load."""
        for before in tuple(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        state_dict = self._save()
        for after in tuple(self._optimizer_state_dict_post_hooks.values()):
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class or of the bare optimizer."""
        for before in tuple(self._optimizer_load_state_dict_pre_hooks.values()):
            state_dict = before(self, state_dict) or state_dict
        self._load(state_dict)
        for after in tuple(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)


def check_optimizer(optimizer: object) -> None:
    """Refuses an object that cannot be wrapped."""
    if isinstance(optimizer, OptimizerProxy):
        raise ValueError(
            "optimizer is a ClippedOptimizer, which would clip twice; to change its rule, set its "
            "attribute clip, or give a parameter group the key 'clip'"
        )
    # Optimizer.__init__ makes the hooks that the wrapper uses.
    if not (
        isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_state_dict_post_hooks")
    ):
        got = type(optimizer).__name__
        if isinstance(optimizer, type):
            got = f"the class {optimizer.__name__}: write {optimizer.__name__}(parameters, ...)"
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer that ran Optimizer.__init__, got "
            f"{got}; expected one, as the first argument, such as torch.optim.SGD(parameters, "
            "lr=0.1): in an optimizer around another one, wrap that inside"
        )
    if "clip" in optimizer.defaults:
        raise ValueError(
            "the optimizer has an option 'clip' of its own, the key under which a group's rule is "
            "looked for; expected an optimizer without: clip by clip_ before its step"
        )


def takes_scaling(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` takes scale and overflow from a GradScaler."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether a flag on the device can make the optimizer leave out an update."""
    groups = optimizer.param_groups
    if not (takes_scaling(optimizer) and all(group.get("fused") for group in groups)):
        return False
    # SGD fills its momentum buffers at the first update, and would take them for filled even if the
    # device had left that update out.
    return not isinstance(optimizer, SGD) or not any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in groups
        if group["momentum"]
        for p in group["params"]
    )


def step_unless(optimizer: Any, stop: Tensor) -> Any:
    """Lets the optimizer step, which updates nothing if the flag `stop` on the device is true."""
    try:
        optimizer.found_inf = stop.to(torch.float32)
        return optimizer.step()
    finally:
        vars(optimizer).pop("found_inf", None)
