"""The wrapper of each optimizer, while it is alive: an optimizer has at most one."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer

from tritonclip.optim.delegating import DelegatingOptimizer
from tritonclip.optim.param_groups import with_present_rules, without_rules

if TYPE_CHECKING:
    from tritonclip.optim.wrapper import ClippingWrapper

_wrappers: WeakKeyDictionary[Optimizer, ref[ClippingWrapper]] = WeakKeyDictionary()


def register(optimizer: Optimizer, wrapper: ClippingWrapper) -> None:
    """Makes a wrapper that of an optimizer, whose checkpoints are without rules from now on."""
    if optimizer not in _wrappers:
        optimizer.register_state_dict_post_hook(without_rules)
        optimizer.register_load_state_dict_pre_hook(with_present_rules)
    _wrappers[optimizer] = ref(wrapper)


def wrapper_of(optimizer: Optimizer) -> ClippingWrapper | None:
    """The ClippedOptimizer around an optimizer, if one is alive."""
    wrapper = _wrappers.get(optimizer)
    return None if wrapper is None else wrapper()


def is_wrapped(optimizer: Optimizer) -> bool:
    """Whether a ClippedOptimizer around this optimizer is alive."""
    return wrapper_of(optimizer) is not None


def check_optimizer(optimizer: object) -> None:
    """Refuses an object that cannot be wrapped, and an optimizer that is wrapped already.

    Raises:
        TypeError: no optimizer.
        ValueError: a wrapper, or an optimizer that has one.
    """
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
    if isinstance(optimizer, DelegatingOptimizer):
        raise ValueError(
            "optimizer is a ClippedOptimizer, which would clip twice; to change its rule, set its "
            "attribute clip, or give a parameter group the key 'clip'"
        )
    if is_wrapped(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} is wrapped already, and a second wrapper would keep "
            "statistics of its own; use the first wrapper, or make a new optimizer"
        )


def _remedy(refused: object) -> str:
    """What to wrap in place of an object that cannot be wrapped, or to write."""
    kind = type(refused).__name__
    if hasattr(refused, "noise_multiplier"):
        return (
            "its step clips the gradient of each example and then adds noise, and a "
            "ClippedOptimizer around or inside it would clip the noise or nothing: set its "
            "max_grad_norm, and use it bare"
        )
    if not any(isinstance(one, Optimizer) for one in getattr(refused, "__dict__", {}).values()):
        return "write ClippedOptimizer(optimizer, 1.0), with an optimizer such as torch.optim.SGD"
    if not hasattr(refused, "zero_grad"):
        return "wrap its optimizer, before a scheduler is made of it"
    return f"wrap the optimizer inside it: {kind}(ClippedOptimizer(optimizer, 1.0), ...)"
