"""An optimizer in front of another one: torch's interface, whose state is that of the other."""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

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


class OptimizerProxy(Optimizer):
    """A `torch.optim.Optimizer` with the parameter groups, state and defaults of another one.

    Hooks that are registered here run around the whole step, those of the wrapped optimizer around
    its own part. A step that the host leaves out runs no post-hook. Global step hooks run once, for
    the wrapped one. Public attributes that only the wrapped optimizer has are read through this
    one, and its methods called. One that is set stays here.
    """

    optimizer: Optimizer
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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

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
