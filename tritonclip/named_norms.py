"""Norms and statistics of each parameter's gradient, or of each group of them, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tritonclip.backends.operators import combine, combine_numbers, wide_dtype
from tritonclip.clipping import Parameters
from tritonclip.distributed.shards import dtensor_class
from tritonclip.engine import execute
from tritonclip.engine.arguments import labelled, needs_clip
from tritonclip.engine.gradients import collect
from tritonclip.modes import refuse_tracer, without_grad
from tritonclip.rules import Norm
from tritonclip.rules.arguments import as_grad_scale, as_norm_type

N = TypeVar("N", float, Tensor)


@torch.compiler.disable
@without_grad
def norms_by_name(
    parameters: Parameters,
    *,
    group_of: Callable[[str], str] | None = None,
    norm_type: float = 2.0,
    grad_scale: float | Tensor | None = None,
) -> dict[str, Tensor]:
    """Measures the gradient of each parameter, or of each group, and changes nothing.

    Call it *before* clipping; `recorder.add_` takes the result as `norms`. It reads all gradients
    once more, in one launch for each device and dtype on a GPU, and waits for nothing.

    Example:
        >>> import torch, tritonclip
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.tensor([3.0, 4.0])).backward()
        >>> tritonclip.norms_by_name(model)
        {'weight': tensor(5.), 'bias': tensor(1.)}

    Args:
        parameters: a module, (name, parameter) pairs, or tensors, as for :func:`clip_`. Those with
            `need_clip = False` are left out, as are those that neither have nor require a gradient.
            Parameters with the same name form a group; parameters without names are called
            `parameters[0]`, and so on. A parameter with several names counts under each of them; a
            module names it once, as `named_parameters` does.
        group_of: returns the group of a name; the gradients of a group are measured together. None
            keeps every name separate; `lambda name: name.split(".")[0]` groups by outermost module.
        norm_type: the order of the norm: 2 is the Euclidean norm, inf the largest magnitude. Any
            number from 1 to inf.
        grad_scale: the loss scale that the gradients still carry: a number or a one-element tensor.
            The gradients are divided by it before they are measured, but not in place.

    Returns:
        The norm of each name, in the order of the parameters: 0-d, float64 if any gradient is
        float64, else float32, on the first gradient's device. It is 0 where there is no gradient,
        so that every step has the same names.

    Raises:
        TypeError, ValueError: gradients that :func:`clip_` refuses too; a norm_type below 1.
            If one process rejects its DTensors, every process raises.
    """
    refuse_tracer()
    p = as_norm_type("norm_type", norm_type)
    scale = as_grad_scale(grad_scale)
    named = NamedNorms(parameters, group_of)
    return named.by_name(named.measure(p, scale), p)


class GradientStatistics(NamedTuple):
    """Statistics of one gradient, each a 0-d floating-point tensor.

    Attributes:
        norm: the 2-norm.
        largest: the largest magnitude.
        zeros: the share of elements that are 0.
    """

    norm: Tensor
    largest: Tensor
    zeros: Tensor


@torch.compiler.disable
@without_grad
def statistics_by_name(
    parameters: Parameters,
    *,
    group_of: Callable[[str], str] | None = None,
    grad_scale: float | Tensor | None = None,
) -> dict[str, GradientStatistics]:
    """Measures norm, largest magnitude and share of zeros of each gradient; changes nothing.

    If the share of zeros grows while training in float16, elements underflow, because the loss
    scale is too small. Call it *before* clipping. It reads all gradients three times, counts zeros
    with PyTorch operators for each gradient, and waits for nothing.

    Args:
        parameters: as for :func:`norms_by_name`.
        group_of: returns the group of a name, as for :func:`norms_by_name`.
        grad_scale: the loss scale that the gradients still carry, as for :func:`clip_`.

    Returns:
        `norm`, `largest` and `zeros` by name, in order; 0-d, with dtype and device as for
        :func:`clip_`. Where there is no gradient, norm and largest are 0 and zeros is 1.

    Raises:
        TypeError, ValueError, RuntimeError: as for :func:`norms_by_name`.

    Notes:
        NaN does not count as zero, and makes norm and largest NaN. Magnitudes of complex gradients
        are moduli. Counting the zeros of a DTensor takes an all-reduce, so every process must have
        the same gradients.

    Example:
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> model(torch.tensor([3.0, 0.0, 0.0, -4.0])).backward()
        >>> statistics_by_name(model)["weight"]
        GradientStatistics(norm=tensor(5.), largest=tensor(4.), zeros=tensor(0.5000))
    """
    refuse_tracer()
    scale = as_grad_scale(grad_scale)
    named = NamedNorms(parameters, group_of)
    norms = named.by_name(named.measure(2.0, scale), 2.0)
    largest = named.by_name(named.measure(math.inf, scale), math.inf)
    return {
        name: GradientStatistics(norm, largest[name], _zeros_in(parameters, norm))
        for (name, norm), parameters in zip(norms.items(), named.parameters(), strict=True)
    }


def _zeros_in(parameters: list[Tensor], norm: Tensor) -> Tensor:
    """The share of zeros, 1 without gradients; in the dtype and on the device of the norm."""
    n, n_nonzero = 0, torch.zeros((), dtype=torch.int64, device=norm.device)
    for parameter in parameters:
        n += parameter.numel()
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            grad = grad.coalesce().values()
        count = (grad != 0).sum()
        if isinstance(count, dtensor_class()):
            count = count.full_tensor()
        n_nonzero += count.to(norm.device)
    wide = n_nonzero.to(wide_dtype(norm.device))
    return (1 - wide / max(1, n)).to(norm.dtype)


class NamedNorms:
    """Gradients and the names of their norms; the arguments are those of :func:`norms_by_name`.

    `names`, one for each parameter, replaces the names that the parameters come with.

    Raises as :func:`clip_` does, but only in `measure` where other processes wait for the norms.

    Attributes:
        gradients: the measured gradients, with their plan.
        names: the names of all norms, in order.
    """

    def __init__(
        self,
        parameters: Parameters,
        group_of: Callable[[str], str] | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        # The parameters of each name by id, so that a group counts a parameter with two names once.
        # None where every name has one gradient, in order.
        self._members: dict[str, dict[int, Tensor]] | None = None
        items, label_of = labelled(parameters)
        if names is not None:
            label_of = names.__getitem__
        self.gradients = collect(items, label_of)
        positions = self.gradients.positions()
        if positions is None and group_of is None:
            self.names, self._measured = list(map(label_of, range(len(items)))), items
            if len(set(self.names)) == len(items):
                return
        named = [(label_of(i), item) for i, item in enumerate(items) if is_measured(item)]
        self._measured = items if positions is None else [items[i] for i in positions]
        self._members = {}
        try:
            for name, parameter in named:
                self._members.setdefault(_group(name, group_of), {})[id(parameter)] = parameter
        except Exception as error:
            self.gradients.reject_(error)
        self.names = list(self._members)

    def measure(self, p: float, grad_scale: float | Tensor) -> Tensor:
        """The p-norm of each gradient, 1-d; raises the error of this or of another process."""
        norm = Norm(p, each=True)
        return execute.measured_norm(self.gradients, norm, grad_scale, call="norms_by_name")

    def by_name(self, norms: Tensor, p: float) -> dict[str, Tensor]:
        """The p-norm of each name, from the p-norms of the gradients."""
        # Iterating a tensor would run Python code of torch.
        return self._by_name(norms.unbind(), lambda members: _combined(members, p, norms))

    def numbers_by_name(self, norms: list[float], p: float) -> dict[str, float]:
        """Like `by_name`, for norms that the host has read."""
        return self._by_name(norms, lambda members: combine_numbers(members, p) if members else 0.0)

    def parameters(self) -> list[list[Tensor]]:
        """The parameters of each name, in order."""
        if self._members is None:
            return [[parameter] for parameter in self._measured]
        return [[*members.values()] for members in self._members.values()]

    def _by_name(self, norms: Iterable[N], combined: Callable[[list[N]], N]) -> dict[str, N]:
        if self._members is None:
            return dict(zip(self.names, norms, strict=True))
        norm_of = dict(zip(map(id, self._measured), norms, strict=True))
        by_name = {}
        for name, members in self._members.items():
            found = [norm_of[at] for at in members if at in norm_of]
            by_name[name] = found[0] if len(found) == 1 else combined(found)
        return by_name


def is_measured(parameter: Tensor) -> bool:
    """Whether a parameter gets a norm, which is 0 if it has no gradient."""
    needs = parameter.requires_grad or parameter.grad is not None
    return needs and needs_clip(parameter)


def _group(name: str, group_of: Callable[[str], str] | None) -> str:
    if group_of is None:
        return name
    if not callable(group_of):
        raise TypeError(f"group_of must be a function of a name, got {group_of!r:.80}")
    group = group_of(name)
    if not isinstance(group, str):
        raise TypeError(f"group_of must return text for {name!r}, got {group!r:.80}")
    return group


def _combined(norms: list[Tensor], p: float, like: Tensor) -> Tensor:
    """The p-norm of several gradients together, from the norm of each."""
    if not norms:
        return like.new_zeros(())
    return combine(torch.stack(norms).to(wide_dtype(like.device)), p).to(like.dtype)
