"""Properties of the wrapped optimizer: its device, and whether it can skip a step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


def device_of(optimizer: Optimizer) -> torch.device:
    """The device of the first parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device
    return torch.device("cpu")


def takes_scaling(optimizer: Optimizer) -> bool:
    """Whether a GradScaler hands scale and overflow to its `step`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether it can be told on the device not to update."""
    groups = optimizer.param_groups
    if not (takes_scaling(optimizer) and all(group.get("fused") for group in groups)):
        return False
    # torch fills momentum buffers at the first update only, but takes them for filled after a
    # first one that did not happen.
    return not isinstance(optimizer, SGD) or not any(_lacks_momentum(optimizer, g) for g in groups)


def _lacks_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group["momentum"]) and any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for p in group["params"]
    )


def step(optimizer: Any, stop: Tensor) -> Any:
    """A step that updates nothing where `stop`, on the device, is true."""
    try:
        optimizer.found_inf = stop.to(torch.float32)
        return optimizer.step()
    finally:
        optimizer.__dict__.pop("found_inf", None)
