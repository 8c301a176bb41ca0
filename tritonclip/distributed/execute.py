"""One call on a gradient list that may lie over several processes.

The engine's verbs, with a reduction between measuring and writing. A list of one process goes to
`tritonclip.engine.execute`. Every process of a list makes the same calls, whichever gradients it
has, and enters the same collectives.

When one process rejects its gradients, all processes raise and none hangs: it enters the reduction
as if it had none, and marks its numbers. On a CPU, where numbers are read at once, all raise before
anything is written. On an accelerator the others have the norm NaN, as for a NaN of that process.
A limit that is the user's code is asked for before the first write, and its error raised on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tritonclip.backends.adaptive import Parts
from tritonclip.backends.interface import Layout, PartialNorms
from tritonclip.backends.operators import as_tensor, unscaled
from tritonclip.distributed.agreement import (
    Replicas,
    agree,
    describe_parameters,
    describe_rule,
    describe_state,
    raise_if_any,
)
from tritonclip.distributed.gradients import ERRORS, ShardedGradients, error_of
from tritonclip.distributed.partial_sums import PartialSum, measure_sums, norms_of
from tritonclip.distributed.process_groups import domain_of, everyones
from tritonclip.distributed.reduction import (
    Exchange,
    MeasuredShards,
    Rejected,
    ShardGroup,
    Slots,
    run_exchanges,
)
from tritonclip.distributed.shards import shard_of
from tritonclip.engine import checks, execute
from tritonclip.engine.arguments import LabelOf, needs_clip
from tritonclip.engine.checks import REMEDY, TORCH_REMEDY, raise_if_nonfinite
from tritonclip.engine.gradients import Gradients, parameters_of
from tritonclip.engine.norms import EACH_ORDERS, Norms
from tritonclip.engine.norms import measure_by as measure_whole_by
from tritonclip.engine.norms import measure_each as measure_whole_each
from tritonclip.engine.units import Units, weight_of
from tritonclip.modes import refuse_tracer, without_grad
from tritonclip.rules import BoundRule, ClipByNorm, ClipState, Rule
from tritonclip.rules.rule import Adaptive, check_norm


@dataclass(slots=True)
class ReducedNorms(Norms):
    """The norms of gradients whose shards lie over several processes.

    Attributes:
        reduced: the norm of all gradients, or with `per_gradient` of each parameter's; float64,
            1-d.
    """

    reduced: Tensor
    is_checked: ClassVar[bool] = True

    def norm(self) -> Tensor:
        """The norm before clipping, or one for each parameter's gradient."""
        plan = self.gradients.plan
        assert plan is not None
        norm = unscaled(self.reduced, self.norm_type, self.grad_scale).to(plan.dtype)
        return norm if self.per_gradient else norm.reshape(())

    def nonzeros(self) -> Tensor:
        """Norms of order 0 of each gradient here, of all shards."""
        return self.own(self.reduced)

    def without_scale(self) -> Norms:
        """The same norms, for a write that leaves the loss scale in the gradients."""
        reduced = unscaled(self.reduced, self.norm_type, self.grad_scale)
        return replace(Norms.without_scale(self), reduced=reduced)  # type: ignore[call-arg]

    def parts(self) -> Parts:
        """The norms themselves: a state has the same bits in processes without gradients."""
        norm = self.norm()
        return Parts(norm, norm.dtype)

    def total(self) -> Tensor:
        """The norm, 0-d, or that of each gradient here, 1-d."""
        return self.own(self.norm()) if self.per_gradient else self.norm()

    def in_order(self, results: list[Tensor]) -> Tensor:
        """The norm of each gradient here.

        A shard without elements has nothing that a backend could scale by the norm.
        """
        return self.total()

    @property
    def n_norms(self) -> int:
        """The number of norms."""
        return len(self.reduced)

    def own(self, values: Tensor) -> Tensor:
        """Of one value for each parameter, those of the gradients here."""
        plan = self.gradients.plan
        assert plan is not None
        own: Tensor = values[plan.reduction.slots.on(values.device)]
        return own

    def whole(self) -> Sequence[Tensor]:
        """The parameters that are to be clipped, or the tensors; DTensors have the whole shape."""
        assert isinstance(self.gradients, ShardedGradients)
        return self.gradients.wanted

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """The positions of parameters to be clipped among all, and the number of all."""
        sources = self.gradients.sources
        if sources is None:
            return self.gradients.positions(), self.gradients.n_parameters
        wanted = [i for i, parameter in enumerate(sources) if needs_clip(parameter)]
        return None if len(wanted) == len(sources) else wanted, len(sources)


def is_reduced(gradients: Gradients) -> TypeGuard[ShardedGradients]:
    """Whether the norms of a list are reduced over processes."""
    return gradients.plan is not None and gradients.plan.reduction is not None


def verify_agreement(
    gradients: Gradients,
    call: str,
    rule: Rule,
    grad_scale: float | Tensor = 1.0,
    nonfinite: str = "propagate",
    *,
    total_norm: Tensor | None = None,
) -> None:
    """Under `verify()`, raises on every process where they differ in a call that they share.

    Also of replicas on which DistributedDataParallel keeps whole gradients, if it was passed.
    """
    if gradients.plan is None or not gradients.plan.verifying:
        return
    if is_reduced(gradients):
        domain, one_list = gradients.sharding.domain, gradients.sharding.one_list
        wanted, label_of = gradients.wanted, gradients.label_of_parameter
    elif isinstance(gradients.argument, DistributedDataParallel):
        domain, one_list = domain_of([], gradients.argument.process_group), True
        wanted, label_of = gradients.tensors, gradients.label
    else:
        return
    own = {
        "the call": call,
        "the rule": describe_rule(rule),
        "the policy for NaN and inf": nonfinite,
        "the loss scale": repr(float(grad_scale)),
    }
    if total_norm is not None:
        own["the total norm"] = repr(float(total_norm))
    if isinstance(rule, BoundRule):
        own["the state"] = describe_state(rule.state.state_dict())
    # Tensors that are no gradients of known parameters may be others elsewhere, under one norm.
    if one_list and (gradients.sources is not None or rule.per_gradient):
        own |= describe_parameters(wanted, label_of)
    agree(own, error_of(gradients), domain)


def check(gradients: Gradients, rule: Rule) -> None:
    """Refuses gradients that cannot be written, or that a rule has no meaning for."""
    checks.check(gradients, rule)
    if isinstance(gradients, ShardedGradients):
        _refuse_shards(gradients, rule)


def _refuse_shards(gradients: ShardedGradients, rule: Rule) -> None:
    sharding = gradients.sharding
    if gradients.plan is None:
        return
    if rule.clamps and sharding.sums:
        sums = [i for i in range(len(gradients.tensors)) if gradients.shard(i).sums_over]
        raise TypeError(
            f"{rule.name} would clamp the parts of a sum, which does not clamp the sum: "
            f"the gradients of {gradients.labels(sums)} are DTensors with a Partial "
            "placement; expected Shard or Replicate: grad.redistribute() them, or clip by norm"
        )
    if rule.per_unit and gradients.tensors:
        _refuse_split(gradients, parameters_of(gradients))
    if rule.per_gradient and not sharding.one_list:
        raise ValueError(
            f"{rule.name} measures each gradient, and process_group does not say which "
            "tensors of its processes are pieces of one; expected DTensors without process_group, "
            "or a rule with one norm"
        )
    if rule.spectral:
        raise TypeError(
            f"{rule.name} takes whole matrices, and some parameters are DTensors: a shard has "
            "other singular values than its matrix; expected plain tensors, as "
            "DistributedDataParallel has them: clip by ClipByNorm, which knows shards, or gather "
            "each gradient with full_tensor() for functional.clip_by_spectral_norm"
        )


def clip_(
    gradients: Gradients,
    rule: Rule,
    nonfinite: str = "propagate",
    grad_scale: float | Tensor = 1.0,
    *,
    remedy: str = REMEDY,
) -> Tensor | None:
    """Clips a gradient list; `remedy` ends the message of nonfinite="error"."""
    if isinstance(gradients, ShardedGradients) and gradients.error is None:
        try:
            check_norm(rule)
            check(gradients, rule)
        except ERRORS as error:
            gradients.reject_(error)
            if type(rule.norm_type) is not float:
                # Other processes wait for a norm of any order.
                rule = ClipByNorm(math.inf) if rule.per_gradient else execute.unlimited(2.0)
    if not is_reduced(gradients):
        return execute.clip_(gradients, rule, nonfinite, grad_scale, remedy=remedy)
    return _clip_reduced_(gradients, rule, nonfinite, grad_scale, remedy)


def add_to_(
    gradients: Gradients,
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    rule: Rule,
    nonfinite: str,
    grad_scale: float | Tensor,
    label_of: LabelOf,
) -> Tensor:
    """Measures a gradient list, and adds it, clipped, to sums, as `execute.add_to_`."""
    plan = gradients.plan
    if isinstance(gradients, ShardedGradients):
        if gradients.error is None:
            try:
                check(gradients, rule)
                checks.refuse_sums(sums, label_of)
            except ERRORS as error:
                gradients.reject_(error)
    elif plan is not None and not plan.ordinary:
        checks.check(gradients, rule)
    if torch.is_grad_enabled() and (
        gradients.sharding or (plan is not None and plan.requires_grad)
    ):
        return without_grad(add_to_)(gradients, grads, sums, rule, nonfinite, grad_scale, label_of)
    if gradients.sharding:
        verify_agreement(gradients, "accumulate_", rule, grad_scale, nonfinite)
    measured = measure_by(gradients, rule, grad_scale, names_culprits=nonfinite == "error")
    if nonfinite == "error":
        raise_if_nonfinite(gradients, rule, measured.total(), REMEDY, measured.is_finite())
    zero = nonfinite == "zero"
    return execute.add_to_(gradients, grads, sums, rule, measured, label_of, zero_nonfinite=zero)


@without_grad
def _clip_reduced_(
    gradients: ShardedGradients,
    rule: Rule,
    nonfinite: str,
    grad_scale: float | Tensor,
    remedy: str,
) -> Tensor | None:
    verify_agreement(gradients, "clip", rule, grad_scale, nonfinite)
    if rule.clamps and nonfinite == "propagate":
        # Nobody waits.
        _raise_error(gradients, names_culprits=False)
        measured = None
    else:
        # By value, an element counts as it came, before the loss scale is divided out.
        scale = 1.0 if rule.clamps else grad_scale
        measured = measure_by(gradients, rule, scale, names_culprits=nonfinite == "error")
        if nonfinite == "error":
            raise_if_nonfinite(gradients, rule, measured.total(), remedy, measured.is_finite())
        if is_own(rule):
            rule = limited(rule)
            ask_limits([(rule, measured)])
    outcome = execute.write_(
        gradients, rule, measured, grad_scale, zero_nonfinite=nonfinite == "zero"
    )
    return outcome.norm


def is_own(rule: Rule) -> bool:
    """Whether a limit is code of the user's, which may raise on one process alone."""
    kind: Any = type(getattr(rule, "rule", rule))
    limit = kind.advance if issubclass(kind, Adaptive) else kind.limit
    module = str(getattr(limit, "__module__", ""))
    return not (rule.clamps or module.startswith("tritonclip."))


def limited(rule: Rule) -> BoundRule:
    """The rule, which then asks for its limit once."""
    return rule if isinstance(rule, BoundRule) else BoundRule(rule, ClipState())


def ask_limits(measured: Sequence[tuple[BoundRule, Norms]]) -> None:
    """Asks for limits of measured lists of one domain, before the first write.

    Raises:
        TypeError, ValueError, RuntimeError: on every process, where one has no valid limit.
    """
    error: Exception | None = None
    for rule, norms in measured:
        try:
            execute.checked_limit(rule, rule.limit(norms), norms)
        except Exception as found:
            error = error or found
    first = measured[0][1].gradients
    raise_if_any(error, first.sharding.domain, first.device)


@without_grad
def total_norm(
    gradients: Gradients,
    norm_type: float,
    error_if_nonfinite: bool = False,
    *,
    per_gradient: bool = False,
) -> Tensor:
    """The norm of a gradient list, 0-d, or, `per_gradient`, the norm of each, 1-d."""
    if not is_reduced(gradients):
        return execute.total_norm(
            gradients, norm_type, error_if_nonfinite, per_gradient=per_gradient
        )
    rule = ClipByNorm(math.inf, norm_type) if per_gradient else execute.unlimited(norm_type)
    if gradients.error is None:
        try:
            checks.refuse_sparse_minimum(gradients, norm_type)
        except ValueError as error:
            gradients.reject_(error)
    policy = "error" if error_if_nonfinite else "propagate"
    verify_agreement(gradients, "get_total_norm", rule, nonfinite=policy)
    norm = measure_by(gradients, rule, names_culprits=error_if_nonfinite).total()
    if error_if_nonfinite:
        raise_if_nonfinite(gradients, rule, norm, TORCH_REMEDY)
    return norm


def scale_(gradients: Gradients, rule: Rule, norm: Tensor) -> None:
    """Scales a gradient list by the coefficient of a norm that is given; nothing is sent."""
    if isinstance(gradients, ShardedGradients):
        verify_agreement(gradients, "clip_grads_with_norm_", rule, total_norm=norm)
        _raise_error(gradients, names_culprits=False)
    execute.scale_(gradients, rule, norm)


def measure_by(
    gradients: Gradients,
    rule: Rule,
    grad_scale: float | Tensor = 1.0,
    *,
    names_culprits: bool = False,
) -> Norms:
    """Measures the norms that a rule asks for; of a rejected list, raises when others know.

    Args:
        gradients: not empty.
        rule: that asks.
        grad_scale: the loss scale that gradients carry.
        names_culprits: names of gradients will be asked for where a norm is NaN.
    """
    if not is_reduced(gradients):
        return measure_whole_by(gradients, rule, grad_scale)
    if gradients.error is not None and not is_awaited(gradients, rule):
        raise gradients.error
    (measured,) = run_exchanges([exchange(gradients, rule, grad_scale)])
    _raise_error(gradients, names_culprits=names_culprits)
    return measured


def measure_statistics(gradients: Gradients, grad_scale: float | Tensor = 1.0) -> tuple[Norms, ...]:
    """Measures the norm of each gradient of order 2, inf and 0: shards once for each order."""
    if not is_reduced(gradients):
        return measure_whole_each(gradients, grad_scale, statistics=True)[1:]
    rules = [ClipByNorm(math.inf, p) for p in EACH_ORDERS]
    verify_agreement(gradients, "statistics_by_name", rules[0], grad_scale)
    if gradients.error is not None and not is_awaited(gradients, rules[0]):
        raise gradients.error
    measured = run_exchanges([exchange(gradients, rule, grad_scale) for rule in rules])
    _raise_error(gradients, names_culprits=False)
    return tuple(measured)


def exchange(
    gradients: Gradients, rule: Rule, grad_scale: float | Tensor, *, by_gradient: bool = False
) -> Exchange[ReducedNorms]:
    """As `measure_by`, with other exchanges; the caller raises the error of a rejected list."""
    assert isinstance(gradients, ShardedGradients)
    if rule.per_unit:
        return _exchange_of_units(gradients, rule, grad_scale)
    return _exchange(
        gradients, rule.norm_type, rule.per_gradient, grad_scale, by_gradient=by_gradient
    )


def _exchange(
    gradients: ShardedGradients,
    norm_type: float,
    per_gradient: bool,
    grad_scale: float | Tensor,
    *,
    by_gradient: bool,
) -> Exchange[ReducedNorms]:
    """Measures shards, and reduces their norms: by one all-reduce in the usual case."""
    if per_gradient:
        refuse_tracer()
    plan = gradients.plan
    assert plan is not None
    reduction = plan.reduction
    if not per_gradient and (uncovered := reduction.sharding.domain.uncovered):
        raise ValueError(uncovered)
    replicas = Replicas(gradients, norm_type) if plan.verifying else None
    batches, own, sums = [], [], []
    kept: list[tuple[Layout, PartialNorms]] = []
    for group, shards in zip(plan.groups, reduction.shard_groups, strict=True):
        tensors, addresses = gradients.of_group(group.indices)
        batch = group.layout.bind(tensors, addresses)
        batches.append(batch)
        moduli = group.pairs and norm_type != 2.0
        if by_gradient and (moduli or shards.shard.sums_over):
            # Their own norms are not measured below: one more reading.
            kept.append((group.layout, batch.norm(math.inf, per_gradient=True)))
        if shards.shard.sums_over:
            sums += [
                PartialSum(at, tensor, group.pairs, shards.shard)
                for at, tensor in zip(shards.slots.positions, tensors, strict=True)
            ]
        elif by_gradient and not (moduli or per_gradient):
            partials_each = batch.norm(norm_type, per_gradient=True)
            kept.append((group.layout, partials_each))
            own.append((as_tensor(partials_each), shards))
        else:
            measured = norms_of(tensors, batch, norm_type, pairs=group.pairs, each=per_gradient)
            own.append((measured, shards))
    measure_own_sums = None
    if reduction.sharding.copied or sums:
        absent = gradients.absent
        measure_own_sums = partial(
            measure_sums, reduction.sharding, absent, sums, norm_type, per_gradient
        )
    reduced = yield from _reduced_norm(
        gradients,
        partial(reduction.norm, own, norm_type, each=per_gradient, sums=measure_own_sums),
    )
    if replicas is not None:
        replicas.check(reduced, each=per_gradient)
    partials = []
    for group, shards, batch in zip(plan.groups, reduction.shard_groups, batches, strict=True):
        whole = reduced
        if per_gradient:
            whole = batch.partials_each(reduced[shards.slots.on(plan.device)], norm_type)
        partials.append(whole.to(group.device))
    return ReducedNorms(
        batches,
        partials,
        norm_type,
        per_gradient,
        grad_scale,
        gradients,
        reduced,
        by_gradient=kept if by_gradient and not per_gradient else None,
    )


def _exchange_of_units(
    gradients: ShardedGradients, rule: Rule, grad_scale: float | Tensor
) -> Exchange[ReducedNorms]:
    try:
        units = Units(gradients, rule)
    except ERRORS as error:
        gradients.reject_(error)
        units = Units(gradients, rule)
    partials, reduced = yield from _whole_units(gradients, units)
    batches: list[Any] = [*units.batches]
    return ReducedNorms(batches, partials, 2.0, True, grad_scale, gradients, reduced)


def _whole_units(
    gradients: ShardedGradients, units: Units
) -> Exchange[tuple[list[Tensor], Tensor]]:
    """Partial norms of each group, of whole units, and the norm of each parameter's gradient.

    Slices along the first dimension are whole here; a gradient that is one unit may not be. One
    all-reduce serves the norms of gradients and of weights.
    """
    plan = gradients.plan
    assert plan is not None
    partials, reduction = units.measure(), plan.reduction
    n, device = reduction.sharding.n_parameters, plan.device
    groups = list(zip(units.batches, partials, reduction.shard_groups, strict=True))
    measured = [(batch.norms_each(norms), shards) for batch, norms, shards in groups]
    measured += [
        (batch.weight_norms_each(norms), _of_weights(shards, n)) for batch, norms, shards in groups
    ]
    measured += _absent_weights(gradients, n, device)
    doubled = replace(reduction, sharding=replace(reduction.sharding, n_parameters=2 * n))
    reduced = yield from _reduced_norm(
        gradients, partial(doubled.norm, measured, norm_type=2.0, each=True)
    )
    whole = []
    for batch, norms, shards in groups:
        slots = shards.slots.on(device)
        own, limits = (half[slots].to(norms.device) for half in reduced.split(n))
        whole.append(batch.with_whole(norms, own, limits))
    return whole, reduced[:n]


def _refuse_split(gradients: ShardedGradients, parameters: Sequence[Tensor]) -> None:
    """Refuses DTensors whose units lie on several processes, unless they are one unit."""
    for index, parameter in enumerate(parameters):
        own = getattr(parameter, "placements", ())
        found = getattr(parameter.grad, "placements", ())
        if own != found or not all(
            placement.is_replicate() or _splits_rows(placement) or n_processes == 1
            for placement, n_processes in zip(found, _sizes(parameter), strict=True)
        ):
            raise TypeError(
                f"{gradients.label(index)} has the placements {own} and its gradient {found}; a "
                "rule by unit expects the same for both, and rows that are whole on their process: "
                "Replicate or Shard(0), as fully_shard makes them. Clip such a model by norm, or "
                "set need_clip = False on these parameters"
            )


def _absent_weights(
    gradients: ShardedGradients, n: int, device: torch.device
) -> list[MeasuredShards]:
    """Weights that are one unit with those of other processes, and have no gradient here."""
    sharding, measured = gradients.sharding, []
    for at, parameter in zip(sharding.absent, gradients.absent, strict=True):
        if parameter.dim() < 2 and parameter.requires_grad:
            shards = ShardGroup(shard_of(parameter, at, sharding), Slots([n + at]), narrow=False)
            measured.append((_norm_of(weight_of(parameter).detach(), device), shards))
    return measured


def _norm_of(weight: Tensor, device: torch.device) -> Tensor:
    """The 2-norm of a small weight, float64[1]."""
    wide = weight.to(torch.complex128 if weight.is_complex() else torch.float64)
    norm: Tensor = torch.linalg.vector_norm(wide)
    return norm.reshape(1).to(device)


def _of_weights(shards: ShardGroup, n: int) -> ShardGroup:
    """The shards of weights, whose norms stand below those of n gradients."""
    slots = Slots([n + position for position in shards.slots.positions])
    return ShardGroup(shards.shard, slots, narrow=False)


def _sizes(parameter: Tensor) -> tuple[int, ...]:
    """The processes along each dimension of a DTensor's mesh; () for a plain tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    return () if mesh is None else tuple(mesh.shape)


def _splits_rows(placement: object) -> bool:
    """Whether a placement gives each process some of the rows; of _StridedShard too."""
    return getattr(placement, "dim", None) == 0


def is_awaited(gradients: Gradients, rule: Rule) -> bool:
    """Whether other processes wait for the norms of a list that this one rejected.

    Not where they find the same error in their parameters.
    """
    if gradients.plan is None or gradients.plan.reduction is None:
        return False
    return gradients.sharding.one_list or not rule.per_gradient


def _reduced_norm(
    gradients: ShardedGradients, norm: Callable[..., Exchange[Tensor]]
) -> Exchange[Tensor]:
    """A reduction of norms, which a process may enter with a rejected list.

    Args:
        gradients: with their plan.
        norm: takes the devices, and whether this process rejects its gradients.

    Raises:
        TypeError, ValueError, RuntimeError: that of the process that rejects its gradients.
    """
    plan = gradients.plan
    assert plan is not None
    rejected = gradients.error is not None
    try:
        return (yield from norm(device=plan.device, home=gradients.device, rejected=rejected))
    except Rejected:
        # Of which one process has the reason.
        pass
    agree({}, gradients.error, gradients.sharding.domain)
    raise AssertionError("a process reported an error but sent no message")


def _raise_error(gradients: ShardedGradients, *, names_culprits: bool) -> None:
    """Raises the error of a rejected list, after its norms were measured.

    Args:
        gradients: measured.
        names_culprits: the others will ask for names of gradients where a norm is NaN.

    Raises:
        TypeError, ValueError, RuntimeError: the error; none where the list was not rejected.
    """
    if gradients.error is None:
        return
    if names_culprits:
        everyones([], gradients.sharding.domain)
    raise gradients.error
