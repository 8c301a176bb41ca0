"""`accumulate_`: the gradient of each micro-batch is clipped before it is added to the others."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from tritonclip.clipping import Nonfinite, Parameters
from tritonclip.distributed.gradients import collect
from tritonclip.distributed.process_groups import Copies, Processes, check_processes
from tritonclip.engine import execute
from tritonclip.engine.arguments import PLAIN, LabelOf, as_list, device_of, names_at, unnamed
from tritonclip.engine.checks import (
    POLICIES,
    refuse_common_memory,
    refuse_sums,
    unknown_policy,
)
from tritonclip.engine.gradients import Gradients
from tritonclip.hints import explained
from tritonclip.messages import warn_user
from tritonclip.rules import ClipByGlobalNorm, Rule, as_rule
from tritonclip.rules.arguments import as_grad_scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_get_is_sparse = attrgetter("is_sparse")
# The ids of the parameters of each block that was entered, by the id of the block.
_open_blocks: dict[int, set[int]] = {}


@explained(
    "accumulate_(parameters, 1.0)",
    {"clip_value min max clip_factor mode": "{usual}, which clips by one norm alone"},
)
def accumulate_(
    parameters: Parameters,
    clip: float | ClipByGlobalNorm,
    *,
    nonfinite: Nonfinite = "propagate",
    grad_scale: float | Tensor | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
) -> MicroBatch:
    """Clips what `backward` computes in a `with` block before it is added to `.grad`.

    For each micro-batch, with the gradient g that the block computes::

        grad = grad + g * min(1, max_norm / (norm(g) + eps))

    In the block `.grad` is None, so that backward keeps the gradient apart. After it `.grad` has
    the sum of clipped gradients, as an optimizer expects it. On a GPU two launches for each device
    and dtype measure and add; memory grows by one gradient list.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     for target in (torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5])):
        ...         with tritonclip.accumulate_(weight, 1.0) as micro_batch:
        ...             (weight * target).sum().backward()
        ...     optimizer.step()
        >>> weight.grad
        tensor([0.6000, 1.3000])
        >>> micro_batch.norm
        tensor(0.5000)

    Args:
        parameters: tensors, a module, or (name, parameter) pairs, as for :func:`clip_`; read once.
            Parameters with `need_clip = False` accumulate as without the block.
        clip: the largest norm of the gradient of a micro-batch; a number or a
            :class:`ClipByGlobalNorm`.
        nonfinite: the policy where this norm is NaN or inf.

            - "propagate": the sum becomes NaN as by :func:`clip_`, for GradScaler to find.
            - "error": RuntimeError that names the gradients; `.grad` is as before the block. The
              host waits for the device.
            - "zero": the micro-batch adds nothing; decided on the device. A parameter without a sum
              has then `.grad` of zeros, not None.
        grad_scale: the factor that the loss was multiplied by: a number or a one-element tensor,
            which is read by this call, on a GPU at the end of the block. Limit and norm are of the
            gradient divided by it; `.grad` keeps it, for `GradScaler.step` to divide out. A loss
            divided by n has the factor 1 / n, and `.grad` has then the mean of n clipped gradients.
        process_group: the processes that share one norm, as for :func:`clip_`.
        copies: how many processes hold the same shard of a parameter, as for :func:`clip_`.

    Returns:
        The block's context manager, which may be entered again. After a block its `norm` is the
        norm of the micro-batch before clipping, a 0-d tensor.

    Raises:
        TypeError: a rule that does not clip by one norm; gradients that :func:`clip_` refuses too.
        ValueError: no parameter to clip; at the end of a block, a `.grad` from before that cannot
            be written, or that two parameters share.
        RuntimeError: a block that left no gradient, a block within another one, or a
            DistributedDataParallel that would reduce gradients in it.

    Notes:
        If an exception leaves the block, or the block raises, `.grad` is as before, also of
        parameters with `need_clip = False`, and gradients of the micro-batch are dropped. If Ctrl-C
        interrupts the addition itself, `.grad` may have a part of the micro-batch: call `zero_grad`
        and repeat the step.

    References:
        Clipping each micro-batch: https://arxiv.org/abs/2605.02701 (2026), and
        https://arxiv.org/abs/2408.16204 (2024).
    """
    rule = clip if isinstance(clip, Rule) else as_rule(clip)
    if not isinstance(rule, ClipByGlobalNorm) or not rule.fixed:
        raise TypeError(
            f"accumulate_ clips each micro-batch by one norm, got {rule}; expected a number or a "
            "ClipByGlobalNorm with one"
        )
    if nonfinite not in POLICIES:
        raise unknown_policy(nonfinite)
    processes = None
    if process_group is not None or copies is not None:
        processes = check_processes(process_group, copies)
    return MicroBatch(parameters, rule, nonfinite, as_grad_scale(grad_scale), processes)


class MicroBatch:
    """The context manager of :func:`accumulate_`.

    Attributes:
        norm: of the last micro-batch before clipping, 0-d; None before the end of the first.
    """

    norm: Tensor | None = None
    # Until the first block begins, or is refused.
    _is_unused = False

    def __init__(
        self,
        parameters: Parameters,
        rule: ClipByGlobalNorm,
        nonfinite: Nonfinite,
        grad_scale: float | Tensor,
        processes: Processes | None,
    ) -> None:
        self._argument = parameters
        items = as_list(parameters)
        self._label_of: LabelOf = "parameters[{}]".format
        self._are_plain = processes is None and PLAIN.issuperset(map(type, items))
        if not self._are_plain:
            items, self._label_of = unnamed(items, self._label_of)
        self._items = items
        self._ids = set(map(id, items))
        if len(self._ids) != len(items):
            items = list({id(p): p for p in items}.values())
        self._parameters = [p for p in items if getattr(p, "need_clip", True)]
        # Whose gradients are added as they are.
        self._others: list[Tensor] = []
        if len(self._parameters) != len(items):
            self._others = [p for p in items if not getattr(p, "need_clip", True)]
        self._all = [*self._parameters, *self._others]
        if not self._parameters and processes is None:
            raise ValueError(
                f"accumulate_ got no parameter to clip, and {len(self._others)} with need_clip = "
                "False; expected at least one: pass a model, or a list in place of an iterator "
                "that was read before"
            )
        self._rule, self._nonfinite, self._grad_scale = rule, nonfinite, grad_scale
        self._processes, self._device = processes, device_of(items)
        # What `.grad` was before the block, of others last; None outside of one.
        self._sums: list[Tensor | None] | None = None
        self._is_unused = True

    def __del__(self) -> None:
        # Where Ctrl-C interrupted the entry.
        _open_blocks.pop(id(self), None)
        if self._is_unused:
            warn_user(
                "accumulate_ was called without a block, and clips nothing; expected `with "
                "accumulate_(model, 1.0): loss.backward()`, or clip_(model, 1.0) after backward"
            )

    def __enter__(self) -> MicroBatch:
        self._is_unused = False
        if self._sums is not None:
            raise RuntimeError(
                "this block of accumulate_ was entered already; expected one micro-batch after "
                "the other, or a new accumulate_ for other parameters"
            )
        # A copy, as other threads may enter blocks.
        if not all(map(self._ids.isdisjoint, list(_open_blocks.values()))):
            raise RuntimeError(
                "this block of accumulate_ is within another one with some of its parameters; "
                "expected one micro-batch after the other, or blocks for different parameters"
            )
        if isinstance(self._argument, Module) and dist.is_available() and dist.is_initialized():
            _refuse_average(self._argument)
        self._sums = [p.grad for p in self._all]
        try:
            _open_blocks[id(self)] = self._ids
            for parameter in self._all:
                parameter.grad = None
        except BaseException:
            self._leave(self._sums)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if torch.compiler.is_compiling():
            from tritonclip.engine import graph_break

            graph_break.call(self._end, kind is None)
        else:
            self._end(kind is None)

    def _end(self, is_whole: bool) -> None:
        """Adds the gradients of a whole block, and puts the sums back."""
        sums = self._sums
        if sums is None:
            raise RuntimeError("the block of accumulate_ was left already; expected `with` around")
        try:
            if is_whole:
                n = len(self._parameters)
                others = sums[n:]
                sums = self._added_to(sums[:n], others) + self._plain_sums(others)
        finally:
            self._leave(sums)

    def _leave(self, sums: Sequence[Tensor | None]) -> None:
        for parameter, own in zip(self._all, sums, strict=True):
            parameter.grad = own
        self._sums = None
        _open_blocks.pop(id(self), None)

    def _added_to(
        self, sums: list[Tensor | None], others: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The sums after the gradients were added, clipped; in place where there was one.

        Args:
            sums: of the parameters that are clipped.
            others: the sums of others, which are refused here where they cannot be written.
        """
        everyone = [p.grad for p in self._parameters]
        gradients = self._collected(everyone)
        if self._others:
            try:
                self._check_others(others)
            except ValueError as error:
                gradients.reject_(error)
        grads: list[Tensor] = [grad for grad in everyone if grad is not None]
        targets = [own for own in sums if own is not None]
        if not len(grads) == len(targets) == len(sums) or True in map(_get_is_sparse, targets):
            targets = _targets(everyone, sums)
        if gradients.plan is not None:
            # Other processes may wait for this one, also where it has no gradient.
            self.norm = execute.add_to_(
                gradients,
                grads,
                targets,
                self._rule,
                self._nonfinite,
                self._grad_scale,
                self._label_of_sum,
            )
        if gradients.plan is None or self._lack(grads):
            raise RuntimeError(
                f"the block of accumulate_ left no gradient in any of {len(sums)} parameters; "
                "expected loss.backward() inside of it, and gradients that are reduced: without "
                "set_requires_gradient_sync(False) of FSDP2"
            )
        results = targets or grads
        if len(results) == len(sums):
            return [*results]
        each = iter(results)
        pairs = zip(everyone, sums, strict=True)
        return [own if grad is None else next(each) for grad, own in pairs]

    def _check_others(self, sums: Sequence[Tensor | None]) -> None:
        triples = [(p, p.grad, own) for p, own in zip(self._others, sums, strict=True)]
        there = [(p, g, own) for p, g, own in triples if g is not None and own is not None]

        def label_of(index: int) -> str:
            return self._label_of_parameter(there[index][0])

        targets = [own for _, _, own in there]
        refuse_sums(targets, label_of)
        if self._are_plain:
            refuse_common_memory(targets, [grad for _, grad, _ in there], label_of)

    def _plain_sums(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sums after the gradients of others were added, in place where there was one."""
        pairs = zip(self._others, sums, strict=True)
        return [_plain_sum(parameter.grad, own) for parameter, own in pairs]

    def _collected(self, grads: list[Tensor | None]) -> Gradients:
        """The gradients of the block, with their plan."""
        if not self._are_plain:
            return collect(self._parameters, self._label, self._processes)
        there = [grad for grad in grads if grad is not None]
        return Gradients(there, self._device, self._label, self._parameters)

    def _lack(self, grads: Sequence[Tensor]) -> bool:
        """Whether there is no gradient, and should be; a stage may be frozen."""
        return not grads and any(parameter.requires_grad for parameter in self._parameters)

    def _label(self, index: int) -> str:
        return self._label_of_parameter(self._parameters[index])

    def _label_of_parameter(self, own: Tensor) -> str:
        position = next(i for i, parameter in enumerate(self._items) if parameter is own)
        return names_at([position], self._argument, self._label_of)[0]

    def _label_of_sum(self, index: int) -> str:
        """Names the parameter of the gradient at an index among those that there are."""
        return self._label([i for i, p in enumerate(self._parameters) if p.grad is not None][index])


def _refuse_average(model: Module) -> None:
    """Refuses a model in which DistributedDataParallel is about to reduce gradients."""
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync:
            name = f"model.{path}" if path else "model"
            raise RuntimeError(
                "DistributedDataParallel would average gradients in this block over processes, "
                f"but not those that were added before; expected `with {name}.no_sync(), "
                "accumulate_(model, ...)` and one average of .grad after the last micro-batch, or "
                f"accumulate_({name}.module, ...) to average and clip every micro-batch"
            )


def _targets(grads: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors that gradients are added to; none where no gradient has a sum yet."""
    pairs = [(grad, own) for grad, own in zip(grads, sums, strict=True) if grad is not None]
    if all(own is None for _, own in pairs):
        return []
    return [_target(grad, own) for grad, own in pairs]


def _target(grad: Tensor, own: Tensor | None) -> Tensor:
    if own is None:
        return torch.zeros_like(grad)
    # A dense gradient makes a sparse sum dense, as in backward.
    return own.to_dense() if own.is_sparse and not grad.is_sparse else own


@torch.no_grad()
def _plain_sum(grad: Tensor | None, own: Tensor | None) -> Tensor | None:
    if grad is None or own is None:
        return own if grad is None else grad
    return _target(grad, own).add_(grad)
