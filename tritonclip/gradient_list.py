"""What one call clips: gradients, grouped by device and dtype. Data only."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


@dataclass(slots=True)
class Group:
    """Gradients of one device and dtype.

    Attributes:
        tensors: to measure and to write: real, each without overlap; complex gradients appear as
            pairs of reals.
        places: where each stands in the gradient list.
        flat: whether each is contiguous, so that a pointer and a size say it all.
        pairs: whether these are complex gradients.
        addresses: of contiguous tensors, where they are known already.
        base: what all tensors are views of, in FlatGradients.
        memo: what backends remember of groups like this one: in all but addresses.
    """

    tensors: list[Tensor]
    places: Sequence[int]
    flat: bool
    pairs: bool = False
    addresses: list[int] | None = None
    base: Tensor | None = None
    memo: dict[Any, Any] | None = None

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors: real, also for complex gradients."""
        return self.tensors[0].dtype

    @property
    def written(self) -> list[Tensor]:
        """What an in-place write shows in: views count versions with their base."""
        return self.tensors if self.base is None else [self.base]

    @property
    def sizes(self) -> list[int]:
        """How many elements each tensor has."""
        return self._remembered("sizes", lambda: list(map(Tensor.numel, self.tensors)))

    @property
    def has_negated(self) -> bool:
        """Whether any tensor is lazily negated."""
        return self._remembered("has_negated", lambda: any(map(Tensor.is_neg, self.tensors)))

    @property
    def has_inference(self) -> bool:
        """Whether any tensor was made in inference mode, outside of which it is read-only."""
        return self._remembered(
            "has_inference", lambda: any(map(Tensor.is_inference, self.tensors))
        )

    def _remembered(self, what: str, look: Callable[[], _T]) -> _T:
        """What is the same of all groups like this one, looked at once."""
        if self.memo is None:
            return look()
        if what not in self.memo:
            self.memo[what] = look()
        known: _T = self.memo[what]
        return known

    def moduli(self) -> list[Tensor]:
        """The moduli of complex gradients, 1-d, in new memory."""
        # torch has no modulus of half-precision complex numbers on every device.
        wide = [t.float() if t.dtype == torch.float16 else t for t in self.tensors]
        return [torch.view_as_complex(t.reshape(-1, 2)).abs() for t in wide]


@dataclass(slots=True)
class GradientList:
    """The gradients that one call clips.

    Attributes:
        device: where results go: of the first gradient, else of the first parameter.
        grads: the gradients as users see them, each once, in order.
        groups: what backends read and write.
        label_of: what messages call the i-th of what the user handed over.
        positions: gives the place of each gradient among what the user handed over.
        remark: why there are no gradients, where that is hardly meant.
    """

    device: torch.device
    grads: Sequence[Tensor]
    label_of: Callable[[int], str]
    positions: Callable[[], Sequence[int]]
    remark: str = ""
    groups: list[Group] = field(default_factory=list)
    # Sparse gradients that had to be coalesced into a new tensor, and that tensor.
    _coalesced: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _sparse: list[Tensor] = field(default_factory=list)

    @property
    def result_dtype(self) -> torch.dtype:
        """float64 where any gradient is, else float32."""
        return (
            torch.float64 if any(g.dtype == torch.float64 for g in self.groups) else torch.float32
        )

    @property
    def has_sparse(self) -> bool:
        """Whether any gradient is sparse."""
        return bool(self._sparse)

    def label(self, place: int) -> str:
        """How messages call the gradient at a place of the list."""
        return self.label_of(self.positions()[place])

    def labels(self, places: Iterable[int]) -> str:
        """Some gradients for a message."""
        positions = self.positions()
        return some([self.label_of(positions[place]) for place in places])

    def places_where(self, condition: Callable[[Tensor], bool]) -> list[int]:
        """The places of gradients of a kind."""
        return [place for place, grad in enumerate(self.grads) if condition(grad)]

    def finish_writing(self) -> None:
        """Makes what was written to the groups arrive in sparse gradients, for autograd too."""
        for sparse, coalesced in self._coalesced:
            sparse.copy_(coalesced)
        if self._sparse:
            torch.autograd.graph.increment_version(self._sparse)


def some(labels: Sequence[str]) -> str:
    """Names for a message, at most eight of them."""
    more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    return ", ".join(labels[:8]) + more
