"""Notices gradients that are no longer views of their buffers, in constant time a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tritonclip.engine.arguments import needs_clip
from tritonclip.flat.layout import Views, is_same, is_wanted
from tritonclip.messages import join_names

# Addresses compared at every call beside the first and the last.
_COMPARED = 16
# Names and parameters.
Named = Sequence[tuple[str, Tensor]]
# The number of tensors that have a storage, given its address; private to torch.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class ViewWatch:
    """Looks for views that were replaced, and for parameters left out that are trained."""

    def __init__(self, named: Named, left_out: Named, views: Views) -> None:
        self._named, self._left_out, self._views = named, left_out, views
        # Those that are not frozen get a gradient from backward all the same.
        self._unclipped = [parameter for _, parameter in left_out if not needs_clip(parameter)]
        self._turn = 0
        firsts = {slot.buffer: at for at, slot in reversed(list(enumerate(views.slots)))}
        # The first of each buffer, which moves as a whole, and the last of all.
        self._ends = (*firsts.values(), len(named) - 1)
        self.read_addresses_()

    def read_addresses_(self) -> None:
        """Takes over where the views are, and how many tensors have the memory of each buffer."""
        # Ids: torch.utils.swap_tensors refuses gradients that have weak references.
        self._seen = [(id(p.grad), view.data_ptr()) for (_, p), view in self._both()]
        storages = [buffer.untyped_storage()._cdata for buffer in self._views.buffers]
        count = _use_count or (lambda _: 0)
        self._counts = [(storage, count(storage)) for storage in storages]

    def _both(self) -> list[tuple[tuple[str, Tensor], Tensor]]:
        return list(zip(self._named, self._views, strict=True))

    def check_some(self) -> bool:
        """Counts the views, and compares some addresses, others at every call.

        False if memory moved with all its views, as `share_memory()` moves it.
        """
        n, n_left_out = len(self._named), len(self._left_out)
        first, self._turn = self._turn * _COMPARED, self._turn + 1
        start, stays = first % n, True
        for storage, count in self._counts:
            # A view that is replaced gives up the memory; other views come and go.
            if _use_count is None or _use_count(storage) != count:
                self._check_views()
                self.read_addresses_()
                break
        for at in (*self._ends, *range(start, min(n, start + _COMPARED))):
            seen, address = self._seen[at]
            parameter = self._named[at][1]
            grad = parameter.grad
            if grad is None or id(grad) != seen or grad.data_ptr() != address:
                self._check_views()
                self.read_addresses_()
                stays = False
                break
            if not getattr(parameter, "need_clip", True):
                self._refuse_all_but(needs_clip)
        if n_left_out:
            start = first % n_left_out
            _refuse_wanted(self._left_out[start : start + _COMPARED])
        return stays

    def zero_left_out_(self) -> None:
        """Sets the gradients of parameters with `need_clip = False` to 0, where they have one."""
        for parameter in self._unclipped:
            zero_gradient_(parameter)

    def check_all(self) -> None:
        """Compares the gradient of every parameter with its view; finds what was frozen since."""
        self._check_views()
        self._refuse_all_but(is_wanted)
        _refuse_wanted(self._left_out)

    def _refuse_all_but(self, is_held: Callable[[Tensor], bool]) -> None:
        """Raises if a parameter that is held should be left out now."""
        left_out = [label for label, p in self._named if not is_held(p)]
        if left_out:
            raise RuntimeError(
                f"{join_names(left_out)} was frozen or got need_clip = False after FlatGradients "
                "was made, which holds its gradient; do so before, or make a new FlatGradients"
            )

    def _check_views(self) -> None:
        replaced = [label for (label, p), view in self._both() if not is_same(p.grad, view)]
        if replaced:
            raise RuntimeError(
                f"the gradient of {join_names(replaced)} is no longer a view of FlatGradients: "
                "zero_grad(set_to_none=True), the default, an assignment to .grad or a move "
                "of the model replaced it. Nothing was changed. Call flat.attach_() to make the "
                "gradients views again, and flat.zero_() in place of zero_grad()"
            )


def _refuse_wanted(left_out: Named) -> None:
    wanted = [label for label, parameter in left_out if is_wanted(parameter)]
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
