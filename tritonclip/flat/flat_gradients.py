"""Real flattening: gradients of many parameters as views of one buffer a device and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip import settings
from tritonclip.distributed.domain import Holders
from tritonclip.distributed.sharding import shares_of
from tritonclip.engine.gradients import Gradients, labelled
from tritonclip.engine.planner import PlanCache, plan_
from tritonclip.engine.refusals import some
from tritonclip.flat.layout import Views, is_same, is_wanted, lay_out, refuse
from tritonclip.grad_mode import without_grad

# Addresses compared at every call beside the first and the last.
_COMPARED = 16


class FlatGradients:
    """Makes the `.grad` of every parameter a view of one buffer for each device and dtype.

    Pass it in place of the parameters: a call then looks at the buffers, and its cost on the host
    does not grow with the number of parameters (for :class:`ClipByNorm` only where dtypes mix). One
    memset sets all gradients to zero, one all-reduce sums them up.

    Gradients now are always there: set them to 0 by :meth:`zero_`, or by
    `optimizer.zero_grad(set_to_none=False)`. A parameter that took no part in a step has a gradient
    of 0 in place of None: optimizers apply momentum and weight decay to it. `backward` adds to the
    buffers in place.

    Args:
        parameters: an iterable of tensors, one tensor, a module, or (name, parameter) pairs, whose
            names stand in error messages. Those that require no gradient or have
            `need_clip = False` are left out: neither clipped nor set to 0. Each parameter counts
            once. Gradients that are there already are kept. Any floating-point or complex dtype,
            any device; they may mix.

    Raises:
        TypeError: an argument without tensors; tensor subclasses; gradients that are sparse or of
            another dtype.
        ValueError: no parameter that requires a gradient; one that is no leaf; a gradient of
            another shape.

    Notes:
        Every call outside of torch.compile checks, in constant time, that no view was dropped, and
        compares the addresses of the first, the last and 16 others, in turn. This catches
        `zero_grad(set_to_none=True)`, an assignment to `.grad`, `backward(create_graph=True)` and a
        parameter in whose place another one was put (`load_state_dict(assign=True)`) at once, and a
        move of a part of the model (`model.layer.to(...)`) or a parameter that was left out and is
        unfrozen (also 16 of these at every call) after some calls. Missed are a view or a replaced
        parameter that somebody else keeps alive, and parameters that were frozen or got
        `need_clip = False` later; all but a replaced parameter :meth:`check` and `verify()` find. A
        :class:`ClippedOptimizer` finds every parameter that was replaced in its groups. A parameter
        frozen later keeps a gradient of 0.

        It keeps no parameter alive: copy or pickle it together with its model or optimizer.
        `share_memory()` moves buffers and views together, and they stay in use.

        DistributedDataParallel needs `gradient_as_bucket_view=False`, its default: with it, DDP
        makes gradients views of its own buffers. FSDP is not supported.

        Gradients whose size is a multiple of 16 bytes come first, so that each of them starts at
        one; the others follow. There is no padding.

    Example:
        >>> import tritonclip
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> flat = FlatGradients(layer.parameters())
        >>> layer(torch.tensor([3.0, 4.0])).backward()
        >>> tritonclip.clip_(flat, 1.0)
        tensor(5.)
        >>> flat.buffers
        (tensor([0.6000, 0.8000]),)
        >>> flat.zero_()
        >>> layer.weight.grad
        tensor([[0., 0.]])
    """

    def __init__(
        self, parameters: Tensor | Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        items, label_of = labelled(parameters)
        chosen: dict[int, tuple[str, Tensor]] = {}
        left_out: dict[int, tuple[str, Tensor]] = {}
        for position, parameter in enumerate(items):
            kind = chosen if is_wanted(parameter) else left_out
            kind.setdefault(id(parameter), (label_of(position), parameter))
        if not chosen:
            raise ValueError(
                "expected at least one parameter that requires a gradient and has no "
                f"need_clip = False, got {len(items)} parameters without"
            )
        self._hold_(chosen.values(), left_out.values())

    def _hold_(
        self, named: Iterable[tuple[str, Tensor]], left_out: Iterable[tuple[str, Tensor]]
    ) -> None:
        # Weakly: with a parameter that was replaced dies its view, which `_lost` tells at once.
        self._named = [(label, ref(parameter)) for label, parameter in named]
        self._left_out = [(label, ref(parameter)) for label, parameter in left_out]
        self.attach_()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All gradients: one 1-d tensor for each device and dtype."""
        return self._buffers

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, in order."""
        return [parameter for _, parameter in self]

    @property
    def left_out(self) -> list[Tensor]:
        """The parameters that it was given and does not hold, in order."""
        # torch.compile cannot trace an assignment within a comprehension.
        found = [weak() for _, weak in self._left_out]
        return [parameter for parameter in found if parameter is not None]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters, as `named_parameters()` yields them.

        Raises:
            RuntimeError: a parameter that is gone.
        """
        for label, weak in self._named:
            parameter = weak()
            if parameter is None:
                self._raise_gone()
            else:
                yield label, parameter

    def __len__(self) -> int:
        return len(self._named)

    @without_grad
    def attach_(self) -> None:
        """Makes every `.grad` a view again, in new buffers; keeps the gradients' values.

        For after something replaced gradients, or moved the model to another device or dtype.

        Raises:
            TypeError, ValueError: as the constructor; nothing was changed.
            RuntimeError: a parameter that is gone; nothing was changed.
        """
        named = list(self)
        refuse(named)
        buffers, places = lay_out(named)
        views = Views(buffers, places)
        grads = list(views)
        for (_, parameter), view in zip(named, grads, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        # From here on nothing fails. Filled by the death of views: whoever replaces a gradient
        # drops the old one.
        lost: list[str] = []
        watch = []
        for (label, parameter), view in zip(named, grads, strict=True):
            parameter.grad = view
            watch.append((ref(parameter), ref(view, _Note(lost, label)), view.data_ptr()))
        self._buffers, self._places, self._views = buffers, places, views
        self._lost, self._watch, self._turn = lost, watch, 0
        self._device = named[0][1].device
        firsts = {place.buffer: at for at, place in reversed(list(enumerate(places)))}
        # One of each buffer, all of which move with it, and the last.
        self._ends = (*firsts.values(), len(named) - 1)
        self._planned: dict[tuple[bool, str, object], Gradients] = {}

    def zero_(self) -> None:
        """Sets all gradients to 0, one memset a buffer.

        Raises:
            RuntimeError: a gradient that is no view any more.
        """
        if not torch.compiler.is_compiling():
            self._check_cheaply()
        torch._foreach_zero_(list(self._buffers))

    def check(self) -> None:
        """Checks every parameter.

        Raises:
            RuntimeError: names the parameters that are gone, whose gradient is no view of the
                buffers any more, that are frozen or have `need_clip = False` by now, or that no
                longer are or have.
        """
        self._check_views()
        left_out = [label for label, p in self if not is_wanted(p)]
        if left_out:
            raise RuntimeError(
                f"{some(left_out)} was frozen or got need_clip = False after FlatGradients was "
                "made, which holds its gradient; do so before, or make a new FlatGradients"
            )
        self._refuse_wanted(self._left_out)

    def _check_views(self) -> None:
        """Compares the gradient of every parameter with its view."""
        replaced = [
            label
            for (label, parameter), view in zip(self, self._views, strict=True)
            if not is_same(parameter.grad, view)
        ]
        if replaced or self._lost:
            self._raise_replaced(replaced or self._lost)

    def gradients(
        self, *, per_gradient: bool, holders: Holders | None = None, weights: bool = False
    ) -> Gradients:
        """The gradients with their plan, after the check in constant time.

        Under `verify()`, after a full check.

        Args:
            per_gradient: each gradient is measured, rather than all together.
            holders: the processes that the gradients are spread over.
            weights: the parameters will be read too, all of which are then looked up.

        Raises:
            RuntimeError: a gradient that is no view any more.
            ValueError: `copies`, because buffers hold many parameters.
        """
        if settings.verifying():
            self.check()
        self._check_cheaply()
        key = (per_gradient, settings.backend(), None if holders is None else holders.group)
        planned = self._planned.get(key)
        if planned is None or (holders is not None and holders.copies is not None):
            planned = self._planned[key] = self._plan(per_gradient, holders)
        return planned.beside(self.parameters) if weights else planned

    def _plan(self, per_gradient: bool, holders: Holders | None) -> Gradients:
        """The buffers as gradients, or the gradients that they hold as flat pieces."""
        pieces = list(self._buffers)
        if per_gradient:
            pieces = [
                self._buffers[p.buffer][p.offset : p.offset + p.n_elements] for p in self._places
            ]
        labels = [place.label for place in self._places]
        result = Gradients(pieces, self._device, labels.__getitem__)
        if holders is not None:
            if holders.copies is not None:
                raise ValueError(
                    "copies counts the holders of single parameters, and FlatGradients measures "
                    "buffers of many; expected process_group alone, or the parameters in place of "
                    "the FlatGradients"
                )
            shares = shares_of(pieces, pieces, holders, labels.__getitem__)
            result.sharding = None if shares is None else shares.sharding
        plan_(result, PlanCache(capacity=1))
        result.tensors, result.versions = self._views, self._buffers
        return result

    def _check_cheaply(self) -> None:
        """Looks for views that are gone, and at the addresses of some, others at every call."""
        n, n_left_out = len(self._named), len(self._left_out)
        first, self._turn = self._turn * _COMPARED, self._turn + 1
        if self._lost:
            self._raise_replaced(self._lost)
        start = first % n
        for at in (*self._ends, *range(start, min(n, start + _COMPARED))):
            weak, view, address = self._watch[at]
            parameter = weak()
            grad = None if parameter is None else parameter.grad
            if grad is None or grad is not view() or grad.data_ptr() != address:
                self._follow_()
                break
        if n_left_out:
            start = first % n_left_out
            self._refuse_wanted(self._left_out[start : start + _COMPARED])

    def _follow_(self) -> None:
        """Goes on with buffers whose memory moved with all its views, as `share_memory()` does."""
        self._check_views()
        self._watch = [
            (weak, known, view.data_ptr())
            for (weak, known, _), view in zip(self._watch, self._views, strict=True)
        ]
        # Made of addresses.
        self._planned.clear()

    def _refuse_wanted(self, left_out: Sequence[tuple[str, ref[Tensor]]]) -> None:
        """Refuses to go on without parameters that were left out and should be no more."""
        wanted = [label for label, weak in left_out if (p := weak()) is not None and is_wanted(p)]
        if wanted:
            raise RuntimeError(
                f"{some(wanted)} requires a gradient and has no need_clip = False by now, but did "
                "not when FlatGradients was made, which would neither clip nor zero its gradient; "
                "make a new FlatGradients"
            )

    def _raise_gone(self) -> NoReturn:
        gone = [label for label, parameter in self._named if parameter() is None]
        raise RuntimeError(
            f"{some(gone)} is gone: another parameter took its place in the model or the "
            "optimizer, whose gradient FlatGradients would neither clip nor zero, or the model was "
            "let go. Nothing was changed. Make a new FlatGradients of the parameters that are there"
        )

    def _raise_replaced(self, labels: Sequence[str]) -> NoReturn:
        if any(parameter() is None for _, parameter in self._named):
            self._raise_gone()
        raise RuntimeError(
            f"the gradient of {some(labels)} is no view of FlatGradients any more: "
            "zero_grad(set_to_none=True), which is the default, an assignment to .grad or a move "
            "of the model replaced it. Nothing was changed. Call flat.attach_() to go on with the "
            "gradients that are there, and flat.zero_() in place of zero_grad()"
        )

    def __copy__(self) -> FlatGradients:
        raise TypeError(
            "a shallow copy of FlatGradients would take the gradients from the original; expected "
            "copy.deepcopy, which copies the parameters too"
        )

    def __getstate__(self) -> dict[str, Any]:
        left_out = [(label, p) for label, weak in self._left_out if (p := weak()) is not None]
        return {
            "named": list(self),
            "left_out": left_out,
            "unclipped": [not getattr(parameter, "need_clip", True) for _, parameter in left_out],
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


class _Note:
    """Remembers whose view is gone."""

    __slots__ = ("_label", "_lost")

    def __init__(self, lost: list[str], label: str) -> None:
        self._lost, self._label = lost, label

    def __call__(self, _: object) -> None:
        self._lost.append(self._label)
