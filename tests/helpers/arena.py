"""Gradients in one piece of memory with guard bytes between them, and calls checked byte by byte.

A plan that belongs to another list reads or writes beside the gradients: the norm is that of
other elements, or guard bytes change.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import tritonclip
from helpers.cases import bounds_of, normal, parameters
from tritonclip import ClipByGlobalNorm, ClipByValue, ClippedOptimizer

# The alignment of torch's allocators, so that vectorised paths are taken.
ALIGNMENT = 64


# How a gradient lies in the memory: as PyTorch makes it, one element off the alignment, with its
# dimensions in the other order, with gaps between elements or only between rows, and as the
# negative or conjugate of it.
LAYOUTS = ("plain", "offset", "transposed", "gaps", "rows", "negated")


class Arena:
    """Parameters whose gradients lie in one buffer, `memory`, with guard bytes around each."""

    # Those that a random list of the kind may have.
    layouts: Sequence[str] = LAYOUTS
    # Whether calls take a loss scale and a state, and what they may do with NaN and inf.
    has_options = True
    policies: Sequence[str] = ("propagate", "error", "zero")

    def __init__(
        self,
        sizes: Iterable[int | tuple[int, ...]],
        dtypes: torch.dtype | Sequence[torch.dtype] = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        layouts: Sequence[str] | None = None,
    ) -> None:
        shapes = [(size,) if isinstance(size, int) else size for size in sizes]
        if isinstance(dtypes, torch.dtype):
            dtypes = [dtypes] * len(shapes)
        starts, end = [], ALIGNMENT
        for shape, dtype in zip(shapes, dtypes, strict=True):
            starts.append(end)
            # Room for an offset and gaps, at least one guard byte, and the next multiple of the
            # alignment.
            n_bytes = (2 * math.prod(shape) + 1) * dtype.itemsize
            end += (n_bytes // ALIGNMENT + 1) * ALIGNMENT
        self.memory = torch.arange(end, device=device).to(torch.uint8)
        self.grads = [
            self._laid_out(start, shape, dtype, layout)
            for start, shape, dtype, layout in zip(
                starts, shapes, dtypes, layouts or ["plain"] * len(shapes), strict=True
            )
        ]
        self.params = parameters(self.grads)
        self.weights = [
            normal(grad.shape, grad.dtype, device, seed=at) for at, grad in enumerate(self.grads)
        ]
        self.restore()
        self.turn = 1000 * seed
        self.fill()

    def _laid_out(
        self, start: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str
    ) -> Tensor:
        strides = torch.empty(shape, device="meta").stride()
        if layout == "transposed":
            strides = torch.empty(shape[::-1], device="meta").stride()[::-1]
        elif layout == "gaps":
            strides = tuple(2 * stride for stride in strides)
        elif layout == "rows":
            strides = (*(2 * stride for stride in strides[:-1]), strides[-1])
        grad = torch.empty(0, dtype=dtype, device=self.memory.device).set_(
            self.memory.untyped_storage(),
            start // dtype.itemsize + (layout == "offset"),
            shape,
            strides,
        )
        if layout == "negated":
            return grad.conj() if dtype.is_complex else torch._neg_view(grad)
        return grad

    def fill(self, size: float = 1.0) -> None:
        """Writes new values of about a size into every gradient, as a backward pass does."""
        self.turn += 1
        for i, grad in enumerate(self.grads):
            values = normal(grad.shape, grad.dtype, grad.device, seed=self.turn + 100_000 * i)
            grad.copy_(values * size)
        self.before = self.memory.cpu().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the parameters their values back."""
        for param, weight in zip(self.params, self.weights, strict=True):
            param.copy_(weight)

    def images(self) -> tuple[Tensor, list[Tensor]]:
        """The bytes that the last fill left, and the gradients to clip as views of them."""
        grads = [p.grad for p in self.params if getattr(p, "need_clip", True)]
        assert all(p.grad is grad for p, grad in zip(self.params, self.grads, strict=True))
        memory = self.before.clone()
        return memory, [self._image(memory, grad) for grad in grads if grad is not None]

    def accepts(self, rule: Any) -> bool:
        """Whether the call takes a rule."""
        return not (isinstance(rule, ClipByValue) and any(map(Tensor.is_complex, self.grads)))

    def call(self, rule: Any, **options: Any) -> Any:
        """The call that is tested; returns what it measured."""
        return tritonclip.clip_(self.params, rule, **options)

    def _image(self, memory: Tensor, grad: Tensor) -> Tensor:
        """The same view of a copy of the memory."""
        image = torch.empty(0, dtype=grad.dtype).set_(
            memory.untyped_storage(), grad.storage_offset(), grad.shape, grad.stride()
        )
        image = torch._neg_view(image) if grad.is_neg() else image
        return image.conj() if grad.is_conj() else image


class TensorsArena(Arena):
    """The gradients themselves are handed over."""

    def accepts(self, rule: Any) -> bool:
        return super().accepts(rule) and not rule.per_unit

    def call(self, rule: Any, **options: Any) -> Any:
        return tritonclip.clip_tensors_(self.grads, rule, **options)


class TorchArena(Arena):
    """Clipped by the functions that have torch's names."""

    has_options = False
    policies: Sequence[str] = ("propagate", "error")

    def accepts(self, rule: Any) -> bool:
        if isinstance(rule, ClipByValue):
            low, high = bounds_of(rule)
            return super().accepts(rule) and -low == high
        return isinstance(rule, ClipByGlobalNorm) and rule.eps == 1e-6

    def call(self, rule: Any, **options: Any) -> Any:
        error = options.get("nonfinite") == "error"
        if isinstance(rule, ClipByValue):
            return tritonclip.clip_grad_value_(self.params, bounds_of(rule)[1])
        return tritonclip.clip_grad_norm_(self.params, rule.max_norm, rule.norm_type, error)


class TwoCallsArena(TorchArena):
    """The norm is measured by one of torch's functions, and handed to another."""

    def accepts(self, rule: Any) -> bool:
        return super().accepts(rule) and not rule.clamps

    def call(self, rule: Any, **options: Any) -> Any:
        error = options.get("nonfinite") == "error"
        norm = tritonclip.get_total_norm(self.grads, rule.norm_type, error)
        tritonclip.clip_grads_with_norm_(self.params, rule.max_norm, norm)
        return norm


class OptimizerArena(Arena):
    """Clipped by an optimizer that leaves parameters as they are."""

    # For a norm, the largest one that is not skipped, by the reference; None for any.
    takes: Any = None
    fused = False
    policies: Sequence[str] = (*Arena.policies, "skip")
    # Optimizers of torch do not update by negated gradients.
    layouts: Sequence[str] = LAYOUTS[:-1]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        inner = torch.optim.SGD(self.params, lr=0.0, fused=self.fused)
        self.optimizer = ClippedOptimizer(inner, 1.0)

    def call(self, rule: Any, **options: Any) -> Any:
        self.optimizer.clip = rule
        self.optimizer.nonfinite = options.get("nonfinite", "propagate")
        if "grad_scale" in options:
            scaler = tritonclip.GradScaler("cpu", init_scale=options["grad_scale"])
            scaler.scale(torch.ones(()))
            scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        return self.optimizer.stats.last_norm


class FusedArena(OptimizerArena):
    """The wrapped optimizer decides whether a step is left out."""

    fused = True
    # On a CPU, torch's fused optimizers read every gradient as a run of memory.
    layouts: Sequence[str] = LAYOUTS[:2]
