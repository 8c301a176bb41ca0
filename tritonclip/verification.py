"""Computes a call a second time, plainly, in float64 on copies, and compares.

Slow and hungry for memory on purpose: the point is that no arithmetic is shared with what it
checks. Switched on by `verify()` or by TRITONCLIP_VERIFY=1.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from tritonclip import dispatch
from tritonclip.gradient_list import GradientList
from tritonclip.rules import ClipByNorm, ClipByValue, Rule

# A norm is promised to 1e-6 (1e-12); a coefficient adds the rounding of a sum and two divisions,
# and the store one more.
_NORM_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
_REPORTED = 3

_on: ContextVar[bool] = ContextVar("tritonclip_verify", default=False)


class VerificationError(RuntimeError):
    """A call computed something else than the plain reference did."""


@contextmanager
def verify() -> Iterator[None]:
    """Checks every call in the block against a plain float64 reference.

    Slow, and it waits for the device.

    Raises:
        VerificationError: inside the block, by the call whose result differs: names the first
            gradients, their indices, and both values. The gradients are then as the call left them.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight * weight).sum().backward()
        >>> with tritonclip.verify():
        ...     norm = tritonclip.clip_(weight, 1.0)
    """
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def is_on() -> bool:
    """Whether calls are to be verified."""
    return _on.get() or dispatch.verification_asked()


class Expectation:
    """Copies of the gradients before a call, and what the call should make of them."""

    def __init__(self, found: GradientList) -> None:
        self._found = found
        self._before = [_plain(g).clone() for g in found.grads]
        # Norms of narrower gradients are no better for being returned as float64.
        wide = all(g.dtype in (torch.float64, torch.complex128) for g in self._before)
        self._norm_tolerance = _NORM_TOLERANCE[torch.float64 if wide else torch.float32]

    def check_clip(
        self, rule: Rule, nonfinite: str, grad_scale: float | Tensor, result: Tensor | None
    ) -> None:
        """Compares a finished `clip_` call."""
        scale = float(grad_scale)
        if isinstance(rule, ClipByValue):
            norms = [_norm(g, math.inf) for g in self._before]
        else:
            norms = [_norm(g, rule.norm_type) / scale for g in self._before]
        if not isinstance(rule, ClipByValue | ClipByNorm):
            norms = [_combined(norms, rule.norm_type)] * len(norms)
        # A norm beyond the range of the result's dtype is inf there, and its coefficient 0.
        norms = [_rounded(n, self._found.result_dtype) for n in norms]
        if result is not None:
            measured = norms if isinstance(rule, ClipByNorm) else norms[:1]
            self._compare_norms(measured, result)
        erase = nonfinite == "zero" and not all(math.isfinite(n) for n in norms)

        mismatches: list[str] = []
        for place, norm in enumerate(norms):
            before = self._before[place]
            exact = scale == 1
            if erase:
                expected = torch.zeros_like(_wide(before))
            elif isinstance(rule, ClipByValue):
                expected = _clamped(before, rule, scale)
            else:
                expected = _wide(before) * (_coefficient(norm, rule.max_norm, rule.eps) / scale)
                # Near the limit, the norm's own error decides whether anything is written.
                exact = exact and norm * (1 + 1e-5) + rule.eps < rule.max_norm
            mismatches += self._compare(place, expected, exact=exact or erase)
        _raise(mismatches)

    def check_norm(self, norm_type: float, result: Tensor) -> None:
        """Compares a finished `get_total_norm` call."""
        self._compare_norms(
            [_combined([_norm(g, norm_type) for g in self._before], norm_type)], result
        )

    def check_scale(self, max_norm: float, norm: Tensor) -> None:
        """Compares a finished `clip_grads_with_norm_` call."""
        multiplier = _coefficient(abs(float(norm)), max_norm, 1e-6)
        mismatches: list[str] = []
        for place, before in enumerate(self._before):
            mismatches += self._compare(place, _wide(before) * multiplier)
        _raise(mismatches)

    def _compare_norms(self, expected: list[float], result: Tensor) -> None:
        tolerance = self._norm_tolerance
        found = result.reshape(-1).tolist()
        mismatches = []
        for i, (ours, reference) in enumerate(zip(found, expected, strict=True)):
            fits = _rounded(reference, result.dtype)
            same = ours == fits or (math.isnan(ours) and math.isnan(fits))
            if not same and not abs(ours - reference) <= tolerance * abs(reference):
                what = "norm" if result.dim() == 0 else f"norm of {self._found.label(i)}"
                mismatches.append(f"{what}: got {ours!r}, expected {reference!r}")
        _raise(mismatches)

    def _compare(self, place: int, expected: Tensor, *, exact: bool = False) -> list[str]:
        """A line for a gradient that differs from what is expected, in any bit if exact."""
        ours = _wide(_plain(self._found.grads[place]))
        dtype = self._before[place].dtype
        info = torch.finfo(dtype)
        norm_tolerance = self._norm_tolerance
        # Rounding to the gradient's dtype may also carry past its largest value, and loses what is
        # below its least.
        expected_here = expected.to(dtype).to(expected.dtype)
        rounding = info.eps / 2
        tolerance = (
            expected.abs() * (2 * norm_tolerance + rounding) + info.smallest_normal * rounding
        )
        if exact:
            tolerance = torch.zeros_like(tolerance)
        same = (ours == expected_here) | (ours.isnan() & expected_here.isnan())
        wrong = (~(same | ((ours - expected).abs() <= tolerance))).nonzero()
        if len(wrong) == 0:
            return []
        index = tuple(wrong[0].tolist())
        return [
            f"{self._found.label(place)}{list(index)}: got {ours[index].item()!r}, expected "
            f"{expected[index].item()!r} ({len(wrong)} of {ours.numel()} elements differ)"
        ]


def _raise(mismatches: list[str]) -> None:
    if mismatches:
        more = f"; and {len(mismatches) - _REPORTED} more" if len(mismatches) > _REPORTED else ""
        raise VerificationError(
            "tritonclip computed something else than its plain reference: "
            + "; ".join(mismatches[:_REPORTED])
            + more
            + ". This is a bug in tritonclip or in its compiler: use "
            "tritonclip.use_backend('torch') and report it"
        )


def _plain(grad: Tensor) -> Tensor:
    """A dense tensor, its own or the gradient's."""
    return grad.detach().to_dense() if grad.layout != torch.strided else grad.detach()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _norm(x: Tensor, norm_type: float) -> float:
    magnitudes = _wide(x).abs().flatten()
    return _combined_tensor(magnitudes, norm_type)


def _combined(norms: list[float], norm_type: float) -> float:
    if norm_type == 0:
        return math.fsum(norms)
    return _combined_tensor(torch.tensor(norms, dtype=torch.float64, device="cpu"), norm_type)


def _combined_tensor(magnitudes: Tensor, norm_type: float) -> float:
    """The norm of float64 magnitudes, with the largest taken out."""
    if norm_type == 0:
        return float((magnitudes != 0).sum())
    if magnitudes.numel() == 0:
        return math.inf if norm_type == -math.inf else 0.0
    if norm_type == -math.inf:
        return float(magnitudes.min())
    largest = float(magnitudes.max())
    if norm_type == math.inf or not 0 < largest < math.inf:
        return largest
    root: float = float((magnitudes / largest).pow(norm_type).sum()) ** (1 / norm_type)
    return largest * root


def _rounded(norm: float, dtype: torch.dtype) -> float:
    """The norm itself, or inf where it is beyond the range of a dtype."""
    rounded = float(torch.tensor(norm, dtype=torch.float64, device="cpu").to(dtype))
    return rounded if math.isinf(rounded) else norm


def _coefficient(norm: float, max_norm: float, eps: float) -> float:
    """The coefficient in Python's floats."""
    if math.isnan(norm):
        return math.nan
    if max_norm == math.inf or norm + eps == 0:
        return 1.0
    return min(1.0, max_norm / (norm + eps))


def _clamped(before: Tensor, rule: ClipByValue, scale: float) -> Tensor:
    limits = torch.finfo(before.dtype)
    low, high = (
        b if math.isinf(b) else min(max(b, limits.min), limits.max) for b in (rule.min, rule.max)
    )
    low, high = (
        float(torch.tensor(b, dtype=torch.float64, device="cpu").to(before.dtype))
        for b in (low, high)
    )
    return (before.double() / scale).clamp(low, high)
