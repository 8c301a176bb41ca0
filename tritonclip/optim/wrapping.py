"""An optimizer in front of another one: torch's interface, and mistakes around a ClippedOptimizer.

Mistakes are refused, or warned of where they would pass in silence: an optimizer is wrapped in a
second one, or stepped past its wrapper; gradients are never there; a number is set that belongs to
a rule.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonclip.messages import warn_user

# Where Optimizer keeps its registered hooks.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# Methods that update parameters, or give the step a closure, as those of SAM, LOMO and GSAM.
_UPDATES = re.compile(r"(?!get_|is_)\w+_step|step_\w+|fused_backward|set_closure")


def _of_wrapped(name: str) -> Any:
    """An attribute that is the wrapped optimizer's."""

    def read(proxy: OptimizerProxy) -> Any:
        return getattr(proxy.optimizer, name)

    def write(proxy: OptimizerProxy, value: Any) -> None:
        setattr(proxy.optimizer, name, value)

    return property(read, write, doc="The wrapped optimizer's.")


class OptimizerProxy(Optimizer):
    """A `torch.optim.Optimizer` with the parameter groups, state and defaults of another one.

    Hooks that are registered here run around the whole step, those of the wrapped optimizer around
    its own part. A step that the host leaves out runs no post-hook. Global step hooks run once, for
    the wrapped one. Public attributes that only the wrapped optimizer has are read through this
    one, and its methods called. One that is set stays here.
    """

    optimizer: Optimizer
    param_groups: list[dict[str, Any]] = _of_wrapped("param_groups")
    state: defaultdict[Tensor, Any] = _of_wrapped("state")
    defaults: dict[str, Any] = _of_wrapped("defaults")
    _save: Callable[[], dict[str, Any]]
    _load: Callable[[dict[str, Any]], None]

    # Optimizer.__init__ would make groups of its own.
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
                # Raises; a property that raised says why once more.
                return object.__getattribute__(self, name)
            value = getattr(optimizer, name)
            if callable(value) and _UPDATES.fullmatch(name):
                raise AttributeError(
                    f"{name}() of {type(optimizer).__name__} would lead to an update without "
                    "clipping; expected step(closure) of the ClippedOptimizer. To call it by hand, "
                    "wrap the optimizer inside that one: SAM(parameters, lambda groups, **options: "
                    "ClippedOptimizer(SGD(groups, **options), 1.0)). Where it updates nothing, "
                    f"call optimizer.optimizer.{name}()",
                    name=name,
                    obj=self,
                )
            return value

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
        """A checkpoint that this class and the bare optimizer load."""
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


class StepGuard:
    """A step pre-hook of a wrapped optimizer; `open` while its wrapper is in a step."""

    def __init__(self, wrapper: Optimizer) -> None:
        self.open = False
        self.wrapper = ref(wrapper)
        self._warned = False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Warns, unless the step is meant; a compiled step is not seen."""
        if torch.compiler.is_compiling() or self.open or self._warned or self.wrapper() is None:
            return
        self._warned = True
        warn_user(
            f"{type(optimizer).__name__}.step() was called on the optimizer inside a "
            "ClippedOptimizer, so nothing was clipped or counted; expected step() of the "
            "ClippedOptimizer. To update without clipping, set its attribute clip to float('inf')"
        )


def guard_(optimizer: Optimizer, wrapper: Optimizer) -> StepGuard:
    """Makes a wrapper that of an optimizer, whose steps past it are warned of from now on."""
    guard = _guard_of(optimizer)
    if guard is None:
        guard = StepGuard(wrapper)
        optimizer.register_step_pre_hook(guard)
    guard.wrapper = ref(wrapper)
    return guard


def _guard_of(optimizer: Optimizer) -> StepGuard | None:
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return next((hook for hook in hooks if isinstance(hook, StepGuard)), None)


def wrapper_of(optimizer: Optimizer) -> Any:
    """The ClippedOptimizer around an optimizer, while it is alive; else None."""
    guard = _guard_of(optimizer)
    wrapper = None if guard is None else guard.wrapper()
    # A copy of an optimizer may have its hooks.
    return wrapper if getattr(wrapper, "optimizer", None) is optimizer else None


def check_optimizer(optimizer: object) -> None:
    """Refuses an object that cannot be wrapped, and an optimizer that is wrapped already."""
    expected = "optimizer must be a torch.optim.Optimizer"
    if isinstance(optimizer, type):
        raise TypeError(f"{expected}, got the class; write {optimizer.__name__}(parameters, ...)")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{expected}, got {type(optimizer).__name__}; {_remedy(optimizer)}")
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise TypeError(
            f"{expected} that ran Optimizer.__init__, got {type(optimizer).__name__}, which did "
            f"not; {_remedy(optimizer)}"
        )
    if isinstance(vars(optimizer).get("_guard"), StepGuard):
        raise ValueError(
            "optimizer is a ClippedOptimizer, which would clip twice; to change its rule, set its "
            "attribute clip, or give a parameter group the key 'clip'"
        )
    if wrapper_of(optimizer) is not None:
        raise ValueError(
            f"this {type(optimizer).__name__} is wrapped already, and a second wrapper would keep "
            "statistics of its own; use the first wrapper, or make a new optimizer"
        )


def _remedy(refused: object) -> str:
    """The object to wrap in place of one that cannot be wrapped, or the call to write."""
    name = type(refused).__name__
    if hasattr(refused, "noise_multiplier"):
        return (
            "its step clips the gradient of each example and then adds noise, and a "
            "ClippedOptimizer around or inside it would clip the noise or nothing: set its "
            "max_grad_norm, and use it bare"
        )
    if not any(isinstance(value, Optimizer) for value in getattr(refused, "__dict__", {}).values()):
        return "write ClippedOptimizer(optimizer, 1.0), with an optimizer such as torch.optim.SGD"
    if not hasattr(refused, "zero_grad"):
        return "wrap its optimizer, before a scheduler is made of it"
    return f"wrap the optimizer inside it: {name}(ClippedOptimizer(optimizer, 1.0), ...)"


def of_rule(name: str) -> property:
    """A number of a rule, which an optimizer has not: set there, it would change nothing."""

    def read(optimizer: Any) -> None:
        raise AttributeError(f"{name} belongs to a rule; expected optimizer.clip, {optimizer.clip}")

    def refuse(_: object, value: object) -> None:
        raise AttributeError(
            f"{name} belongs to a rule, and would change nothing here; expected a new rule, such "
            f"as optimizer.clip = ClipByGlobalNorm(2.0), got {name} = {value!r:.40}"
        )

    return property(read, refuse)
