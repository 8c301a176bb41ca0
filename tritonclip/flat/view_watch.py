"""Notices gradients that are no longer views of their buffers, in constant time a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn
from weakref import ref

import torch
from torch import Tensor

from tritonclip.flat.layout import Views, is_clipped, is_same, is_wanted
from tritonclip.messages import join_names

# Addresses compared at every call beside the first and the last.
_COMPARED = 16
# Names and weak references: a replaced parameter dies, and its view with it, which the watch sees.
Named = Sequence[tuple[str, ref[Tensor]]]


class ViewWatch:
    """Looks for views that are gone or were replaced.

    Args:
        named: parameters, all of which are alive and have their views as gradients.
        left_out: parameters that are not held.
        views: of the parameters, in order.
    """

    def __init__(self, named: Named, left_out: Named, views: Views) -> None:
        self._named, self._left_out, self._views = named, left_out, views
        # Those that are not frozen get a gradient from backward all the same.
        self._unclipped = [
            weak
            for _, weak in left_out
            if (parameter := weak()) is not None and not is_clipped(parameter)
        ]
        self._turn = 0
        # Filled when views die: whatever replaces a gradient drops the old one.
        self._lost: list[str] = []
        self._seen = []
        for (label, parameter), (_, weak) in zip(present(named), named, strict=True):
            view = parameter.grad
            assert view is not None
            self._seen.append((weak, ref(view, _Note(self._lost, label)), view.data_ptr()))
        firsts = {slot.buffer: at for at, slot in reversed(list(enumerate(views.slots)))}
        # The first of each buffer, which moves as a whole, and the last of all.
        self._ends = (*firsts.values(), len(named) - 1)

    def check_some(self) -> bool:
        """Looks for dead views, and compares some addresses, others at every call.

        Returns:
            Whether no memory moved; False if it moved with all its views, as
            `share_memory()` moves it.

        Raises:
            RuntimeError: as for `check_all`, except for parameters that were frozen later.
        """
        n, n_left_out = len(self._named), len(self._left_out)
        first, self._turn = self._turn * _COMPARED, self._turn + 1
        if self._lost:
            self._raise_replaced(self._lost)
        start, stays = first % n, True
        for at in (*self._ends, *range(start, min(n, start + _COMPARED))):
            weak, view, address = self._seen[at]
            parameter = weak()
            grad = None if parameter is None else parameter.grad
            if grad is None or grad is not view() or grad.data_ptr() != address:
                self._update_addresses_()
                stays = False
                break
            if not getattr(parameter, "need_clip", True):
                self._refuse_all_but(is_clipped)
        if n_left_out:
            start = first % n_left_out
            _refuse_wanted(self._left_out[start : start + _COMPARED])
        return stays

    def zero_left_out_(self) -> None:
        """Sets the gradients of parameters with `need_clip = False` to 0, where they have one."""
        for weak in self._unclipped:
            parameter = weak()
            if parameter is not None:
                zero_gradient_(parameter)

    def check_all(self) -> None:
        """Compares the gradient of every parameter with its view.

        Raises:
            RuntimeError: names the parameters that no longer exist; whose gradient is no longer a
                view; that were frozen or got `need_clip = False` later, or lost it.
        """
        self._check_views()
        self._refuse_all_but(is_wanted)
        _refuse_wanted(self._left_out)

    def _refuse_all_but(self, is_held: Callable[[Tensor], bool]) -> None:
        """Raises if a parameter that is held should be left out now."""
        left_out = [label for label, p in present(self._named) if not is_held(p)]
        if left_out:
            raise RuntimeError(
                f"{join_names(left_out)} was frozen or got need_clip = False after FlatGradients "
                "was made, which holds its gradient; do so before, or make a new FlatGradients"
            )

    def _check_views(self) -> None:
        replaced = [
            label
            for (label, parameter), view in zip(present(self._named), self._views, strict=True)
            if not is_same(parameter.grad, view)
        ]
        if replaced or self._lost:
            self._raise_replaced(replaced or self._lost)

    def _update_addresses_(self) -> None:
        """Takes over the addresses of buffers that moved with all their views."""
        self._check_views()
        self._seen = [
            (weak, known, view.data_ptr())
            for (weak, known, _), view in zip(self._seen, self._views, strict=True)
        ]

    def _raise_replaced(self, labels: Sequence[str]) -> NoReturn:
        present(self._named)
        raise RuntimeError(
            f"the gradient of {join_names(labels)} is no longer a view of FlatGradients: "
            "zero_grad(set_to_none=True), which is the default, an assignment to .grad or a move "
            "of the model replaced it. Nothing was changed. Call flat.attach_() to make the "
            "gradients views again, and flat.zero_() in place of zero_grad()"
        )


def present(named: Named) -> list[tuple[str, Tensor]]:
    """Names and parameters.

    Raises:
        RuntimeError: names the parameters that no longer exist.
    """
    found = [(label, weak()) for label, weak in named]
    gone = [label for label, parameter in found if parameter is None]
    if gone:
        raise RuntimeError(
            f"{join_names(gone)} no longer exists: another parameter replaced it in the model or "
            "the optimizer, or the model was deleted. FlatGradients would neither clip the "
            "gradient of another parameter nor set it to 0. Nothing was changed. Make a new "
            "FlatGradients of the parameters that the model has now"
        )
    return [(label, parameter) for label, parameter in found if parameter is not None]


def _refuse_wanted(left_out: Named) -> None:
    """Raises if a parameter that was left out needs to be clipped now."""
    wanted = [label for label, weak in left_out if (p := weak()) is not None and is_wanted(p)]
    if wanted:
        raise RuntimeError(
            f"{join_names(wanted)} requires a gradient and has no need_clip = False now, which was "
            "not so when FlatGradients was made: its gradient would neither be clipped nor set to "
            "0; make a new FlatGradients"
        )


def zero_gradient_(parameter: Tensor) -> None:
    """Sets a gradient to 0, or drops one made in inference mode; outside of any graph."""
    grad = parameter.grad
    if grad is None:
        return
    if not torch.compiler.is_compiling() and grad.is_inference():
        # Outside of inference mode it cannot be written.
        parameter.grad = None
        return
    if grad.requires_grad:
        if grad.grad_fn is None:
            grad.requires_grad_(False)
        else:
            grad.detach_()
    grad.zero_()


class _Note:
    """Records whose view died."""

    __slots__ = ("_label", "_lost")

    def __init__(self, lost: list[str], label: str) -> None:
        self._lost, self._label = lost, label

    def __call__(self, _: object) -> None:
        self._lost.append(self._label)
