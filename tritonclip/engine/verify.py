"""Computes a call a second time by the plain torch backend, in float64 on copies, and compares.

Slow and hungry for memory on purpose. Switched on by `verify()` or by TRITONCLIP_VERIFY=1, see
`tritonclip.settings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tritonclip.backends import operators
from tritonclip.backends.choose import torch_layout
from tritonclip.backends.operators import as_scalar, as_tensor, wide_dtype
from tritonclip.engine import norms as engine
from tritonclip.engine import units
from tritonclip.engine.arguments import LabelOf
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import Norms
from tritonclip.engine.plan import WIDE, Group
from tritonclip.engine.units import norms_by_unit
from tritonclip.rules import BoundRule, ClipState, Norm, Rule
from tritonclip.rules.rule import Measured
from tritonclip.settings import use_backend

# Norms are right to 1e-6 (float64: 1e-12); the coefficient adds three roundings, the store one.
_NORM_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
# So much closer to the limit, the norm's own error decides whether anything is written.
_MARGIN = 1 + 1e-5
_REPORTED = 3

# Clips a list by a rule and its norms; a rule that clamps may need none.
Write = Callable[[Gradients, Rule, Norms | None], object]


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
        self._before = [widened(dense(g)).clone() for g in gradients.tensors]
        # Norms of narrower gradients are no better for being returned as float64.
        wide = all(g.dtype in WIDE for g in gradients.tensors)
        self._norm_tolerance = _NORM_TOLERANCE[torch.float64 if wide else torch.float32]

    def check_clip(
        self,
        write: Write,
        rule: Rule,
        grad_scale: float | Tensor,
        measured: Norms | None,
        result: Tensor | None,
        *,
        zero_nonfinite: bool,
        keeps_scale: bool,
    ) -> None:
        """Compares gradients that `write` clipped, and their norms.

        `measured` are the norms by which they were clipped, where these were measured, and `result`
        those before clipping. All other arguments are those that `write` had.
        """
        if not self._before:
            return
        assert self._gradients.plan is not None
        dtype, scale = self._gradients.plan.dtype, 1.0 if keeps_scale else float(grad_scale)
        rule = _RoundedLimit(rule, dtype)
        with use_backend("torch"):
            right = self._copy()
            norms = None if measured is None else _measure(right, rule, measured, dtype)
            if norms is not None and result is not None and not norms.is_checked:
                self._compare_norms(norms.norm_here(), result)
            is_erased = zero_nonfinite and norms is not None and not bool(norms.is_finite())
            exact = [scale == 1 or is_erased] * len(self._before)
            if norms is not None and not rule.clamps and scale == 1 and not is_erased:
                exact = self._untouched(write, rule, norms, right)
            write(right, rule, norms)
        slack = [0.0] * len(self._before) if rule.clamps else self._lost_digits(scale)
        self._compare(right.tensors, exact, slack)

    def _untouched(self, write: Write, rule: Rule, norms: Norms, twin: Gradients) -> list[bool]:
        """Which gradients a call must not write, also if its norms are a little larger.

        `norms` are of the copy `twin`, which is as it was in the end.
        """
        # Asked for norms as they are.
        rule.limit(norms)
        larger = []
        for measured in map(as_tensor, norms.partials):
            # By unit, norms of weights stand below.
            above = measured if measured.dim() == 1 else measured[:1]
            larger.append(torch.cat([above * _MARGIN, measured[len(above) :]]))
        write(twin, rule, replace(norms, partials=larger))
        pairs = zip(twin.tensors, self._before, strict=True)
        untouched = [torch.equal(after, before) for after, before in pairs]
        torch._foreach_copy_(list(twin.tensors), self._before)
        return untouched

    def check_scale(self, write: Callable[[Gradients], object]) -> None:
        """Compares gradients that were scaled by the coefficient of a norm that was given."""
        right = self._copy()
        write(right)
        self._compare(right.tensors, [False] * len(self._before), self._lost_digits(1.0))

    def check_norms(self, measured: Norms) -> None:
        """Compares a measured norm, or the norms of all gradients."""
        norm = Norm(measured.norm_type, measured.per_gradient)
        with use_backend("torch"):
            expected = self._copy().measure(norm, measured.grad_scale)
        self._compare_norms(expected.norm(), measured.norm())

    def check_units(self, results: Sequence[Tensor]) -> None:
        """Compares the measured norms of the slices of each gradient along its first dimension."""
        with use_backend("torch"):
            expected = norms_by_unit(self._copy())
        for index, (right, result) in enumerate(zip(expected, results, strict=True)):
            label = self._gradients.label(index)
            self._compare_norms(right, result, f"{label}[{{}}]".format)

    def _copy(self) -> Gradients:
        """The list as it was, of tensors and results in float64, for the torch backend."""
        twin: Any = copy(self._gradients)
        plan = self._gradients.plan
        assert plan is not None
        twin.tensors = [grad.clone() for grad in self._before]
        twin.readable = [torch.view_as_real(g) if g.is_complex() else g for g in twin.tensors]
        # No other tensors are read, or count versions.
        twin.addresses, twin.versions, twin.copies, twin.wrappers = None, None, {}, ()
        members: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for index, grad in enumerate(self._gradients.tensors):
            key = grad.device, grad.dtype.to_real(), grad.is_complex()
            members.setdefault(key, []).append(index)
        groups = []
        for (device, dtype, pairs), indices in members.items():
            layout = torch_layout(device)
            layout.dtype = wide_dtype(device)
            # Of the gradients themselves: bounds are rounded to it.
            groups.append(Group(indices, device, dtype, pairs, layout))
        twin.plan = replace(
            plan,
            groups=tuple(groups),
            dtype=wide_dtype(plan.device),
            staged=(),
            views=(),
            sparse=(),
            sizes=None,
            units=None,
            guards=None,
            verifying=False,
        )
        return twin  # type: ignore[no-any-return]

    def _lost_digits(self, grad_scale: float) -> Iterator[Tensor]:
        """The error of each element from a coefficient below the least normal number of its dtype.

        Before and after the loss scale is divided out, that has half a unit in the last place.
        """
        for grad, before in zip(self._gradients.tensors, self._before, strict=True):
            wide = grad.dtype in WIDE
            info = torch.finfo(torch.float64 if wide else torch.float32)
            unit = info.smallest_normal * info.eps
            yield before.abs() * (unit * max(1.0, 1.0 / grad_scale))

    def _compare_norms(
        self, expected: Tensor, result: Tensor, label_of: LabelOf | None = None
    ) -> None:
        """Compares norms."""
        label_of, tolerance = label_of or self._gradients.label, self._norm_tolerance
        pairs = zip(result.reshape(-1).tolist(), expected.reshape(-1), strict=True)
        mismatches = []
        for i, (ours, right) in enumerate(pairs):
            reference, fits = right.item(), right.to(result.dtype).item()
            same = ours == fits or (math.isnan(ours) and math.isnan(fits))
            # Below the least normal number, the norm is right to one unit in the last place.
            info = torch.finfo(result.dtype)
            allowed = tolerance * abs(reference) + info.smallest_normal * info.eps
            if not same and not abs(ours - reference) <= allowed:
                noun = "norm" if result.dim() == 0 else f"norm of {label_of(i)}"
                mismatches.append(f"{noun}: got {ours!r}, expected {reference!r}")
        raise_mismatches(mismatches)

    def _compare(
        self, expected: Sequence[Tensor], exact: Sequence[bool], slack: Iterable[float | Tensor]
    ) -> None:
        """Compares all gradients with what they should be: where `exact`, in every bit.

        Others may differ by rounding, and by the `slack` of their elements.
        """
        mismatches: list[str] = []
        for index, (right, is_exact, error) in enumerate(zip(expected, exact, slack, strict=True)):
            grad = self._gradients.tensors[index]
            info = torch.finfo(grad.dtype)
            found = widened(dense(grad))
            if grad.layout == torch.sparse_coo:
                # Elsewhere a gradient is 0, whatever it is multiplied by.
                has_entry = torch.zeros(grad.shape, dtype=torch.bool, device=grad.device)
                has_entry[tuple(grad._indices())] = True
                right = torch.where(has_entry, right, 0.0)
            # Rounding to the gradient's dtype may also carry past its largest value, and loses
            # values below its least. Among those, half a unit comes from the norm and half from
            # rounding.
            fits = right.to(grad.dtype).to(right.dtype)
            wrong = ~((found == fits) | (found.isnan() & fits.isnan()))
            if not is_exact:
                rounding = right.abs() * (2 * self._norm_tolerance + info.eps / 2)
                allowed = rounding + info.smallest_normal * info.eps + error
                wrong &= ~((found - right).abs() <= allowed)
            mismatches += mismatch(self._gradients.label(index), found, right, wrong)
        raise_mismatches(mismatches)


class _RoundedLimit(BoundRule):
    """A rule whose limit is asked for once, and is inf beyond the range of a dtype of results."""

    def __init__(self, rule: Rule, dtype: torch.dtype) -> None:
        super().__init__(rule, ClipState())
        self._dtype = dtype

    def limit(self, measured: Measured) -> Tensor:
        """The limit of the call, as it rounds it."""
        limit = torch.as_tensor(super().limit(measured), dtype=wide_dtype(measured.device))
        return limit.to(self._dtype)


def _measure(twin: Gradients, rule: Rule, measured: Norms, dtype: torch.dtype) -> Norms:
    """Norms of the copy `twin`, as the call has measured them of the gradients.

    Checked ones are taken as they are, as other processes have parts of them. Beyond the range of
    `dtype`, that of the results of the call, a norm is inf.
    """
    plan, scale = twin.plan, measured.grad_scale
    assert plan is not None
    batches: list[Any]
    if rule.per_unit and not measured.is_checked:
        return engine.measure_by(twin, rule, scale)
    norms = measured
    if not measured.is_checked:
        norms = engine.measure(twin, rule.norm_type, rule.per_gradient, scale)
    values = norms.norm_here().reshape(-1).to(plan.dtype)
    values = torch.where(values.to(dtype).isinf(), math.inf, values)
    if rule.norm_type:
        values = values * as_scalar(scale, values)
    partials = [
        (values[group.indices] if rule.per_gradient else values).to(group.device)
        for group in plan.groups
    ]
    if rule.per_unit:
        batches = [*units.batches_of(twin, rule)]
        partials = [
            batch.with_whole(batch.measure(), norms_each, _weight_norms(twin, group, norms_each))
            for batch, norms_each, group in zip(batches, partials, plan.groups, strict=True)
        ]
    else:
        batches = [group.layout.bind(*twin.of_group(group.indices)) for group in plan.groups]
    return replace(norms, batches=batches, partials=partials, gradients=twin, plan=plan)


def _weight_norms(twin: Gradients, group: Group, like: Tensor) -> Tensor:
    """The norms of the whole weights of parameters that are one unit; 0 for others."""
    owners: list[Any] = twin.owners()
    norms = [0.0] * len(like)
    for at, index in enumerate(group.indices or ()):
        if (owner := owners[index]).dim() < 2:
            whole = owner.full_tensor() if hasattr(owner, "full_tensor") else owner
            norms[at] = norm_of(whole, 2.0)
    return like.new_tensor(norms)


def check_norms(measured: Norms) -> None:
    """Compares norms of gradients that are not written yet, unless that was done."""
    if not measured.is_checked:
        Reference(measured.gradients).check_norms(measured)


def mismatch(label: str, found: Tensor, expected: Tensor, wrong: Tensor) -> list[str]:
    """A line for a tensor of which some elements are wrong; none if none is."""
    places = wrong.nonzero()
    if len(places) == 0:
        return []
    at = tuple(places[0].tolist())
    place = f"{label}{list(at)}" if at else label
    text = f"{place}: got {found[at].item()!r}, expected {expected[at].item()!r}"
    return [f"{text} ({len(places)} of {found.numel()} elements differ)" if at else text]


def raise_mismatches(mismatches: list[str]) -> None:
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


def dense(grad: Tensor) -> Tensor:
    """A dense tensor, its own or the gradient's."""
    return grad.detach().to_dense() if grad.layout != torch.strided else grad.detach()


def widened(x: Tensor) -> Tensor:
    """A contiguous tensor in the widest dtype of its device."""
    wide = wide_dtype(x.device)
    dtype = wide.to_complex() if x.is_complex() else wide
    return x.resolve_conj().resolve_neg().to(dtype).contiguous()


def norm_of(x: Tensor, norm_type: float) -> float:
    """The norm of a tensor, from float64 copies of its elements."""
    magnitudes = widened(dense(x)).abs()
    return float(operators.norm_of([magnitudes], norm_type, magnitudes.dtype))
