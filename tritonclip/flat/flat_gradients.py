"""`FlatGradients`: the gradients of many parameters as views of a buffer per device and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip import settings
from tritonclip.distributed.domain import Processes
from tritonclip.engine.arguments import GradientSource, labelled, needs_clip
from tritonclip.engine.gradients import Gradients, collect
from tritonclip.engine.memory import is_dense
from tritonclip.engine.plan import FLOAT8
from tritonclip.messages import join_names
from tritonclip.modes import PLAIN, is_observed, outside_inference, without_grad
from tritonclip.rules import Rule

# The bytes of one vector access. torch's fused optimizers and our kernels want gradients to start
# at a multiple of it.
_VECTOR = 16


class FlatGradients(GradientSource):
    """Makes the `.grad` of every parameter a view of one buffer for each device and dtype.

    Pass it to :func:`clip_` in place of the parameters. A rule with one norm, or by value, then
    reads the few buffers; a rule that measures each gradient reads each view. One memset per buffer
    sets all gradients to zero, and one all-reduce per buffer sums them.

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

    Gradients in buffers are never None: set them to 0 by :meth:`zero_`, or by
    `optimizer.zero_grad(set_to_none=False)`. docs/clipping.md says what else changes in training.

    Args:
        parameters: tensors, a module, or (name, parameter) pairs, whose names appear in error
            messages. Each counts once. Those that require no gradient or have `need_clip = False`
            are left out: they are neither in the buffers nor clipped. Existing gradients keep their
            values. Dtypes are floating-point or complex; dtypes and devices may mix.

    Raises:
        TypeError: an argument without tensors; a parameter or gradient that is of a tensor
            subclass, such as DTensor, or sparse.
        ValueError: no parameter that requires a gradient; one that is not a leaf; a gradient whose
            shape is not that of its parameter.

    Notes:
        Outside of torch.compile, :func:`clip_` and :meth:`zero_` compare the address of every
        gradient, and raise RuntimeError if one is no longer a view of its buffer.

        A FlatGradients keeps its parameters alive. After a parameter is replaced, frozen, unfrozen
        or marked with `need_clip`, make a new one. Copy or pickle it together with its model.
    """

    def __init__(
        self, parameters: Tensor | Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        items, label_of = labelled(parameters)
        held: dict[int, tuple[str, Tensor]] = {}
        for position, parameter in enumerate(items):
            if parameter.requires_grad and needs_clip(parameter):
                held.setdefault(id(parameter), (label_of(position), parameter))
        if not held:
            raise ValueError(
                "expected at least one parameter that requires a gradient and has no need_clip = "
                f"False, got none among {len(items)}; an iterator that was used before is empty"
            )
        self._named = list(held.values())
        self._unclipped = [parameter for parameter in items if not needs_clip(parameter)]
        self.attach_()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The memory of all gradients, one 1-d tensor for each device and dtype."""
        return self._buffers

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and parameters, as `named_parameters()` does."""
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    @without_grad
    def attach_(self) -> None:
        """Makes every `.grad` a view again, of new buffers that keep the gradients' values.

        Call it after gradients were replaced, or the model moved to another device or dtype.

        Raises:
            TypeError, ValueError: parameters that the constructor refuses; nothing is changed.
        """
        for label, parameter in self._named:
            _refuse(label, parameter)
        self._parameters = [parameter for _, parameter in self._named]
        self._buffers, views = _lay_out(self._parameters)
        for parameter, view in zip(self._parameters, views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view
        self._addresses = list(map(Tensor.data_ptr, views))
        # The buffers as a list with its plan, and the settings for which the plan was made.
        self._known: tuple[settings.Settings, Gradients] | None = None

    def zero_(self) -> None:
        """Sets all gradients to 0 by a memset per buffer, and those with need_clip=False to None.

        Raises:
            RuntimeError: a gradient that is no longer a view of the buffers.
        """
        if not torch.compiler.is_compiling() and (error := self._find_lost()) is not None:
            raise error
        for parameter in self._unclipped:
            parameter.grad = None
        torch._foreach_zero_(list(self._buffers))

    def gradients(self, rule: Rule, state: object, processes: Processes | None) -> Gradients:
        """Returns the buffers as gradients, or the views if each is measured or known by itself."""
        lost, setting = self._find_lost(), settings.current()
        by_view = rule.per_gradient or setting.verifying or state is not None
        if lost is None and processes is None and not by_view:
            if is_observed():
                return _Buffers(self)
            if self._known is None or self._known[0] != setting:
                self._known = setting, _Buffers(self)
            return self._known[1]
        gradients = collect(self._named, processes=processes)
        if lost is not None:
            gradients.reject_(lost)
        return gradients

    def _find_lost(self) -> RuntimeError | None:
        """Returns an error if gradients are no longer views of the buffers, or None."""
        try:
            if [p.grad.data_ptr() for p in self._parameters] == self._addresses:  # type: ignore[union-attr]
                return None
        except (AttributeError, RuntimeError, NotImplementedError):
            # A gradient is None, or has no address.
            pass

        def is_at(grad: Tensor | None, address: int) -> bool:
            return grad is not None and not grad.is_sparse and grad.data_ptr() == address

        pairs = zip(self, self._addresses, strict=True)
        lost = [label for (label, p), address in pairs if not is_at(p.grad, address)]
        return RuntimeError(
            f"the gradient of {join_names(lost)} is no longer a view of FlatGradients: "
            "zero_grad(set_to_none=True), the default, an assignment to .grad or a move of the "
            "model replaced it. Nothing was changed. Call flat.attach_() to make the gradients "
            "views again, and flat.zero_() in place of zero_grad()"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"_named": self._named, "_unclipped": self._unclipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.attach_()


class _Buffers(Gradients):
    """The buffers as a gradient list, whose messages name parameters."""

    def __init__(self, flat: FlatGradients) -> None:
        super().__init__(flat.buffers[0].device, "buffers[{}]".format)
        self._named = flat._named
        self.take_(list(flat.buffers))

    def labels(self, indices: Iterable[int]) -> str:
        buffers = {(self.tensors[i].device, self.tensors[i].dtype) for i in indices}
        return join_names([name for name, p in self._named if (p.device, p.dtype) in buffers])

    def culprits(self, indices: Iterable[int]) -> str:
        """Names the parameters whose gradients are not finite."""
        return join_names([name for name, p in self._named if not bool(p.grad.isfinite().all())])  # type: ignore[union-attr]


def _refuse(label: str, parameter: Tensor) -> None:
    """Refuses a parameter or a gradient that no buffer can hold."""
    if not parameter.is_leaf:
        raise ValueError(
            f"{label} is computed from other tensors and never gets a gradient; expected leaves"
        )
    for noun, tensor in ((label, parameter), (f"the gradient of {label}", parameter.grad)):
        if tensor is None:
            continue
        if type(tensor) not in PLAIN or tensor.layout != torch.strided:
            raise TypeError(
                f"{noun} is a {type(tensor).__name__} of layout {tensor.layout}; FlatGradients "
                "holds dense gradients of plain tensors only"
            )
        if tensor.dtype in FLOAT8:
            raise TypeError(
                f"{noun} has dtype {tensor.dtype}; clip in float32 or bfloat16, before it is "
                "converted"
            )
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{noun} has shape {tuple(tensor.shape)}; expected that of the parameter, "
                f"{tuple(parameter.shape)}"
            )


def _lay_out(parameters: list[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Makes buffers of zeros, and a view for each parameter."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    buffers: list[Tensor] = []
    views: dict[int, Tensor] = {}
    for (device, dtype), members in kinds.items():
        n_elements = sum(map(Tensor.numel, members))
        # Backward could not add to an inference tensor.
        buffer = outside_inference(torch.zeros)(n_elements, dtype=dtype, device=device)
        offset = 0
        for parameter in sorted(members, key=lambda p: p.numel() * p.element_size() % _VECTOR != 0):
            stride = parameter.stride()
            # Autograd lays out a gradient as its parameter if that is dense, else contiguously.
            if not is_dense(parameter):
                stride = torch.empty(parameter.shape, device="meta").stride()
            views[id(parameter)] = buffer.as_strided(parameter.shape, stride, offset)
            offset += parameter.numel()
        buffers.append(buffer)
    return tuple(buffers), [views[id(parameter)] for parameter in parameters]
