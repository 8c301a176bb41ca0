"""Whether a run needs a limit, and the reason in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from tritonclip.monitor.candidates import EPS, LEAST_SHARE, MOST_SHARE, share_over
from tritonclip.monitor.trend import Trend

Verdict = Literal["clip", "nothing to clip", "drift", "clipped before"]

# A step three times as long is one at the next learning rate of a usual grid (1e-4, 3e-4, 1e-3).
_ORDINARY = 3.0
# Norms are real numbers: three that are equal, and the largest, are no chance.
_CUT_SHARE, _CUT_STEPS = 0.01, 3
# From so many steps on, a tail of 1% is a step.
_ENOUGH = 100


def judge(norms: Tensor, trend: Trend, limit: float) -> tuple[Verdict, str]:
    """Whether to clip at a limit, and why."""
    largest = float(norms.max())
    # A limit of m leaves norms up to eps below m.
    n_cut = int((norms >= largest - 1e-5 * largest - min(EPS, 1e-3 * largest)).sum())
    if n_cut >= max(_CUT_STEPS, _CUT_SHARE * len(norms)):
        return "clipped before", (
            f"{n_cut} of {len(norms)} norms equal the largest, {largest:.4g}: something clips "
            "before the norm is measured. Turn that off and record again."
        )
    drift = ""
    if trend.drifts:
        medians = _listed(f"{median:.3g}" for median in trend.medians)
        drift = f"The norm drifts: the medians of the thirds of the run are {medians}. "
    if trend.largest < _ORDINARY:
        return "nothing to clip", (
            f"{drift}No step needs clipping: norms reach {trend.largest:.2g} times the median "
            f"around them, and a step of less than {_ORDINARY:g} times is an ordinary one. A limit "
            f"of {float(f'{10 * largest:.0e}'):g}, ten times the largest norm, would only guard "
            "against accidents."
        )
    if drift:
        times = _listed(f"{limit / median:.2g}" for median in trend.medians)
        shares = _listed(f"{share_over(third, limit):.1%}" for third in norms.tensor_split(3))
        return "drift", (
            f"{drift}A fixed limit of {limit:g} stands at {times} times these, and clips {shares} "
            "of the steps. A limit that follows the norm, such as ClipByQuantile, fits better."
        )
    return "clip", _why_clip(norms, trend, limit)


def _why_clip(norms: Tensor, trend: Trend, limit: float) -> str:
    clipped = share_over(norms, limit)
    why = (
        f"A limit of {limit:g} clips {clipped:.1%} of {len(norms)} steps. Norms reach "
        f"{trend.largest:.2g} times the median around them, and {trend.outside:.1%} of the steps "
        "stand out from the others"
    )
    if trend.outside > MOST_SHARE:
        return why + (
            f": more than {MOST_SHARE:.0%}, and to clip them all would make the limit a part of "
            "the learning rate."
        )
    if trend.outside < LEAST_SHARE:
        return f"{why}; a limit over fewer than {LEAST_SHARE:.0%} would hang on single steps."
    return why + "."


def of_limit_in_use(norms: Tensor, verdict: Verdict, in_use: float | None) -> str:
    """A sentence on the limit that the run had; "" without one."""
    if verdict not in ("clip", "drift") or in_use is None:
        return ""
    share = share_over(norms, in_use)
    use = f" The limit in use, {in_use:g}, clips {share:.1%}"
    if share > MOST_SHARE:
        return f"{use}, and is a part of the learning rate: with another limit, tune both together."
    return f"{use}, and may stay." if share >= LEAST_SHARE else f"{use}: less than the tail."


def remarks_on(n_steps: int, n_nonfinite: int) -> str:
    """Sentences on what makes the norms a poor ground for a limit; "" where nothing does."""
    remarks = ""
    if n_steps < _ENOUGH:
        remarks += f" These are {n_steps} steps only: record some hundred."
    if n_nonfinite:
        remarks += (
            f" Norms that are NaN or inf: {n_nonfinite}, and no limit mends them; see nonfinite=."
        )
    return remarks


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"
