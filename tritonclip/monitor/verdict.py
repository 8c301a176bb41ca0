"""Whether a run needs a limit, and the reason in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from tritonclip.monitor.candidates import EPS, LEAST_SHARE, MOST_SHARE, share_over
from tritonclip.monitor.history import History
from tritonclip.monitor.trend import Trend

Verdict = Literal["clip", "nothing to clip", "drift", "clipped before", "constant"]

# A step three times as long is one at the next learning rate of a usual grid (1e-4, 3e-4, 1e-3).
_ORDINARY = 3.0
# Norms are real numbers: three that are equal, and the largest, are no chance.
_CUT_SHARE, _CUT_STEPS = 0.01, 3
# From so many steps on, a tail of 1% is a step.
ENOUGH = 100


def judge(norms: Tensor, trend: Trend, limit: float) -> tuple[Verdict, str]:
    """Whether to clip at a limit, and why."""
    largest = float(norms.max())
    n_cut = int((norms >= _least_equal(largest)).sum())
    if n_cut == len(norms):
        return "constant", (
            f"All {n_cut} norms equal {largest:.4g}, which tells no limit. Where something clips "
            "or normalizes before the norm is measured, turn that off; where the loop adds the "
            "same number at every step, pass the norm that clip_ returns. Then record again."
        )
    if n_cut >= max(_CUT_STEPS, _CUT_SHARE * len(norms)):
        return "clipped before", (
            f"{n_cut} of {len(norms)} norms equal the largest, {largest:.4g}: most likely "
            "something clips before the norm is measured. Turn that off and record again."
        )
    medians = _listed(f"{median:.3g}" for median in trend.medians)
    drift = f"The norm drifts: the medians of the thirds of the run are {medians}."
    if trend.largest < _ORDINARY:
        guard = (
            f"{drift} To guard against accidents, take a limit that follows it, such as "
            "ClipByZScore."
            if trend.drifts
            else f"A limit of {_short(10 * largest, 1)}, ten times the largest norm, would only "
            "guard against accidents."
        )
        return "nothing to clip", (
            f"No step needs clipping: norms reach {_short(trend.largest)} times the median around "
            f"them, and a step of less than {_ORDINARY:g} times is an ordinary one. {guard}"
        )
    if trend.drifts:
        times = _listed(_short(limit / median) for median in trend.medians)
        shares = _listed(f"{share_over(third, limit):.1%}" for third in norms.tensor_split(3))
        return "drift", (
            f"{drift} Take a limit that follows the norm, such as ClipByQuantile. If the limit has "
            f"to be fixed, take {limit:g}, which is {times} times these medians, and clips "
            f"{shares} of the steps."
        )
    return "clip", _why_clip(norms, trend, limit)


def _why_clip(norms: Tensor, trend: Trend, limit: float) -> str:
    clipped = share_over(norms, limit)
    why = (
        f"A limit of {limit:g} clips {clipped:.1%} of {len(norms)} steps. Norms reach "
        f"{_short(trend.largest)} times the median around them, and {trend.outside:.1%} of the "
        "steps stand out from the others"
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
    if in_use is None:
        return ""
    largest = float(norms.max())
    if verdict in ("clipped before", "constant") and _least_equal(in_use) <= largest <= in_use:
        return (
            f" The largest norm is that of the limit in use, {in_use:g}: record the norm that "
            "clip_ returns, not one that is measured after it."
        )
    if verdict not in ("clip", "drift"):
        return ""
    share = share_over(norms, in_use)
    use = f" The limit in use, {in_use:g}, clips {share:.1%}"
    if share > MOST_SHARE:
        return f"{use}, and is a part of the learning rate: with another limit, tune both together."
    if share < LEAST_SHARE:
        return f"{use}: less than the tail."
    return f"{use}, and may stay." if verdict == "clip" else f"{use}, and is fixed, too."


def remarks_on(n_steps: int, n_nonfinite: int) -> str:
    """Sentences on too few steps, and on norms that are NaN or inf; "" without either."""
    remarks = ""
    if n_steps < ENOUGH:
        remarks += f" These are {n_steps} steps only: record some hundred."
    if n_nonfinite:
        remarks += (
            f" Norms that are NaN or inf: {n_nonfinite}. No limit mends them: nonfinite='error' "
            "names their gradients."
        )
    return remarks


def of_replaced(run: History) -> str:
    """Sentences on rows that others took the place of; "" without any."""
    if not run.replaced:
        return ""
    return (
        " Step numbers come again, and only the later rows count; left out were "
        f"{run.replaced} earlier ones. Where these are two runs, record each in a file of its own."
    )


def of_runs(number: int, runs: Sequence[History], others: Mapping[int, str | None]) -> str:
    """Sentences on the run that a suggestion is of; "" where there is one only.

    Args:
        number: of the run, from 1 on.
        runs: all.
        others: by their numbers "" for a run that the suggestion fits, else what is suggested for
            it; None for one with too few steps.
    """
    if len(runs) == 1:
        return ""
    remarks = (
        f" Run {number} of {len(runs)} speaks, which begins at step {runs[number - 1].steps[0]}."
    )
    agree = [str(n) for n, said in others.items() if said == ""]
    differ = [f"{n} ({said})" for n, said in others.items() if said]
    short = [str(n) for n, said in others.items() if said is None]
    if agree:
        remarks += f" Runs that agree: {_few(agree)}."
    if differ:
        remarks += f" Runs that do not agree: {_few(differ)}; run=, or --run, chooses one."
    if short:
        remarks += f" Runs with too few steps: {_few(short)}."
    return remarks


def _least_equal(limit: float) -> float:
    """The least norm that a limit leaves: eps below it, and rounded."""
    return limit - 1e-5 * limit - min(EPS, 1e-3 * limit)


def _short(number: float, digits: int = 2) -> str:
    """A number in few digits, and without an exponent where it needs none."""
    return f"{float(f'{number:.{digits}g}'):g}"


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"


def _few(words: Sequence[str]) -> str:
    shown = ", ".join(words[:8])
    return shown if len(words) <= 8 else f"{shown} and {len(words) - 8} more"
