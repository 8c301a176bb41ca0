"""Computes a call a second time, plainly, in float64 on copies, and compares.

Slow and hungry for memory on purpose, one tensor at a time: no arithmetic is shared with the call
that it checks. Switched on by `verify()` or by TRITONCLIP_VERIFY=1, see `tritonclip.settings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tritonclip.engine.arguments import LabelOf
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import Norms
from tritonclip.engine.units import weight_of
from tritonclip.rules import Rule
from tritonclip.rules.rule import Adaptive

# Norms are right to 1e-6 (float64: 1e-12); the coefficient adds three roundings, the store one.
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


class Expectation:
    """Copies of the gradients before a call, from which the right result is computed."""

    def __init__(self, gradients: Gradients) -> None:
        assert gradients.plan is not None
        self._gradients, self._dtype = gradients, gradients.plan.dtype
        self._before = [dense(g).clone() for g in gradients.tensors]
        # Norms of narrower gradients are no better for being returned as float64.
        wide = all(g.dtype in (torch.float64, torch.complex128) for g in self._before)
        self._norm_tolerance = _NORM_TOLERANCE[torch.float64 if wide else torch.float32]

    def check_clip(
        self,
        rule: Rule,
        zero_nonfinite: bool,
        grad_scale: float | Tensor,
        measured: Norms | None,
        result: Tensor | None,
        *,
        keeps_scale: bool = False,
    ) -> None:
        """Compares a finished `clip_` call that measured norms and returned a result."""
        if not self._before:
            return
        is_known = measured is not None and measured.is_checked
        scale = float(grad_scale)
        # A count of elements carries no loss scale.
        divisor = 1.0 if rule.clamps or rule.norm_type == 0 else scale
        if keeps_scale:
            scale = 1.0
        matrices = MatrixReference(self._gradients, rule) if rule.spectral else None
        if matrices is None:
            norms = [norm_of(g, rule.norm_type) / divisor for g in self._before]
        else:
            norms = [matrices.norm_of(g) / divisor for g in self._before]
        if not (rule.clamps or rule.per_gradient):
            norms = [self._total(norms, rule.norm_type)] * len(norms)
        # A norm beyond the range of the result's dtype is inf there, and its coefficient 0.
        norms = [rounded(n, self._dtype) for n in norms]
        if is_known and result is not None:
            # Compared already, also with gradients that are not here.
            norms = (result if rule.per_gradient else result.expand(len(norms))).tolist()
        elif result is not None:
            below = MatrixReference.NORM_TOLERANCE if rule.spectral else 0.0
            self._compare_norms(norms if rule.per_gradient else norms[:1], result, below=below)
        finite = all(math.isfinite(n) for n in norms)
        if measured is not None and is_known:
            finite = bool(measured.is_finite())
        erase = zero_nonfinite and not finite
        limits = self._limits(rule, norms, measured)
        units = UnitReference(self._gradients, rule) if rule.per_unit else None

        mismatches: list[str] = []
        for index, (norm, max_norm) in enumerate(zip(norms, limits, strict=True)):
            before = self._before[index]
            exact = scale == 1
            slack = 0.0 if rule.clamps else self._lost_digits(index, scale)
            if erase:
                expected = torch.zeros_like(widened(before))
            elif rule.clamps:
                expected = (before.double() / scale).clamp(*rule.bounds[before.dtype])
            elif units is not None:
                by, within = units.coefficients(index, before, norm, max_norm, scale)
                expected = scaled(before, by / scale)
                exact = exact and within
            elif matrices is not None:
                expected, slack = matrices.clipped(index, scaled(before, 1 / scale), norm, max_norm)
                exact = exact and not rule.soft and norm_of(before, 2.0) * (1 + 1e-5) < max_norm
            else:
                expected = scaled(before, coefficient_of(norm, max_norm, rule.eps) / scale)
                # Near the limit, the norm's own error decides whether anything is written.
                exact = exact and norm * (1 + 1e-5) + rule.eps < max_norm
            mismatches += self._compare(index, expected, exact=exact or erase, slack=slack)
        raise_mismatches(mismatches)

    def check_norm(self, norm_type: float, result: Tensor) -> None:
        """Compares a measured norm, 0-d, or the norms of all gradients, 1-d."""
        norms = [norm_of(g, norm_type) for g in self._before]
        self._compare_norms(norms if result.dim() else [self._total(norms, norm_type)], result)

    def check_norms(self, norm_type: float, grad_scale: float | Tensor, result: Tensor) -> None:
        """Compares a finished `norms_by_name` call, before norms of groups are combined."""
        norms = [norm_of(g, norm_type) / float(grad_scale) for g in self._before]
        self._compare_norms([rounded(n, self._dtype) for n in norms], result)

    def check_units(self, results: Sequence[Tensor]) -> None:
        """Compares the measured norms of the slices of each gradient along its first dimension."""
        for index, (before, result) in enumerate(zip(self._before, results, strict=True)):
            label = self._gradients.label(index)
            expected = [norm_of(row, 2.0) for row in before]
            self._compare_norms(expected, result, f"{label}[{{}}]".format)

    def check_scale(self, rule: Rule, norm: Tensor) -> None:
        """Compares a finished `clip_grads_with_norm_` call."""
        given = norm.detach().abs()
        limit = rule.limit(ReferenceNorms(given, []))
        assert not isinstance(limit, list)
        multiplier = coefficient_of(float(given), float(limit), rule.eps)
        mismatches: list[str] = []
        for index, before in enumerate(self._before):
            expected, slack = scaled(before, multiplier), self._lost_digits(index)
            mismatches += self._compare(index, expected, slack=slack)
        raise_mismatches(mismatches)

    def _limits(self, rule: Rule, norms: list[float], measured: Norms | None) -> list[float]:
        """The rule's limit for each gradient."""
        own = norms if rule.per_gradient else norms[0]
        sizes = [grad.numel() for grad in self._before]
        if measured is not None and measured.is_checked:
            # Of whole gradients, by the list itself: a plan may be of another one.
            wholes = [float(tensor.numel()) for tensor in measured.whole()]
            sizes = measured.own(torch.tensor(wholes, device=measured.device)).tolist()
        given = rule.limit(
            ReferenceNorms(torch.tensor(own, dtype=torch.float64, device="cpu"), sizes)
        )
        limit = torch.as_tensor(given, dtype=torch.float64, device="cpu").reshape(-1)
        if measured is not None and len(limit) not in (1, len(norms)):
            # Found in the call already, also for gradients that are not here.
            limit = measured.own(limit)
        # As the call rounds it: inf beyond float32.
        limits: list[float] = limit.to(self._dtype).expand(len(norms)).tolist()
        return limits

    def _total(self, norms: list[float], norm_type: float) -> float:
        """The norm of all elements, from the norms of gradients; empty ones do not count."""
        elements = [norm for norm, g in zip(norms, self._before, strict=True) if g.numel()]
        return total_of(elements, norm_type)

    def _compare_norms(
        self,
        expected: list[float],
        result: Tensor,
        label_of: LabelOf | None = None,
        *,
        below: float = 0.0,
    ) -> None:
        """Compares norms; those of a result may be smaller by some fraction."""
        label_of, tolerance = label_of or self._gradients.label, self._norm_tolerance
        found = result.reshape(-1).tolist()
        mismatches = []
        for i, (ours, reference) in enumerate(zip(found, expected, strict=True)):
            fits = rounded(reference, result.dtype)
            same = ours == fits or (math.isnan(ours) and math.isnan(fits))
            # Below the least normal number, the norm is right to one unit in the last place.
            info = torch.finfo(result.dtype)
            allowed = tolerance * abs(reference) + info.smallest_normal * info.eps
            least = reference * (1 - below) - allowed
            if not same and not least <= ours <= reference + allowed:
                noun = "norm" if result.dim() == 0 else f"norm of {label_of(i)}"
                mismatches.append(f"{noun}: got {ours!r}, expected {reference!r}")
        raise_mismatches(mismatches)

    def _lost_digits(self, index: int, grad_scale: float = 1.0) -> Tensor:
        """The error of each element from a coefficient below the least normal number of its dtype.

        Before and after the loss scale is divided out, that has half a unit in the last place.
        """
        grad = self._before[index]
        wide = grad.dtype in (torch.float64, torch.complex128)
        info = torch.finfo(torch.float64 if wide else torch.float32)
        unit = info.smallest_normal * info.eps
        return widened(grad).abs() * (unit * max(1.0, 1.0 / grad_scale))

    def _compare(
        self, index: int, expected: Tensor, *, exact: bool = False, slack: float | Tensor = 0.0
    ) -> list[str]:
        """A line for a gradient that differs from the expected one, in any bit if exact.

        `slack` is what each element may differ by beside rounding.
        """
        grad = self._gradients.tensors[index]
        ours = widened(dense(grad))
        if grad.layout == torch.sparse_coo:
            expected = torch.where(has_entry(grad), expected, 0.0)
        dtype = self._before[index].dtype
        info = torch.finfo(dtype)
        norm_tolerance = self._norm_tolerance
        # Rounding to the gradient's dtype may also carry past its largest value, and loses values
        # below its least. Among those, half a unit comes from the norm and half from rounding.
        expected_here = expected.to(dtype).to(expected.dtype)
        rounding = info.eps / 2
        tolerance = (
            expected.abs() * (2 * norm_tolerance + rounding) + info.smallest_normal * info.eps
        ) + slack
        if exact:
            tolerance = torch.zeros_like(tolerance)
        same = (ours == expected_here) | (ours.isnan() & expected_here.isnan())
        wrong = (~(same | ((ours - expected).abs() <= tolerance))).nonzero()
        if len(wrong) == 0:
            return []
        at = tuple(wrong[0].tolist())
        return [
            f"{self._gradients.label(index)}{list(at)}: got {ours[at].item()!r}, expected "
            f"{expected[at].item()!r} ({len(wrong)} of {ours.numel()} elements differ)"
        ]


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
    """A tensor in float64, or complex128."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def scaled(x: Tensor, by: float | Tensor) -> Tensor:
    """A tensor times real numbers, in float64 or complex128."""
    wide = widened(x)
    # A complex product would carry inf and NaN from one part into the other.
    return torch.complex(wide.real * by, wide.imag * by) if x.is_complex() else wide * by


def has_entry(grad: Tensor) -> Tensor:
    """Where a sparse gradient has a value; elsewhere it is 0, whatever it is multiplied by."""
    found = torch.zeros(grad.shape, dtype=torch.bool, device=grad.device)
    found[tuple(grad._indices())] = True
    return found


def norm_of(x: Tensor, norm_type: float) -> float:
    """The norm of a tensor, from float64 copies of its elements."""
    magnitudes = widened(x).abs().flatten()
    return _norm_of_magnitudes(magnitudes, norm_type)


def total_of(norms: list[float], norm_type: float) -> float:
    """The norm of all elements, from the norms of tensors."""
    if norm_type == 0:
        return math.fsum(norms)
    return _norm_of_magnitudes(torch.tensor(norms, dtype=torch.float64, device="cpu"), norm_type)


def _norm_of_magnitudes(magnitudes: Tensor, norm_type: float) -> float:
    """The norm of float64 magnitudes, with the largest taken out."""
    if norm_type == 0:
        return float((magnitudes != 0).sum())
    if magnitudes.numel() == 0:
        return 0.0
    if norm_type == -math.inf:
        return float(magnitudes.min())
    largest = float(magnitudes.max())
    if norm_type == math.inf or not 0 < largest < math.inf:
        return largest
    total = float((magnitudes / largest).pow(norm_type).sum())
    try:
        root: float = total ** (1 / norm_type)
    except OverflowError:
        return math.inf
    return largest * root


def rounded(norm: float, dtype: torch.dtype) -> float:
    """The norm itself, or inf where it is beyond the range of a dtype."""
    stored = float(torch.tensor(norm, dtype=torch.float64, device="cpu").to(dtype))
    return stored if math.isinf(stored) else norm


def coefficient_of(norm: float, max_norm: float, eps: float) -> float:
    """The coefficient in Python's floats."""
    if math.isnan(norm) or math.isnan(max_norm):
        return math.nan
    if max_norm == math.inf or norm + eps == 0:
        return 1.0
    return min(1.0, max_norm / (norm + eps))


class ReferenceNorms(NamedTuple):
    """The norms of the reference, as a rule asks for them."""

    norms: Tensor
    n_elements: list[int]

    def norm(self) -> Tensor:
        """The norm of all gradients, or of each."""
        return self.norms

    def numbers(self) -> float | list[float]:
        """`norm` in numbers."""
        numbers: float | list[float] = self.norms.tolist()
        return numbers

    @property
    def device(self) -> torch.device:
        """Of the norms."""
        return self.norms.device

    def advance(
        self, rule: Adaptive, values: Tensor, rows: Tensor | None, *, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Not asked for: a state has advanced by the norms of the call."""
        raise NotImplementedError

    def sizes(self) -> Tensor:
        """The number of elements of each gradient."""
        return torch.tensor(self.n_elements, dtype=torch.float64, device="cpu")

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """Of all."""
        return None, len(self.n_elements)


class UnitReference:
    """Coefficients of units, from float64 copies of weights."""

    def __init__(self, gradients: Gradients, rule: Rule) -> None:
        self._parameters = gradients.owners()
        self._exempt, self._eps = rule.exempt(self._parameters), rule.eps

    def coefficients(
        self, index: int, before: Tensor, norm: float, ratio: float, scale: float
    ) -> tuple[Tensor, bool]:
        """The coefficient of each element, and whether every unit is well within its limit."""
        parameter = self._parameters[index].detach()
        if self._exempt[index] or ratio == math.inf:
            own = torch.full((), norm, dtype=torch.float64, device=before.device)
            return torch.where(own.isnan(), math.nan, 1.0), not math.isnan(norm)
        if before.dim() < 2:
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            norms, weights = [norm], [norm_of(whole, 2.0)]
        else:
            norms = [norm_of(row, 2.0) / scale for row in before]
            weights = [norm_of(row, 2.0) for row in weight_of(parameter)]
        limits = [w if math.isnan(w) else ratio * max(w, self._eps) for w in weights]
        by = [coefficient_of(n, limit, 0.0) for n, limit in zip(norms, limits, strict=True)]
        within = all(n * (1 + 1e-5) < limit for n, limit in zip(norms, limits, strict=True))
        shape = (len(by), *(1,) * (before.dim() - 1)) if before.dim() > 1 else ()
        wide = torch.tensor(by, dtype=torch.float64, device=before.device)
        return wide.reshape(shape), within


class MatrixReference:
    """Singular values and clipped matrices, by an SVD in float64."""

    # The power iteration's value may be that much too small.
    NORM_TOLERANCE: ClassVar[float] = 0.01

    def __init__(self, gradients: Gradients, rule: Rule) -> None:
        self._soft, self._exempt = rule.soft, [False] * len(gradients.tensors)
        if rule.excludes:
            self._exempt = rule.exempt(gradients.owners())

    def norm_of(self, before: Tensor) -> float:
        """The largest singular value; the 2-norm where that is not finite, or all there is."""
        size = norm_of(before, 2.0)
        if before.dim() < 2 or not 0 < size < math.inf:
            return size
        return size * float(torch.linalg.matrix_norm(_as_matrix(before) / size, 2))

    def clipped(
        self, index: int, before: Tensor, norm: float, limit: float
    ) -> tuple[Tensor, float]:
        """The right result, and what each element may differ by.

        Args:
            index: of the gradient.
            before: divided by the loss scale.
            norm: the largest singular value.
            limit: of all.
        """
        if self._exempt[index] or limit == math.inf:
            return before, 0.0
        if norm == math.inf and min(_as_matrix(before).shape) > 1:
            # Rounded to the dtype of results, where it may be beyond the range.
            norm = self.norm_of(before)
        if not 0 < norm < math.inf or not limit:
            return scaled(before, coefficient_of(norm, limit, 0.0)), 0.0
        if not self._soft and norm_of(before, 2.0) * (1 + 1e-5) < limit:
            # Not rebuilt: the product would differ in the last bits of float64.
            return before, 0.0
        u, values, v = torch.linalg.svd(_as_matrix(before), full_matrices=False)
        if self._soft:
            values = values / (1 + (values / limit).square()).sqrt()
        else:
            values = values.clamp(max=limit)
        return ((u * values) @ v).reshape(before.shape), 1e-4 * limit + 1e-5 * norm


def _as_matrix(x: Tensor) -> Tensor:
    """[out, rest] in float64; a vector is one row."""
    return x.double().reshape(len(x) if x.dim() > 1 else 1, -1)
