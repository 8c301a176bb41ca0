"""`accumulate_`: the gradient of each micro-batch is clipped before it is added to the others."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tritonclip.clipping import Nonfinite, Parameters
from tritonclip.distributed.gradients import collect
from tritonclip.distributed.process_groups import Copies, Processes, check_processes
from tritonclip.engine import execute
from tritonclip.engine.arguments import PLAIN, LabelOf, as_list, names_at, needs_clip, unnamed
from tritonclip.engine.checks import POLICIES, unknown_policy
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import are_apart, find_overlap, has_overlap, memory_of
from tritonclip.engine.plan import unique_indices
from tritonclip.messages import warn_user
from tritonclip.modes import without_grad
from tritonclip.rules import ClipByGlobalNorm, Rule, as_rule
from tritonclip.rules.arguments import as_grad_scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# The ids of the parameters of each block that was entered, by the id of the block.
_open_blocks: dict[int, set[int]] = {}


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

    In the block `.grad` is None, so that backward keeps the gradient apart; a step of an optimizer
    raises there. After it `.grad` has the sum of clipped gradients, as an optimizer expects it. The
    block ends with a call of :func:`clip_` and one of `torch._foreach_add_`, without a wait for the
    device. Memory grows by one gradient list.

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
        RuntimeError: a block that left no gradient, a block within another one, a step of an
            optimizer, or a DistributedDataParallel that would reduce gradients in it.

    Notes:
        If an exception leaves the block, or the block raises, `.grad` is as before, also of
        parameters with `need_clip = False`, and gradients of the micro-batch are dropped. If Ctrl-C
        interrupts the addition itself, `.grad` may have a part of the micro-batch: call `zero_grad`
        and repeat the step.

    References:
        Clipping each micro-batch: https://arxiv.org/abs/2605.02701 (2026), and
        https://arxiv.org/abs/2408.16204 (2024).
    """
    rule = clip if isinstance(clip, Rule) else as_rule("clip", clip)
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
    # What `.grad` was before the block; None outside of one.
    _sums: list[Tensor | None] | None = None
    # By which optimizers refuse a step in a block.
    _hook: RemovableHandle | None = None

    def __init__(
        self,
        parameters: Parameters,
        rule: ClipByGlobalNorm,
        nonfinite: Nonfinite,
        grad_scale: float | Tensor,
        processes: Processes | None,
    ) -> None:
        items = list(parameters) if type(parameters) is list else as_list(parameters)
        label_of: LabelOf = "parameters[{}]".format
        if not PLAIN.issuperset(map(type, items)):
            items, label_of = unnamed(items, label_of)
        ids = set(map(id, items))
        if len(ids) != len(items):
            once = unique_indices(map(id, items)) or ()
            items, label_of = [items[i] for i in once], [label_of(i) for i in once].__getitem__
        if processes is None and True not in map(needs_clip, items):
            raise ValueError(
                f"accumulate_ got no parameter to clip, and {len(items)} with need_clip = False; "
                "expected at least one: pass a model, or a list in place of an iterator that was "
                "read before"
            )
        self._argument, self._parameters, self._label_of = parameters, items, label_of
        self._ids = ids
        self._rule, self._nonfinite, self._grad_scale = rule, nonfinite, grad_scale
        self._processes = processes
        self._is_unused = True

    def __del__(self) -> None:
        if self._sums is not None:
            # Where Ctrl-C interrupted the entry.
            self._close()
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
        self._sums = [p.grad for p in self._parameters]
        try:
            if not torch.compiler.is_compiling():
                self._hook = register_optimizer_step_pre_hook(_refuse_step)
            _open_blocks[id(self)] = self._ids
            for parameter in self._parameters:
                parameter.grad = None
        except BaseException:
            self._leave(self._sums)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if torch.compiler.is_compiling():
            from tritonclip.engine import graph_break

            graph_break.call(self._end, exc_type is None)
        else:
            self._end(exc_type is None)

    def _end(self, is_whole: bool) -> None:
        """Adds the gradients of a whole block, and puts the sums back."""
        sums = self._sums
        if sums is None:
            raise RuntimeError("the block of accumulate_ was left already; expected `with` around")
        try:
            if is_whole:
                sums = self._added_to(sums)
        finally:
            self._leave(sums)

    def _leave(self, sums: Sequence[Tensor | None]) -> None:
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = total
        self._close()
        self._sums = None

    def _close(self) -> None:
        _open_blocks.pop(id(self), None)
        if self._hook is not None:
            self._hook.remove()

    def _added_to(self, sums: list[Tensor | None]) -> list[Tensor | None]:
        """The sums after the gradients were clipped and added; in place where there was one."""
        gradients = collect(self._parameters, self._label, self._processes)
        if (plain := _plain_sums(gradients, sums)) is not None:
            self._clip_(gradients)
            torch._foreach_add_(plain, list(gradients.tensors))
            return sums
        # Of other forms, not one for each gradient, or on several processes.
        grads = [p.grad for p in self._parameters]
        sums = [_sum_for(grad, total) for grad, total in zip(grads, sums, strict=True)]
        pairs = zip(sums, grads, strict=True)
        both = [(total, grad) for total, grad in pairs if total is not None and grad is not None]
        if both:
            try:
                self._check(sums, grads, whole=gradients.sharding is None)
            except ValueError as error:
                gradients.reject_(error)
        if gradients.plan is not None:
            # Other processes may wait for this one, also where it has no gradient.
            self._clip_(gradients)
        clipped = [p for p in self._parameters if needs_clip(p)]
        # A stage may be frozen.
        lacks = not gradients.tensors and any(p.requires_grad for p in clipped)
        if gradients.plan is None or lacks:
            raise RuntimeError(
                f"the block of accumulate_ left no gradient in any of {len(clipped)} parameters; "
                "expected loss.backward() inside of it, zero_grad() after it, and gradients that "
                "are reduced: without set_requires_gradient_sync(False) of FSDP2"
            )
        if both:
            _add_([total for total, _ in both], [grad for _, grad in both])
        return [grad if total is None else total for grad, total in zip(grads, sums, strict=True)]

    def _clip_(self, gradients: Gradients) -> None:
        rule, scale = self._rule, self._grad_scale
        self.norm = execute.clip_(gradients, rule, self._nonfinite, scale, keeps_scale=True)

    def _check(
        self, sums: Sequence[Tensor | None], grads: Sequence[Tensor | None], *, whole: bool
    ) -> None:
        """Refuses sums that cannot be written, or that have the memory of another tensor.

        Args:
            sums: of each parameter.
            grads: of each parameter; what has none is not written.
            whole: not spread over processes; else memory is not compared.

        Raises:
            ValueError: names the parameters.
        """
        pairs = enumerate(zip(sums, grads, strict=True))
        written = {i: total for i, (total, grad) in pairs if total is not None and grad is not None}
        for index, total in written.items():
            if fault := _fault_of(total):
                raise ValueError(
                    f"the .grad of {self._label(index)} {fault}, so no gradient can be added to "
                    "it; nothing was changed: replace it by .grad.detach().clone()"
                )
        if not whole:
            return
        there = {i: grad for i, grad in enumerate(grads) if grad is not None}
        for tensors in (written, there):
            seen: dict[int, int] = {}
            for index, tensor in tensors.items():
                first = seen.setdefault(id(tensor), index)
                if first != index:
                    raise ValueError(
                        f"{self._label(first)} and {self._label(index)} have one tensor as their "
                        ".grad, which would count twice; nothing was changed: expected a tensor "
                        "for each"
                    )
        regions = map(memory_of, (*written.values(), *there.values()))
        if find_overlap([region for region in regions if region is not None]) is not None:
            raise ValueError(
                "a gradient has the memory of another one, or of the sum that it would be added "
                "to, which backward has then overwritten; expected new memory for every gradient: "
                "gradient_as_bucket_view=False of DistributedDataParallel. Repeat the step after "
                "zero_grad(): the sums in .grad may be wrong"
            )

    def _label(self, index: int) -> str:
        return names_at([index], self._argument, self._label_of)[0]


def _refuse_step(optimizer: Optimizer, *_: object) -> None:
    """Refuses a step with gradients of an open block, which are not clipped yet."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(map(ids.isdisjoint, list(_open_blocks.values()))):
        raise RuntimeError(
            "a step within a block of accumulate_ would update parameters by the gradient of one "
            "micro-batch, before it is clipped; expected optimizer.step() after the block"
        )


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


def _plain_sums(gradients: Gradients, sums: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The sums where each gradient has one of its form, and no two tensors share memory; else None.

    A cheap check, which may miss such sums.
    """
    plan, grad_addresses = gradients.plan, gradients.addresses
    if plan is None or plan.guards is None or plan.requires_grad or grad_addresses is None:
        return None
    there = [total for total in sums if total is not None]
    if not len(there) == len(sums) == len(grad_addresses) or not plan.guards.check(*there):
        return None
    addresses = [*grad_addresses, *map(Tensor.data_ptr, there)]
    return there if are_apart(addresses, plan.spans * 2) else None


def _sum_for(grad: Tensor | None, total: Tensor | None) -> Tensor | None:
    """A sum to add a gradient to: a dense gradient makes a sparse sum dense, as in backward."""
    if total is None or grad is None or not total.is_sparse or grad.is_sparse:
        return total
    return total.to_dense()


def _fault_of(total: Tensor) -> str:
    """Why nothing can be added to a sum in place; "" where it can."""
    if total.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode"
    if total.requires_grad and total.is_leaf:
        return "is a leaf that requires a gradient"
    local = getattr(total, "_local_tensor", total)
    if local.layout == torch.strided and not local.is_contiguous() and has_overlap(local):
        return "has elements that share memory"
    return ""


@without_grad
def _add_(sums: list[Tensor], grads: list[Tensor]) -> None:
    """Adds gradients to sums in place."""
    if any(total.is_neg() or total.is_conj() for total in sums):
        # foreach writes no lazily negated or conjugated tensors.
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad)
    else:
        torch._foreach_add_(sums, grads)
