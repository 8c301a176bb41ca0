"""A GradScaler that finds overflows by the norms that a ClippedOptimizer measures anyway."""

from functools import reduce
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from tritonclip.optim.amp import share_state_
from tritonclip.optim.clipped_optimizer import ClippedOptimizer


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that reads the gradients of a :class:`ClippedOptimizer` once.

    torch's GradScaler works with the wrapper too, but reads and writes all gradients once more.
    This one lets the wrapper measure the scaled gradients: their norm shows an overflow, and if
    they have to be written, one pass unscales and clips them. A norm that does not fit its dtype is
    an overflow, too.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> inner = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, 1.0)
        >>> scaler = tritonclip.GradScaler("cpu")
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     scaler.scale((weight * weight).sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        >>> optimizer.stats.last_norm, weight.data
        (tensor(8.), tensor([1.8000, 2.4000]))

    Args:
        device: "cuda" by default, or another type of device, such as "cpu". The other arguments are
            those of `torch.amp.GradScaler`.

    Notes:
        The wrapper's `step` is not called at an overflow, nor at a step that the wrapper skips,
        unless the wrapped optimizer decides on the device. With any other optimizer, and after
        `unscale_`, this scaler behaves as torch's does. It loads and saves the same checkpoints.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale, before they are read or changed by hand.

        Args:
            optimizer: the wrapper, or any other optimizer.

        Raises:
            RuntimeError: a second call before `update`, also one for the wrapped optimizer.
        """
        if self._enabled and isinstance(optimizer, ClippedOptimizer):
            if optimizer._is_under_ours:
                # `step` calls this, and needs a measurement only.
                self._check_inf_per_device(optimizer)
                return
            share_state_(self, optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales, clips and updates, unless a gradient is NaN or inf.

        Args:
            optimizer: the wrapper, not the wrapped optimizer, or any other optimizer.
            *args: arguments of the optimizer's `step`, but no closure.
            **kwargs: keyword arguments of the optimizer's `step`.

        Returns:
            The result of the optimizer's `step`, or None for a step that is left out.
        """
        if not self._enabled or not isinstance(optimizer, ClippedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        try:
            optimizer._is_under_ours = True
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._is_under_ours = False
            optimizer._measured = None

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Leaves the decision to the wrapper, which waits for the device once."""
        if not isinstance(optimizer, ClippedOptimizer):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        ours = self._get_scale_async()
        assert ours is not None
        scale = ours if optimizer_state["stage"] is OptState.READY else None
        flags = optimizer_state["found_inf_per_device"].values()
        found_inf = reduce(torch.add, [flag.to(ours.device, non_blocking=True) for flag in flags])
        result: float | None = optimizer._step_under_scaler(scale, found_inf, *args, **kwargs)
        return result

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        # Without any gradient, torch's method records no check, so that `update` complains.
        if not isinstance(optimizer, ClippedOptimizer) or optimizer._grouping.is_without_grads():
            return super()._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        assert scale is not None
        # Recorded as torch does, which later hands scale and overflow to the step.
        found_inf = optimizer._measure_scaled(scale)
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        return state
