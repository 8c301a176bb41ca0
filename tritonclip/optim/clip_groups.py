"""Clip groups: the gradients of an optimizer that share a rule.

A parameter group may carry a rule under the key `clip`. A `Grouping` divides the gradients of a
step into clip groups: all parameter groups without the key form one, and each of the others forms
another. `measure_requests` then measures all norms of the step before the first gradient is
written. Over processes, each norm takes one all-reduce, in the same order on every process.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonclip.backends import choose
from tritonclip.backends.operators import combine_numbers
from tritonclip.distributed.domain import Processes
from tritonclip.distributed.shards import meshes_of
from tritonclip.engine import execute
from tritonclip.engine.arguments import needs_clip
from tritonclip.engine.gradients import Gradients, collect, collect_all
from tritonclip.engine.norms import Norms, take_part
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.modes import PLAIN
from tritonclip.monitor.stats import Clipped, as_tensor
from tritonclip.rules import (
    ClipByGlobalNorm,
    ClipByValue,
    Norm,
    Rule,
    as_rule,
    known_rule,
)

Groups = Sequence[Mapping[str, Any]]
# The rules of parameter groups with the key, by the group's index; None clips nothing.
OwnRules = Mapping[int, Rule | None]

# Applies a loss scale alone. Its inf-norm is finite exactly if every gradient is finite.
UNLIMITED = ClipByGlobalNorm(math.inf, math.inf, eps=0.0)
# Writes gradients without a rule by value: by a norm, one NaN would reach all of them.
UNBOUNDED = ClipByValue(math.inf)
TWO_NORM, EACH_NORM = Norm(), Norm(each=True)


def refuse_differentiable(number: int, group: Mapping[str, Any]) -> None:
    """Raises ValueError for a group with differentiable=True, as clipping records no graph."""
    if group.get("differentiable"):
        raise ValueError(
            f"param_groups[{number}] has differentiable=True, and a gradient through the update "
            "would take the clip for a constant; expected False, or the bare optimizer after a "
            "clip of tritonclip.functional, such as clip_by_global_norm, which is differentiable"
        )


def rule_of(number: int, group: Mapping[str, Any]) -> Rule | None:
    """Returns the rule that a parameter group carries under `clip`; None leaves the group alone."""
    clip = group["clip"]
    try:
        if type(clip) in (float, int):
            # Made only once, because every step reads the rules of groups.
            made: Rule = known_rule(ClipByGlobalNorm, clip)
            return made
        return None if clip is None else as_rule("clip", clip)
    except (TypeError, ValueError) as error:
        raise type(error)(f"param_groups[{number}]['clip']: {error}; None clips nothing") from None


def rules_of(groups: Groups) -> dict[int, Rule | None]:
    """The rules that parameter groups carry."""
    return {index: rule_of(index, group) for index, group in enumerate(groups) if "clip" in group}


def key_of(group_index: int | None) -> str:
    """Names a group's rule, norms and state in checkpoints and records; None is the shared rule."""
    return "rule" if group_index is None else f"group{group_index}"


def label_of_member(groups: Groups, index: int, position: int) -> str:
    """Names a parameter of a group in messages."""
    names = groups[index].get("param_names", ())
    # Parameters that were added to the group by hand have none.
    if position < len(names):
        return str(names[position])
    return f"param_groups[{index}]['params'][{position}]"


def label_at(groups: Groups, indices: Sequence[int], position: int) -> str:
    """Names a parameter in messages, by its position among the parameters of several groups."""
    for index in indices:
        n = len(groups[index]["params"])
        if position < n:
            break
        position -= n
    return label_of_member(groups, index, position)


def grads_in(groups: Groups) -> list[Tensor]:
    """The gradients of all parameters that have one."""
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def unclipped_in(groups: Groups, without_rule: Container[int] = ()) -> list[tuple[int, int]]:
    """Lists parameters of groups `without_rule`, or with need_clip = False: (group, position)."""
    return [
        (number, position)
        for number, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
        if number in without_rule or not needs_clip(parameter)
    ]


@dataclass(slots=True, eq=False)
class ClipGroup:
    """Gradients that share a rule, and their norms as far as they are measured.

    Attributes:
        index: the parameter group that carries the rule; None for the optimizer's rule.
        unclipped: whether no rule holds for the gradients.
        norms: the norms before clipping that the rule needs.
        others: norms for other readers: the 2-norm if `norms` have another order, and the norm of
            each gradient.
    """

    gradients: Gradients
    rule: Rule
    index: int | None = None
    unclipped: bool = False
    norms: Norms | None = None
    others: dict[Norm, Norms] = field(default_factory=dict)

    @property
    def is_spread(self) -> bool:
        """Whether other processes have, or may have, shards of the gradients."""
        return self.gradients.domain is not None

    @property
    def owner(self) -> str:
        """Names the rule's parameter groups in messages."""
        if self.unclipped:
            return "unclipped parameters"
        return "the optimizer" if self.index is None else f"param_groups[{self.index}]"

    @property
    def has_norm(self) -> bool:
        """Whether the gradients have a rule that measures norms."""
        return not (self.unclipped or self.rule.clamps)

    def norm(self) -> float | Tensor:
        """Returns the norm of all gradients before clipping; 0-d unless the host decides."""
        return 0.0 if self.norms is None else _norm_of_all(self.norms)

    def clip_(self, grad_scale: float | Tensor, *, zero_nonfinite: bool) -> Clipped | None:
        """Clips by the rule, once; returns the outcome, or None for a rule that clamps."""
        if self.gradients.plan is None:
            if self.rule.clamps:
                return None
            zero = torch.zeros((), dtype=torch.float32, device=self.gradients.device)
            return Clipped(zero, torch.ones_like(zero), math.nan)
        norm, by_group, limit = execute.write_(
            self.gradients, self.rule, self.norms, grad_scale, zero_nonfinite=zero_nonfinite
        )
        if norm is None:
            return None
        if not self.rule.per_gradient:
            return Clipped(norm, by_group[0][1], limit)
        if not by_group:
            return Clipped(norm.new_zeros(()), norm.new_ones(()), limit)
        coefficient = by_group[0][1]
        # On a CPU it is a number, and the least already.
        if len(by_group) > 1 or isinstance(coefficient, Tensor):
            least = [as_tensor(one, norm).min() for _, one in by_group]
            coefficient = least[0] if len(least) == 1 else torch.stack(least).min()
        return Clipped(norm.max(), coefficient, limit)


class Grouping:
    """Divides an optimizer's gradients into clip groups; `rule` is for groups that carry none."""

    def __init__(self, optimizer: Optimizer, rule: Rule, processes: Processes | None) -> None:
        self.rule, self.processes = rule, processes
        self.optimizer, self._plans = optimizer, PlanCache()
        # The rules of groups, as they were read last.
        self._own_rules: OwnRules = rules_of(optimizer.param_groups)

    @property
    def groups(self) -> Groups:
        """The parameter groups."""
        return self.optimizer.param_groups

    def parameters(self) -> list[Tensor]:
        """All parameters, in order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; CPU if there is none."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                device: torch.device = parameter.device
                return device
        return torch.device("cpu")

    def names(self) -> list[str]:
        """The names of all parameters, in order."""
        names: list[str] = []
        for index, group in enumerate(self.groups):
            given, n = group.get("param_names", ()), len(group["params"])
            if len(given) != n:
                given = [label_of_member(self.groups, index, i) for i in range(n)]
            names += given
        return names

    def rules(self, *, anew: bool = True) -> dict[str, Rule]:
        """Returns all rules by their keys in a checkpoint; if not `anew`, as they were read last.

        Reading them raises as `rules_of` does.
        """
        if anew:
            self._own_rules = rules_of(self.groups)
        own = {key_of(i): rule for i, rule in self._own_rules.items() if rule}
        return {key_of(None): self.rule, **own}

    def is_without_grads(self) -> bool:
        """Whether there is no gradient, and no other process that waits for a norm."""
        parameters = self.parameters()
        spread = self.processes is not None or bool(meshes_of(parameters))
        return not spread and all(p.grad is None for p in parameters)

    def divide(self, *, covers_all: bool) -> tuple[list[ClipGroup], Exception | None]:
        """Makes the clip group of the optimizer's rule, then one for each group with a rule.

        With `covers_all`, gradients without a rule form the last one. If a group's rule is invalid,
        its error is returned, all rules stay as they were, and the step must be refused.
        """
        groups, processes, refusal = self.optimizer.param_groups, self.processes, None
        if self._own_rules or True in ["clip" in group for group in groups]:
            try:
                self._own_rules = rules_of(groups)
            except (TypeError, ValueError) as error:
                refusal = error
        own_rules = self._own_rules
        if covers_all or own_rules:
            processes = _with_meshes(processes, groups)
        lists: list[tuple[int | None, Sequence[int], Rule]] = [
            (None, range(len(groups)), self.rule)
        ]
        if own_rules:
            shared = [index for index in range(len(groups)) if index not in own_rules]
            lists = [(None, shared, self.rule)] if shared else []
            # After a refusal, rules may belong to groups that are gone.
            own = [(i, own_rules[i]) for i in range(len(groups)) if i in own_rules]
            lists += [(i, [i], rule) for i, rule in own if rule is not None]
        clip_groups = []
        for owner, members, rule in lists:
            if len(members) == 1:
                parameters = groups[members[0]]["params"]
            else:
                parameters = list(chain.from_iterable([groups[i]["params"] for i in members]))
            label_of, device = partial(label_at, groups, members), None
            if not parameters:
                device = self.device
            gradients = collect(parameters, label_of, processes, self._plans, device)
            clip_groups.append(ClipGroup(gradients, rule, owner))
        if covers_all:
            n_clipped = sum([len(clip_group.gradients.tensors) for clip_group in clip_groups])
            unclipped: list[tuple[int, int]] = []
            if n_clipped < sum([len(group["params"]) for group in groups]):
                without_rule = [index for index, rule in own_rules.items() if rule is None]
                unclipped = unclipped_in(groups, without_rule)
            clip_groups += self._unclipped(unclipped, processes)
        return clip_groups, refusal

    def _unclipped(
        self, members: Sequence[tuple[int, int]], processes: Processes | None
    ) -> list[ClipGroup]:
        """Makes one clip group of gradients that no rule holds for, if a process may have any."""
        if not members and (processes is None or processes.group is None):
            # In a process group, others may have such parameters even if this process has none.
            return []
        groups = self.groups
        parameters = [groups[n]["params"][i] for n, i in members]
        gradients = collect_all(
            parameters,
            lambda i: label_of_member(groups, *members[i]),
            processes,
            self._plans,
            parameters[0].device if parameters else self.device,
        )
        if gradients.plan is None:
            return []
        return [ClipGroup(gradients, UNLIMITED, unclipped=True)]


def _with_meshes(processes: Processes | None, groups: Groups) -> Processes | None:
    """Adds the meshes of all groups, so that all lists of a step reduce over one domain."""
    others = [p for group in groups for p in group["params"] if type(p) not in PLAIN]
    meshes = meshes_of(others) if others else ()
    return (processes or Processes())._replace(meshes=meshes) if meshes else processes


class NormRequest(NamedTuple):
    """A norm of a clip group that is to be measured, for its rule or for another reader."""

    group: ClipGroup
    norm: Norm
    of_rule: bool = False

    def describe(self) -> str:
        """Describes owner, norm and reader, which must agree in all processes."""
        what = "norms of each gradient" if self.norm.each else "the norm"
        reader = "for its rule" if self.of_rule else "beside its rule"
        return f"{self.group.owner}: {what} of order {self.norm.order}, {reader}"


def measure_requests(requests: Sequence[NormRequest], grad_scale: float | Tensor) -> None:
    """Measures norms; if gradients were refused, only norms that other processes wait for."""
    for group, norm, of_rule in requests:
        # By value, elements are checked still scaled: the quotient is 1, or NaN if the scale is.
        scale = grad_scale / grad_scale if of_rule and group.rule.clamps else grad_scale
        # `take_part` raises nothing for refused lists: the step raises their errors.
        norms = take_part(group.gradients, norm, scale)
        if norms is not None and of_rule:
            group.norms = norms
        elif norms is not None:
            group.others[norm] = norms


def global_norm_of(
    groups: Sequence[ClipGroup], grad_scale: float | Tensor
) -> tuple[float | Tensor, torch.dtype]:
    """Returns the 2-norm before clipping of all gradients under a rule, and its dtype."""
    clipped = [
        group for group in groups if not group.unclipped and group.gradients.plan is not None
    ]
    measured = [_two_norm_of(group, grad_scale) for group in clipped]
    if len(measured) == 1:
        (norms,) = measured
        return _norm_of_all(norms), torch.float64 if norms.per_gradient else norms.plan.dtype
    found = list(map(_norm_of_all, measured))
    device = groups[0].gradients.device if groups else torch.device("cpu")
    numbers = [norm for norm in found if isinstance(norm, float)]
    if len(numbers) == len(found) and choose.host_decides(device):
        return combine_numbers(numbers, 2.0) if numbers else 0.0, torch.float64
    wide = [torch.as_tensor(norm, dtype=torch.float64, device=device) for norm in found]
    return _norm_of(torch.stack(wide)) if wide else torch.zeros((), device=device), torch.float64


def _norm_of_all(norms: Norms) -> float | Tensor:
    """Returns the norm of all gradients of a list; 0-d unless the host decides."""
    numbers = norms.numbers()
    if isinstance(numbers, list):
        return combine_numbers(numbers, 2.0) if numbers else 0.0
    if numbers is not None:
        return numbers
    return _norm_of(norms.norm()) if norms.per_gradient else norms.norm()


def _two_norm_of(group: ClipGroup, grad_scale: float | Tensor) -> Norms:
    """Returns the 2-norms of a clip group, and measures them if they are not known yet."""
    norms = group.norms
    if norms is not None and norms.norm_type == 2.0:
        return norms
    if TWO_NORM not in group.others:
        measure_requests([NormRequest(group, TWO_NORM)], grad_scale)
    return group.others[TWO_NORM]


def _norm_of(norms: Tensor) -> Tensor:
    """Combines 2-norms to one in float64, because squares of float32 norms may overflow."""
    norm: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return norm
