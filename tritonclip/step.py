"""The clipping of one optimizer step: parameter groups, each with the rule that holds for it.

All groups are measured before the first gradient is written, so that a step can still be refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonclip import gradients
from tritonclip.apply import Clipping, nonfinite_places, refuse_for_rule
from tritonclip.flat import FlatGradients
from tritonclip.gradient_list import GradientList
from tritonclip.group_rules import Groups, rule_of
from tritonclip.rules import ClipByGlobalNorm, ClipByNorm, Rule
from tritonclip.stats import Outcomes

# Measures whether all is finite, and changes nothing but a loss scale.
_LEAVE_ALONE = ClipByGlobalNorm(math.inf, math.inf, eps=0.0)
_REMEDY = (
    "Neither gradients nor parameters were changed. To go on, set nonfinite to 'propagate', 'zero' "
    "or 'skip'"
)


@dataclass(slots=True)
class _Share:
    """Gradients that share a rule; `owner` is the one parameter group that it belongs to.

    `alone` marks those that no rule holds for.
    """

    found: GradientList
    rule: Rule
    owner: int | None
    alone: bool = False
    clipping: Clipping | None = None


class StepClipping:
    """What one step clips: measured on construction, written by `write_`.

    Args:
        groups: parameter groups of an optimizer.
        rule: for the groups that have no key `clip`, under one norm.
        nonfinite: of the wrapper's policies; only "zero" concerns what is written.
        grad_scale: the loss scale that all gradients still carry; None for none.
        judge: whether `nonfinite` will be asked for. It looks at every gradient, also at those that
            no rule holds for.
        flat: the gradients of all groups, but for those of `outside`.
        outside: which parameters are not in `flat`: (group, position).

    Raises:
        TypeError, ValueError: a `clip` that is no rule, and what `clip_` refuses.
    """

    @torch.no_grad()
    def __init__(
        self,
        groups: Groups,
        rule: Rule,
        nonfinite: str,
        grad_scale: Tensor | float | None,
        *,
        judge: bool,
        flat: FlatGradients | None = None,
        outside: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._policy = "zero" if nonfinite == "zero" else "propagate"
        self._grad_scale = 1.0 if grad_scale is None else grad_scale
        self._writes_all = grad_scale is not None
        self._groups, self._judge = groups, judge
        if flat is None or any("clip" in group for group in groups):
            self._shares = self._divide(rule)
        else:
            self._shares = self._divide_flat(rule, flat, outside)
        for share in self._shares:
            refuse_for_rule(share.found, share.rule)
        if len(self._shares) > 1:
            _refuse_shared([share.found for share in self._shares])
        look = judge or self._policy == "zero"
        for share in self._shares:
            if share.found.groups:
                share.clipping = Clipping(share.found, share.rule, self._grad_scale, look=look)

    def _divide(self, rule: Rule) -> list[_Share]:
        common: list[int] = []
        alone: list[tuple[int, int]] = []
        shares = []
        for number, group in enumerate(self._groups):
            if "clip" not in group:
                common.append(number)
                continue
            own = rule_of(number, group)
            if own is not None:
                shares.append(_Share(self._found([number]), own, number))
            else:
                alone += [(number, i) for i in range(len(group["params"]))]
        if common:
            shares.insert(0, _Share(self._found(common), rule, None))
        if self._judge or self._writes_all:
            alone += [
                (number, i)
                for number, group in enumerate(self._groups)
                if group.get("clip", rule) is not None
                for i, p in enumerate(group["params"])
                if not getattr(p, "need_clip", True)
            ]
            shares += self._left_alone(alone)
        return shares

    def _divide_flat(
        self, rule: Rule, flat: FlatGradients, outside: Sequence[tuple[int, int]]
    ) -> list[_Share]:
        """One share, without a look at every parameter, and the excluded ones."""
        for number, position in outside:
            parameter = self._groups[number]["params"][position]
            if parameter.grad is not None and getattr(parameter, "need_clip", True):
                raise RuntimeError(
                    f"{self._label(number, position)} has a gradient, but was left out of "
                    "FlatGradients, because it required none or had need_clip = False; make a new "
                    "FlatGradients and set the attribute flat to it"
                )
        shares = [_Share(flat.gradient_list(each=isinstance(rule, ClipByNorm)), rule, None)]
        if self._judge or self._writes_all:
            shares += self._left_alone(outside)
        return shares

    def _found(self, numbers: Sequence[int]) -> GradientList:
        """The gradients of whole groups, less those that need no clipping."""
        if len(numbers) == 1:
            parameters = self._groups[numbers[0]]["params"]
        else:
            parameters = [p for number in numbers for p in self._groups[number]["params"]]

        def label_of(position: int) -> str:
            for number in numbers:
                n = len(self._groups[number]["params"])
                if position < n:
                    break
                position -= n
            return self._label(number, position)

        return gradients.of_parameters(parameters, label_of)

    def _left_alone(self, members: Sequence[tuple[int, int]]) -> list[_Share]:
        """The gradients that no rule holds for, as a share of their own, if there are any."""
        grads = {(n, i): self._groups[n]["params"][i].grad for n, i in members}
        there = [member for member, grad in grads.items() if grad is not None]
        if not there:
            return []
        found = gradients.of_tensors([grads[m] for m in there], lambda i: self._label(*there[i]))
        return [_Share(found, _LEAVE_ALONE, None, alone=True)]

    def _label(self, number: int, position: int) -> str:
        """What messages call a parameter."""
        names = self._groups[number].get("param_names", ())
        # Parameters that were added to the group by hand have none.
        if position < len(names):
            return str(names[position])
        return f"param_groups[{number}]['params'][{position}]"

    @torch.compiler.disable
    @torch.no_grad()
    def nonfinite(self) -> Tensor:
        """Whether any gradient is NaN or inf, or any norm does not fit its dtype; 0-d bool.

        It is on the device of the first gradient and does not wait for it.
        """
        flags = []
        for share in self._shares:
            if share.clipping is not None:
                flags.append(~torch.isfinite(share.clipping.norm()).all())
                if getattr(share.rule, "norm_type", 2.0) in (0.0, -math.inf):
                    # These norms do not show what is not finite.
                    look = Clipping(share.found, _LEAVE_ALONE, self._grad_scale, look=True)
                    flags.append(~torch.isfinite(look.norm()))
        if not flags:
            return torch.zeros((), dtype=torch.bool)
        device = flags[0].device
        return flags[0] if len(flags) == 1 else torch.stack([f.to(device) for f in flags]).any()

    @torch.compiler.disable
    @torch.no_grad()
    def raise_if_nonfinite(self, remedy: str = _REMEDY) -> None:
        """RuntimeError that names the parameters with NaN or inf; waits for the device."""
        if not bool(self.nonfinite()):
            return
        for share in self._shares:
            if share.clipping is not None:
                if not share.alone:
                    share.clipping.raise_if_nonfinite(remedy)
                _raise_if_any_nonfinite(share.found, remedy)

    @torch.compiler.disable
    @torch.no_grad()
    def write_(self) -> Outcomes:
        """Clips all groups, once; returns norms before clipping and coefficients, 0-d.

        For ClipByNorm the largest norm and the least coefficient, for ClipByValue None. Gradients
        that no rule holds for are written only to divide them by the loss scale.
        """
        outcomes: Outcomes = {}
        for share in self._shares:
            if share.alone:
                if self._writes_all and share.clipping is not None:
                    share.clipping.write_("propagate")
            else:
                outcomes[share.owner] = _outcome(share, self._policy)
        return outcomes


def _refuse_shared(lists: Sequence[GradientList]) -> None:
    """Refuses a gradient under two rules, which would be scaled twice."""
    known: dict[int, tuple[GradientList, int]] = {}
    for found in lists:
        for place, grad in enumerate(found.grads):
            address = grad.data_ptr() if grad.layout == torch.strided else 0
            if address in known:
                other, at = known[address]
                raise ValueError(
                    f"{other.label(at)} and {found.label(place)} share a gradient, but not a rule; "
                    "expected the same for both: one parameter group, and the same need_clip"
                )
            if address:
                known[address] = found, place


def _raise_if_any_nonfinite(found: GradientList, remedy: str) -> None:
    """For gradients whose own rule does not show it, or that no rule holds for."""
    places = nonfinite_places(found)
    if places:
        raise RuntimeError(f"{remedy}. Non-finite gradients: {found.labels(places)}")


def _outcome(share: _Share, nonfinite: str) -> tuple[Tensor, Tensor] | None:
    if share.clipping is None:
        device = share.found.device
        return torch.zeros((), device=device), torch.ones((), device=device)
    norm = share.clipping.write_(nonfinite)
    coefficient = share.clipping.least_coefficient()
    if norm is None or coefficient is None:
        return None
    return norm.max() if isinstance(share.rule, ClipByNorm) else norm, coefficient
