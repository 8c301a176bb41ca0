"""Computes a call a second time by the plain torch backend, in float64 on copies, and compares.

Slow and hungry for memory on purpose. Switched on by `verify()` or by TRITONCLIP_VERIFY=1, see
`tritonclip.settings`.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from tritonclip.backends.operators import WIDE, wide_dtype
from tritonclip.distributed.agreement import agree, describe_call, describe_parameters
from tritonclip.engine.arguments import LabelOf
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import make_plan
from tritonclip.engine.units import norms_by_unit
from tritonclip.rules import BoundRule, Norm, Rule
from tritonclip.settings import use_backend

# Norms are right to 1e-6 (float64: 1e-12), in relative terms.
_NORM_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
_REPORTED = 3


class VerificationError(RuntimeError):
    """The result of a call differs from that of the float64 reference; see :func:`verify`.

    It names the first gradients that differ, the index of an element, and both values. Gradients
    are then as the call left them. Nothing is wrong with the model: please report it.

    Example:
        >>> import tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> weight.grad = torch.ones(2)
        >>> try:
        ...     with tritonclip.verify():
        ...         norm = tritonclip.clip_(weight, 1.0)
        ... except tritonclip.VerificationError as error:
        ...     print(error)
        ... else:
        ...     print("the norm", norm, "is right")
        the norm tensor(1.4142) is right
    """


class Reference:
    """The gradients of a list before a call, in float64, for the plain torch backend."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._before = [_widened(grad).clone() for grad in gradients.tensors]
        # Norms of narrower gradients are no better for being returned as float64.
        wide = all(g.dtype in WIDE for g in gradients.tensors)
        self._norm_tolerance = _NORM_TOLERANCE[torch.float64 if wide else torch.float32]

    def check(
        self,
        compute: Callable[[Gradients], Tensor | None],
        result: Tensor | None,
        rule: Rule | None = None,
        grad_scale: float | Tensor = 1.0,
    ) -> None:
        """Compares gradients, and a result with norms, with those that `compute` finds.

        It gets the list as it was. Other processes that share the norm make this call too. `rule`
        clipped the gradients, which carried a loss scale.
        """
        with use_backend("torch"):
            twin = self._twin()
            expected = compute(twin)
        if result is not None:
            assert expected is not None
            self._compare_norms(expected, result)
        if rule is not None and rule.clamps:
            # A bound that a dtype cannot hold is its largest number. Zeros that nonfinite="zero"
            # wrote stay, although the bounds may exclude 0.
            for tensor, grad in zip(twin.tensors, self._gradients.tensors, strict=True):
                low, high = rule.bounds[grad.dtype]
                tensor.clamp_(min(low, 0.0), max(high, 0.0))
        self._compare(twin.tensors, float(grad_scale))

    def check_units(self, results: Sequence[Tensor]) -> None:
        """Compares the measured norms of the slices of each gradient along its first dimension."""
        with use_backend("torch"):
            expected = norms_by_unit(self._twin())
        for index, (right, result) in enumerate(zip(expected, results, strict=True)):
            label = self._gradients.label(index)
            self._compare_norms(right, result, f"{label}[{{}}]".format)

    def _twin(self) -> Gradients:
        """The list as it was, of float64 copies, planned anew.

        Results, limits and coefficients are rounded as those of the list.
        """
        gradients, copies = self._gradients, [before.clone() for before in self._before]
        for index in gradients.terms():
            # Processes add up such terms in their dtype.
            copies[index] = copies[index].to(gradients.tensors[index].dtype)
        twin, plan = copy(gradients), gradients.plan
        assert plan is not None
        twin.tensors = twin.readable = copies
        twin.addresses, twin.copies, twin.wrappers = None, {}, ()
        twin.plan, _, _, twin.readable = make_plan(
            *(copies, None, gradients.label, plan.device), verifying=False, sharding=plan.sharding
        )
        twin.plan.dtype = plan.dtype
        for group in twin.plan.groups:
            group.layout.dtype = plan.dtype
        return twin

    def _compare_norms(
        self, expected: Tensor, result: Tensor, label_of: LabelOf | None = None
    ) -> None:
        """Compares norms, up to their tolerance and, below normal numbers, to one unit."""
        label_of, info = label_of or self._gradients.label, torch.finfo(result.dtype)
        mismatches = []
        pairs = zip(result.reshape(-1).tolist(), expected.reshape(-1).tolist(), strict=True)
        for i, (ours, right) in enumerate(pairs):
            allowed = self._norm_tolerance * abs(right) + info.smallest_normal * info.eps
            same = ours == right or (math.isnan(ours) and math.isnan(right))
            if not same and not abs(ours - right) <= allowed:
                noun = "norm" if result.dim() == 0 else f"norm of {label_of(i)}"
                mismatches.append(f"{noun}: got {ours!r}, expected {right!r}")
        _raise(mismatches)

    def _compare(self, expected: Sequence[Tensor], grad_scale: float) -> None:
        """Compares all gradients with what they should be, up to rounding.

        If a norm may be off by the fraction t, a coefficient is off by t, and its roundings add
        less than another t. An element is then rounded to its dtype, by half a unit in the last
        place, and the expected one may be as well. Subnormal numbers have absolute errors instead:
        one unit of the least number for an element, and one for a coefficient, before and after
        the loss scale is divided out.
        """
        mismatches: list[str] = []
        for index, (right, before) in enumerate(zip(expected, self._before, strict=True)):
            grad = self._gradients.tensors[index]
            info, found = torch.finfo(grad.dtype), _widened(grad)
            n_rounded = 2 if right.dtype == grad.dtype else 1
            right = _widened(right)
            if grad.layout == torch.sparse_coo:
                # Elsewhere a gradient is 0, whatever it is multiplied by.
                has_entry = torch.zeros(grad.shape, dtype=torch.bool, device=grad.device)
                has_entry[tuple(grad._indices())] = True
                right = torch.where(has_entry, right, 0.0)
            own = torch.finfo(torch.float64 if grad.dtype in WIDE else torch.float32)
            unit = own.smallest_normal * own.eps * max(1.0, 1.0 / grad_scale)
            allowed = right.abs() * (2 * self._norm_tolerance + n_rounded * info.eps / 2)
            allowed += before.abs() * unit + info.smallest_normal * info.eps
            # NaN and inf allow for nothing. Rounding may carry past the largest number of a dtype.
            is_near = (found - right).abs() <= allowed.nan_to_num(0.0, 0.0)
            fits = right.to(grad.dtype).to(right.dtype)
            wrong = ~(is_near | (found == fits) | (found.isnan() & fits.isnan()))
            if len(places := wrong.nonzero()):
                at = tuple(places[0].tolist())
                place = f"{self._gradients.label(index)}{list(at) if at else ''}"
                text = f"{place}: got {found[at].item()!r}, expected {right[at].item()!r}"
                n = f" ({len(places)} of {found.numel()} elements differ)" if at else ""
                mismatches.append(text + n)
        _raise(mismatches)


def agree_on(
    gradients: Gradients,
    call: str,
    rule: Rule | Norm,
    grad_scale: float | Tensor = 1.0,
    nonfinite: str = "propagate",
    total_norm: Tensor | None = None,
) -> None:
    """Raises on all processes of a list if their calls differ; each calls this, and waits."""
    domain = gradients.domain
    if domain is None:
        return
    state = rule.state if isinstance(rule, BoundRule) else None
    described = {"the call": call} | describe_call(rule, float(grad_scale), nonfinite, state)
    if total_norm is not None:
        described["the total norm"] = repr(float(total_norm))
    # Tensors of no known parameters may differ between processes that share one norm.
    each = rule.each if isinstance(rule, Norm) else rule.per_gradient
    if domain.one_list and (gradients.sources is not None or each):
        described |= describe_parameters(gradients.wanted, gradients.label_of_wanted)
    agree(described, gradients.error, domain)


def _raise(mismatches: list[str]) -> None:
    """Raises VerificationError with the first of some lines, if there are any."""
    if mismatches:
        more = f"; and {len(mismatches) - _REPORTED} more" if len(mismatches) > _REPORTED else ""
        raise VerificationError(
            "tritonclip computed something else than its plain reference: "
            + "; ".join(mismatches[:_REPORTED])
            + more
            + ". This is a bug in tritonclip or in its compiler: use "
            "tritonclip.use_backend('torch') and report it"
        )


def _widened(x: Tensor) -> Tensor:
    """A dense and contiguous tensor in the widest dtype of its device."""
    x = x.detach() if x.layout == torch.strided else x.detach().to_dense()
    wide = wide_dtype(x.device)
    dtype = wide.to_complex() if x.is_complex() else wide
    return x.resolve_conj().resolve_neg().to(dtype).contiguous()
