"""`FlatGradients`: the gradients of many parameters as views of one buffer a device and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip import settings
from tritonclip.distributed.gradients import ShardedGradients
from tritonclip.distributed.process_groups import Processes
from tritonclip.engine.arguments import labelled, needs_clip
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.flat.layout import is_wanted, lay_out, refuse
from tritonclip.flat.view_watch import ViewWatch
from tritonclip.modes import is_pre_dispatch, n_dispatch_modes, refuse_tracer, without_grad


class FlatGradients:
    """Makes the `.grad` of every parameter a view of one buffer for each device and dtype.

    Pass it in place of the parameters: a call then reads the buffers, and its cost on the host does
    not grow with the number of parameters (for :class:`ClipByNorm`, only if dtypes mix). One memset
    sets all gradients to zero, one all-reduce sums them.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> flat = tritonclip.FlatGradients([weight])
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> for step in range(2):
        ...     flat.zero_()  # in place of optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     print(tritonclip.clip_(flat, 1.0))
        ...     optimizer.step()
        tensor(10.)
        tensor(8.)
        >>> flat.buffers
        (tensor([0.6000, 0.8000]),)

    Gradients are never None then: set them to 0 by :meth:`zero_`, or by
    `optimizer.zero_grad(set_to_none=False)`. docs/flat.md says what else changes in training.

    Args:
        parameters: tensors, a module, or (name, parameter) pairs, whose names appear in error
            messages. Each counts once. Those that require no gradient or have `need_clip = False`
            are left out: neither in the buffers nor clipped. The values of existing gradients are
            kept. Dtypes are floating-point or complex; dtypes and devices may mix.

    Raises:
        TypeError: an argument without tensors; tensor subclasses; gradients that are sparse or of
            another dtype.
        ValueError: no parameter that requires a gradient; one that is not a leaf; a gradient of
            another shape.

    Notes:
        Every call outside of torch.compile checks, in constant time, that no view was dropped;
        docs/flat.md says what is noticed at once and what after some calls. :meth:`check` and
        `verify()` find all of it.

        It keeps its parameters alive, and does not notice that another parameter takes the place of
        one (`load_state_dict(assign=True)`): make a new one then. Copy or pickle it together with
        its model or optimizer. DistributedDataParallel needs `gradient_as_bucket_view=False`, its
        default. FSDP is not supported.

        Gradients whose size is a multiple of 16 bytes come first, so that each starts at one.
    """

    def __init__(
        self, parameters: Tensor | Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        items, label_of = labelled(parameters)
        chosen: dict[int, tuple[str, Tensor]] = {}
        left_out: dict[int, tuple[str, Tensor]] = {}
        for position, parameter in enumerate(items):
            labels = chosen if is_wanted(parameter) else left_out
            labels.setdefault(id(parameter), (label_of(position), parameter))
        if not chosen:
            raise ValueError(
                "expected at least one parameter that requires a gradient and has no need_clip = "
                f"False, got none among {len(items)}; an iterator that was used before is empty"
            )
        self._hold_(chosen.values(), left_out.values())

    def _hold_(
        self, named: Iterable[tuple[str, Tensor]], left_out: Iterable[tuple[str, Tensor]]
    ) -> None:
        self._named, self._left_out = list(named), list(left_out)
        self.attach_()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The memory of all gradients, one 1-d tensor for each device and dtype."""
        return self._buffers

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, in order."""
        return [parameter for _, parameter in self]

    @property
    def left_out(self) -> list[Tensor]:
        """The parameters that it was given and does not hold, in order."""
        return [parameter for _, parameter in self._left_out]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters, as `named_parameters()` yields them."""
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    @without_grad
    def attach_(self) -> None:
        """Makes every `.grad` a view of new buffers again, with the gradients' values.

        Call it after gradients were replaced, or the model moved to another device or dtype.

        Raises:
            TypeError, ValueError: parameters that the constructor refuses; nothing is changed.
        """
        refuse(self._named)
        views = lay_out(self._named)
        grads = list(views)
        for (_, parameter), view in zip(self._named, grads, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        # From here on nothing fails.
        for (_, parameter), view in zip(self._named, grads, strict=True):
            parameter.grad = view
        self._watch = ViewWatch(self._named, self._left_out, views)
        self._views, self._buffers = views, views.buffers
        self._planned: dict[tuple[bool, settings.Settings, object], Gradients] = {}

    def zero_(self) -> None:
        """Sets all gradients to 0, one memset a buffer; those of `need_clip = False` too.

        Raises:
            RuntimeError: a gradient that is no longer a view of the buffers.
        """
        if not torch.compiler.is_compiling():
            self._check_cheaply()
        self._watch.zero_left_out_()
        torch._foreach_zero_(list(self._buffers))

    def check(self) -> None:
        """Checks every parameter, in a time that grows with their number.

        Raises:
            RuntimeError: names the parameters whose gradient is no longer a view of the buffers;
                that were frozen or got `need_clip = False` later, or lost it.
        """
        self._watch.check_all()

    def gradients(
        self,
        *,
        per_gradient: bool = False,
        processes: Processes | None = None,
        weights: bool = False,
    ) -> Gradients:
        """The gradients with their plan, after a check in constant time; all under `verify()`.

        With `per_gradient`, each is measured; with `weights`, the parameters will be read too.
        Where other processes wait for norms, a list with a gradient that is no view is rejected.
        """
        if n_dispatch_modes() or is_pre_dispatch():
            refuse_tracer()
        setting, failure = settings.current(), None
        try:
            if setting.verifying:
                self.check()
            self._check_cheaply()
        except RuntimeError as error:
            if processes is None:
                raise
            failure = error
        key = (per_gradient, setting, None if processes is None else processes.group)
        planned = self._planned.get(key)
        if planned is None or (processes is not None and processes.copies is not None):
            planned = self._plan(processes, per_gradient=per_gradient)
            # The list may have memory of the buffers, too.
            self._watch.read_addresses_()
            # A rejected list has other versions.
            if planned.versions is not None:
                self._planned[key] = planned
        if weights:
            planned = planned.with_parameters(self.parameters)
        elif processes is not None:
            # For one call, which may reject it.
            planned = copy(planned)
        if failure is not None:
            planned.reject_(failure)
        return planned

    def _plan(self, processes: Processes | None, *, per_gradient: bool) -> Gradients:
        """A gradient list of the buffers or, `per_gradient`, of gradients as flat tensors."""
        refuse_copies(processes)
        views = self._views
        tensors = views.flat() if per_gradient else list(views.buffers)
        label_of = [slot.label for slot in views.slots].__getitem__
        device, cache = tensors[0].device, PlanCache(capacity=1)
        if processes is None:
            return Gradients(tensors, device, label_of, cache=cache, views=views)
        return ShardedGradients(
            tensors, tensors, label_of, processes, device, label_of, cache=cache, views=views
        )

    def _check_cheaply(self) -> None:
        if not self._watch.check_some():
            # Made of addresses.
            self._planned.clear()

    def __copy__(self) -> FlatGradients:
        raise TypeError(
            "a shallow copy of FlatGradients would take the gradients from the original; expected "
            "copy.deepcopy, which copies the parameters too"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "named": self._named,
            "left_out": self._left_out,
            "unclipped": [not needs_clip(parameter) for _, parameter in self._left_out],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for (_, parameter), unclipped in zip(state["left_out"], state["unclipped"], strict=True):
            if unclipped:
                # Copies of parameters have no attributes.
                parameter.need_clip = False
        self._hold_(state["named"], state["left_out"])

    def __repr__(self) -> str:
        buffers = ", ".join(f"{b.numel()} of {b.dtype} on {b.device}" for b in self._buffers)
        return f"FlatGradients({len(self)} parameters: {buffers})"


def refuse_copies(processes: Processes | None) -> None:
    """Refuses numbers of copies, which buffers of many parameters cannot have."""
    if processes is not None and processes.copies is not None:
        raise ValueError(
            "copies counts processes for each parameter, and FlatGradients measures buffers of "
            "many; expected process_group alone, or the parameters in place of the FlatGradients"
        )
