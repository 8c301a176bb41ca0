"""`suggest_max_norm`: suggests a limit from the norms of a run, and gives the reason.

A run without a limit may have gone wrong; then its later norms say nothing about a limit, and only
its early steps are used. The constants were chosen by how well training goes at the suggested limit
in the tasks of bench/trainings.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tritonclip.advice.series import (
    EPS,
    FALLS,
    Trend,
    ends,
    fall_of,
    n_cut_off,
    spike_score_of,
    trend_of,
    two_digits,
    warmup_of,
)
from tritonclip.messages import in_columns
from tritonclip.monitor.history import History, read
from tritonclip.monitor.recorder import Recorder

Verdict = Literal[
    "clip", "no outliers", "drift", "noisy", "went wrong", "clipped before", "constant"
]

# A tail of 5% is one step in 20, and a tail of 1% is one step in 100.
_LEAST_STEPS, _ENOUGH = 20, 100
# The share of the steps that a limit may clip. With more, it acts as a part of the learning rate;
# with fewer, a limit from some hundred steps would depend on one or two of them.
_LEAST_SHARE, _MOST_SHARE = 0.01, 0.10
# With a larger share of outliers, a limit among them lets most of them pass.
_MOST_APART = 1 / 3
_N_SPIKES = 3
# The number of lists that an error names.
_MOST_NAMED = 6
# The shares of the steps that candidates clip; of two candidates as near as this, one is enough.
_SHARES, _NEAR = (_LEAST_SHARE, 0.02, 0.05, _MOST_SHARE), 0.03
# A run that went wrong is judged by this share of its steps, at least by 10; or by half of the
# steps before the norms become NaN.
_EARLY, _LEAST_EARLY = 0.1, 10
# Norms grow if they rise 20-fold from the first tenth to the last third, and 2-fold from the second
# fifth, so that a warm-up does not count. In a vision transformer that learned they rose 6-fold.
_GROWTH, _LATE_GROWTH = 20.0, 2.0
# Fewer losses cannot show whether they fall.
_LEAST_LOSSES = 40
# If a run went wrong, the limit is this share of the lower quartile of the early norms. In 26 of 28
# such runs of bench/trainings.py, it left at most a quarter of the gap from no clipping to the best
# limit; a third of the quartile did so in 25 runs, and a quarter of the median in 24.
_SHARE_OF_USUAL = 0.25
# In runs that went wrong, the best limit was up to this many times lower or higher.
_OFF = 4.0
_ADD_LOSS = (
    "run --record takes them from a script as it is, and in code recorder.add_(norm, loss=loss) "
    "or optimizer.loss = loss records them"
)
_FIND = (
    "To find out, run python -m tritonclip find train.py:train, or find_max_norm: it tries limits "
    "on your own training."
)


@dataclass(frozen=True)
class Spike:
    """One of the largest norms of a run, after the warm-up.

    Attributes:
        step: the number of its step.
        norm: the norm before clipping.
    """

    step: int
    norm: float


@dataclass(frozen=True)
class Candidate:
    """A limit to choose from.

    Attributes:
        max_norm: the limit.
        origin: why it is a candidate.
        share: the share of the steps after the warm-up that it would clip.
        coefficients: the factors by which it would scale the largest spikes, in their order.
    """

    max_norm: float
    origin: str
    share: float
    coefficients: tuple[float, ...]


@dataclass(frozen=True)
class Suggestion:
    """A limit for a run, other candidates, and the reason; `print` shows it with a table.

    Attributes:
        max_norm: the recommended limit; None if the norms name no limit.
        range: the lowest and the highest limit to try, if the norms do not name one for certain.
        reason: the reason in sentences.
        verdict: "clip"; "no outliers": hardly a step stands out, and the norms name no limit;
            "drift": a limit that follows the norm fits better than the recommended one; "noisy":
            the loss fell less than it varies, and the limit is one to try next; "went wrong":
            norms became NaN or grew, or the loss did not fall, and the limit is one to try next;
            "clipped before": norms are cut off at one value; "constant": all norms are equal.
        candidates: the candidates in ascending order; empty for the last two verdicts.
        spikes: the largest norms in descending order.
        medians: the medians of the three thirds of the run after the warm-up.
        warmup: the number of steps at the start that were left out.
        steps: the number of norms used: those that are finite, not 0, and after the warm-up.
        nonfinite: the number of norms left out because they are NaN or inf.
        zeros: the number of norms left out because they are 0.
        spike_score: SpikeScore: the share of the steps, warm-up included, whose norm is above the
            mean plus 6 standard deviations of the 128 norms before; NaN for a shorter run.
    """

    max_norm: float | None
    range: tuple[float, float] | None
    reason: str
    verdict: Verdict
    candidates: tuple[Candidate, ...]
    spikes: tuple[Spike, ...]
    medians: tuple[float, float, float]
    warmup: int
    steps: int
    nonfinite: int
    zeros: int
    spike_score: float

    def __str__(self) -> str:
        if not self.candidates:
            return self.reason
        spikes = (f"{spike.norm:.4g} at step {spike.step}" for spike in self.spikes)
        rows = [("max_norm", "origin", "clips", *spikes)]
        for one in self.candidates:
            factors = (f"x {coefficient:.3g}" for coefficient in one.coefficients)
            rows.append((f"{one.max_norm:g}", one.origin, f"{one.share:.1%}", *factors))
        return f"{self.reason}\n\n{in_columns(rows)}"


def suggest_max_norm(
    history: str | os.PathLike[str] | Recorder | History | Tensor | Iterable[float | Tensor],
    *,
    warmup: int | None = None,
    list: int | str | None = None,
) -> Suggestion:
    """Suggests a limit from norms *before* clipping; :func:`find_max_norm` tries limits instead.

    The limit clips the tail: the steps that stand out, but at most 10% of the steps after the
    warm-up. If fewer than 1% stand out, the norms name no limit. A step stands out if its norm is
    over three times the median of its section of the run, and its logarithm is two interquartile
    ranges above the upper quartile. The interquartile range is taken as twice its lower half, which
    spikes do not widen.

    A run without a limit is judged differently. If its norms become NaN or grow, or its loss does
    not fall, the limit is a quarter of the lower quartile of the norms of its first tenth, or of
    the first half of the steps before the NaN. If its loss falls less than it varies, or no loss
    was recorded, the limit is half of the median of the first third.

    Example:
        >>> import torch, tritonclip
        >>> norms = 1 + 0.2 * torch.sin(0.7 * torch.arange(1000))
        >>> norms[49::50] *= 10  # a spike in 2% of the steps
        >>> suggestion = tritonclip.suggest_max_norm(norms)
        >>> suggestion.max_norm, suggestion.verdict
        (1.3, 'clip')

    Args:
        history: the file of a recorder; the recorder, which then writes its rows; or norms in
            order, as a 1-d tensor or numbers. The run may have been clipped, if the norms are those
            before clipping.
        warmup: the number of steps to leave out at the start. None finds it from blocks of the
            first fifth of the run: the warm-up ends with the last block whose median is outside of
            the middle 90% of the second fifth.
        list: the number or the whole name of a list of parameters, if a file of
            :func:`patch_torch` or `python -m tritonclip run` has several. None takes the only list
            that is clipped.

    Returns:
        The suggestion, with the limit as `max_norm` and the reason in sentences as `reason`.
        `max_norm` is None in three cases: hardly a step stands out, where a limit may help all the
        same, so `range` has limits to try; something else clipped the gradients before they were
        measured; or all norms are equal.

    Raises:
        FileNotFoundError: no such file.
        TypeError: a history of another kind.
        ValueError: not a history file; a negative norm; fewer than 20 finite norms after the
            warm-up, if no NaN follows; several lists and no `list`, or a `list` that is not there.
            The message names the lists.

    Notes:
        Everything is computed on the host; reading norms from a device waits for it.

    References:
        Tukey, Exploratory Data Analysis, 1977 (fences). Mann and Whitney, On a Test of Whether One
        of Two Random Variables is Stochastically Larger, 1947 (a loss that falls). Seetharaman et
        al., AutoClip: Adaptive Gradient Clipping for Source Separation Networks,
        https://arxiv.org/abs/2007.14469, 2020 (limits at a quantile of the norms). OLMo-core,
        `StabilityMonitorCallback` (SpikeScore).
    """
    if not (warmup is None or (type(warmup) is int and warmup >= 0)):
        raise ValueError(f"warmup must be a number of steps, 0 or more, got {warmup!r}")
    return _suggest(one_of(_as_history(history), list)[1], warmup)


def one_of(history: History, wanted: int | str | None) -> tuple[str, History]:
    """The name and the history of one list in a history."""
    series = history.series()
    if wanted is None:
        if len(series) == 1:
            return next(iter(series.items()))
        found = to_judge(series)
    else:
        found = [name for name in series if wanted == name or name.startswith(f"{wanted}: ")]
        found = [str(wanted)] if wanted in series else found
    if len(found) != 1:
        names = found or [*series]
        shown = "; ".join(map(repr, names[:_MOST_NAMED]))
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise ValueError(
            f"expected list= with the number or the whole name of one list, got {wanted!r} for a "
            f"run with the lists {shown}{more}"
        )
    return found[0], series[found[0]]


def to_judge(series: Mapping[str, History]) -> Sequence[str]:
    """The names of series to suggest a limit for; short ones only if there are no others."""
    logged = only_logged(series)
    clipped = [name for name in series if name not in logged]
    return [name for name in clipped if len(series[name]) >= _LEAST_STEPS] or clipped


def only_logged(series: Mapping[str, History]) -> dict[str, str]:
    """Why some series only log norms and clip nothing; empty if no series clips."""
    clipping = [name for name, one in series.items() if one.is_limited]
    reasons = {} if not clipping else dict.fromkeys(series, "its limit is inf")
    for name in clipping:
        del reasons[name]
        head, is_other, _ = name.partition(", order ")
        if is_other and not series[name].is_clipped.any():
            # A list may be clipped by the norm of one order and logged with that of another.
            kin = [
                n for n in clipping if n != name and n.partition(", ")[0] == head.partition(", ")[0]
            ]
            if any(series[n].is_clipped.any() for n in kin):
                reasons[name] = "its limit was never reached, and another order clips"
    return reasons


def _as_history(history: object) -> History:
    if isinstance(history, History):
        return history
    if isinstance(history, str | os.PathLike):
        return read(history)
    if isinstance(history, Recorder):
        if not history.is_closed:
            history.flush()
        return read(history.path)
    expected = "history must be a path, a Recorder, or norms before clipping in order"
    try:
        given: Any = history
        if isinstance(history, Tensor):
            # None is no number, so this fails below.
            given = history.tolist() if history.dim() == 1 else [None]
        norms = torch.tensor([*map(float, given)], dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        got = f"{history!r:.80}"
        if isinstance(history, Tensor):
            got = f"a tensor of shape {tuple(history.shape)}, {history.dtype}"
        raise TypeError(
            f"{expected}, as a 1-d tensor of real numbers or as numbers; got {got}"
        ) from None
    if (norms < 0).any():
        raise ValueError(f"{expected}; got a negative one, {float(norms.nan_to_num().min())}")
    return History({"norm": norms})


def _suggest(whole: History, warmup: int | None) -> Suggestion:
    run, first = whole, warmup or 0
    trouble = _trouble(run, first)
    if trouble is not None:
        # Later steps would tell where the warm-up ends, but they went wrong.
        run, warmup = run.first(trouble.end), first
    usable = run.is_positive
    if warmup is None:
        warmup = warmup_of(run.norms, usable)
    usable[:warmup] = False
    norms, steps = run.norms[usable], run.steps[usable]
    if len(norms) < (_LEAST_STEPS if trouble is None else 1):
        raise ValueError(
            f"expected at least {_LEAST_STEPS} finite norms over 0 after a warm-up of {warmup} "
            f"steps, got {len(norms)} in {len(run)} steps; {_remedy(run, warmup)}"
        )
    trend = trend_of(norms)
    largest = norms.topk(min(_N_SPIKES, len(norms)))
    spikes = tuple(map(Spike, steps[largest.indices].tolist(), largest.values.tolist()))
    tail = _limit_at(norms, min(max(trend.outside, _LEAST_SHARE), _MOST_SHARE))
    advice = _judge(norms, trend, tail)
    has_candidates = advice.verdict not in ("clipped before", "constant")
    if has_candidates:
        low = two_digits(_SHARE_OF_USUAL * norms.quantile(0.25))
        if trouble is not None:
            advice = _after(trouble, low)
        else:
            advice = _in_doubt(run, advice, low, tail, first)
    verdict, reason, recommended, limits = advice
    n_nonfinite = int((~whole.norms.isfinite()).sum())
    if len(norms) < _ENOUGH and trouble is None:
        reason += f" These are only {len(norms)} steps: record some hundred."
    if n_nonfinite and trouble is None:
        reason += (
            f" {n_nonfinite} norms are NaN or inf, which no limit mends: nonfinite='error' names "
            "their gradients."
        )
    return Suggestion(
        max_norm=recommended,
        range=limits,
        reason=reason,
        verdict=verdict,
        candidates=_candidates(norms, spikes, recommended) if has_candidates else (),
        spikes=spikes,
        medians=trend.medians,
        warmup=warmup,
        steps=len(norms),
        nonfinite=n_nonfinite,
        zeros=int((run.norms == 0).sum()),
        spike_score=spike_score_of(whole.norms[whole.is_positive]),
    )


def _remedy(run: History, warmup: int) -> str:
    """Advice for a run with too few norms."""
    n = len(run)
    if n >= _LEAST_STEPS > run.norms.isfinite().sum():
        return "the others are NaN or inf: nonfinite='error' names their gradients"
    if 0 < n <= warmup:
        return "the warm-up leaves none of the run: make it shorter"
    if n >= _LEAST_STEPS > (run.norms > 0).sum():
        return "the others are 0: measure after backward() and before zero_grad()"
    return "record some hundred steps"


class _Advice(NamedTuple):
    verdict: Verdict
    reason: str
    max_norm: float | None = None
    # The lowest and the highest limit to try, if max_norm is not certain.
    range: tuple[float, float] | None = None


class _Trouble(NamedTuple):
    """How a run went wrong; its first `end` steps count, and messages call them `part`."""

    end: int
    why: str
    part: str


def _trouble(run: History, warmup: int) -> _Trouble | None:
    """How a run without a limit went wrong; None if it did not."""
    n, finite = len(run), run.norms.isfinite()
    if run.is_limited or not finite.any():
        return None
    end = int(finite.nonzero()[-1]) + 1
    if end < n:
        half = max(1, end // 2)
        why = f"This run went wrong: norms are NaN or inf from step {run.steps[end]} on"
        return _Trouble(half, why, f"first {half} steps" if half > 1 else "first step")
    why = "This run seems to have gone wrong"
    losses = _losses_of(run, warmup)
    if losses is not None:
        share, error = fall_of(losses)
        # One error is enough, because blaming a healthy run is worse than sparing a bad one.
        if share - 0.5 >= error:
            return None
        why += ", unless its loss need not fall, as those of GANs and policies: it "
        why += _change_of(losses)
    else:
        norms = run.norms[warmup:][run.is_positive[warmup:]]
        if len(norms) < _ENOUGH:
            return None
        parts = norms[: len(norms) // 10], norms.tensor_split(5)[1], norms.tensor_split(3)[2]
        first, second, last = (float(part.quantile(0.5)) for part in parts)
        if last < max(_GROWTH * first, _LATE_GROWTH * second):
            return None
        why += f": norms grow, from {_short(first)} in the first tenth to {_short(last)} in the "
        why += "last third"
    early = warmup + max(_LEAST_EARLY, round(_EARLY * (n - warmup)))
    return _Trouble(early, why, "steps of the first tenth")


def _losses_of(run: History, warmup: int) -> Tensor | None:
    """The losses after a warm-up, if there are enough to see whether they fall."""
    losses = run.losses[warmup:]
    losses = losses[losses.isfinite()]
    return losses if len(losses) >= _LEAST_LOSSES else None


def _change_of(losses: Tensor) -> str:
    before, after = (float(part.quantile(0.5)) for part in ends(losses))
    change = f"from {before:.3g} in the first tenth to {after:.3g} in the last quarter"
    return f"fell by {1 - after / before:.0%}, {change}" if before > after > 0 else f"went {change}"


def _after(trouble: _Trouble, low: float) -> _Advice:
    """Advice on a limit to try after a run that went wrong."""
    limits = two_digits(low / _OFF), two_digits(low * _OFF)
    why = (
        f"{trouble.why}. {_FIND} Later norms say nothing about a limit, and by the "
        f"{trouble.part} it lies between {limits[0]:g} and {limits[1]:g}. Next, try {low:g}, a "
        "quarter of the lower quartile of their norms. It clips most steps, and with SGD it also "
        "acts as a smaller learning rate."
    )
    return _Advice("went wrong", why, low, limits)


def _in_doubt(run: History, advice: _Advice, low: float, tail: float, warmup: int) -> _Advice:
    """Advice with a range where norms and losses do not say enough."""
    # The warm-up is included, because a limit has to suit it as well.
    early = run.norms[run.is_positive]
    usual = float(early[: max(1, len(early) // 3)].quantile(0.5))
    limits = two_digits(min(low, usual / 2)), two_digits(max(tail, usual))
    within = f"{_FIND} Limits to try lie between {limits[0]:g} and {limits[1]:g}."
    losses = None if run.is_limited else _losses_of(run, warmup)
    verdict, reason, limit, _ = advice
    if losses is not None and fall_of(losses)[0] < FALLS:
        verdict = "noisy"
        why = (
            f"The loss is noisy; it {_change_of(losses)}. Only trying tells whether a limit helps."
        )
    elif limit is not None and run.limits.isinf().any() and not run.has_losses:
        why = f"No limit was in use, and no losses say whether the run went well: {_ADD_LOSS}."
    else:
        reason += f" {_FIND if limit is not None else within}"
        if not run.has_losses:
            reason += f" With losses it could tell whether the run went well: {_ADD_LOSS}."
        return _Advice(verdict, reason, limit, None if limit is not None else limits)
    half = two_digits(usual / 2)
    why += f" {within} Next, try {half:g}, half of the usual norm of the first third."
    if limit is not None:
        why += f" If the run went well: {reason[0].lower()}{reason[1:]}"
    return _Advice(verdict, why, half, limits)


def _share(norms: Tensor, limit: float) -> float:
    """The share of the steps that a limit would clip."""
    return float((norms > limit).double().mean())


def _limit_at(norms: Tensor, share: float) -> float:
    """A limit that clips this share of the steps, rounded if the share stays nearly the same."""
    exact = float(norms.quantile(1 - share))
    tolerance = max(share / 2, 1 / len(norms))
    for digits in (2, 3):
        nearest = float(f"{exact:.{digits}g}")
        unit = 10.0 ** (math.floor(math.log10(nearest)) - digits + 1)
        for change in (0.0, unit, -unit):
            limit = float(f"{nearest + change:.{digits}g}")
            clipped = _share(norms, limit)
            if _LEAST_SHARE <= clipped <= _MOST_SHARE and abs(clipped - share) <= tolerance:
                return limit
    return float(f"{exact:.3g}")


def _candidates(
    norms: Tensor, spikes: Sequence[Spike], recommended: float | None
) -> tuple[Candidate, ...]:
    """Limits in ascending order, each under the first of its origins."""
    limits: dict[float, str] = {}
    if recommended is not None:
        limits[recommended] = "recommended"
    # A candidate has to clip at least one step.
    tails = [_limit_at(norms, x) for x in _SHARES if x * len(norms) >= 1]
    others = [(limit, f"about {_share(norms, limit):.0%}") for limit in tails]
    for limit, origin in (*others, (1.0, "usual for transformers")):
        is_near = any(abs(limit - other) <= _NEAR * other for other in limits)
        if not is_near and origin not in limits.values():
            limits[limit] = origin
    return tuple(
        Candidate(
            limit,
            origin,
            _share(norms, limit),
            tuple(min(1.0, limit / (spike.norm + EPS)) for spike in spikes),
        )
        for limit, origin in sorted(limits.items())
    )


def _judge(norms: Tensor, trend: Trend, limit: float) -> _Advice:
    """Decides whether to clip at a limit, and says why."""
    n, largest = len(norms), float(norms.max())
    n_cut = n_cut_off(norms)
    if n_cut == n:
        why = (
            f"All {n} norms equal {largest:.4g}, so that no limit can be suggested. If something "
            "clips or normalizes gradients before the norm is measured, turn that off. If the loop "
            "adds the same number at every step, pass the norm that clip_ returns. Then record "
            "again."
        )
        return _Advice("constant", why)
    if n_cut:
        why = (
            f"{n_cut} of {n} norms equal the largest, {largest:.4g}: most likely something clips "
            "before the norm is measured. Turn that off and record again."
        )
        return _Advice("clipped before", why)
    medians = _listed(f"{median:.3g}" for median in trend.medians)
    drift = f"The norm drifts: the medians of the thirds of the run are {medians}."
    stand_out = f"{percent(trend.outside)} of {n} steps stand out from the others"
    reach = f"norms reach {_short(trend.largest)} times the median around them"
    if trend.outside < _LEAST_SHARE:
        why = (
            f"The norms name no limit: {stand_out}, and {reach}. A limit may help all the same: "
            "norms show single steps that are too long, but not whether all of them are."
        )
        if trend.drifts:
            why += f" {drift} A limit that follows it needs a bound: ClipByQuantile(max_norm=...)."
        return _Advice("no outliers", why)
    share = _share(norms, limit)
    if trend.drifts:
        times = _listed(_short(limit / median) for median in trend.medians)
        shares = _listed(f"{_share(third, limit):.1%}" for third in norms.tensor_split(3))
        why = (
            f"{drift} Take a limit that follows the norm under a bound, such as "
            f"ClipByQuantile(max_norm={limit:g}). If the limit has to be fixed, take {limit:g}: "
            f"it is {times} times these medians, and clips {shares} of the steps in these thirds."
        )
        return _Advice("drift", why, limit)
    why = f"Clip at {limit:g}, which clips {percent(share)} of the steps: {stand_out}, and {reach}."
    if trend.outside > _MOST_SHARE >= share:
        why += f" A limit that clips over {_MOST_SHARE:.0%} acts as a part of the learning rate."
    if trend.outside > _MOST_APART:
        why += (
            f" So many are a second kind of steps: {limit:g} lets most of them pass, and a limit "
            "below them clips them all. Only trying says which is better."
        )
    return _Advice("clip", why, limit)


def _short(number: float) -> str:
    """Formats a number with two digits, without an exponent if it needs none."""
    return f"{two_digits(number):g}"


def percent(share: float) -> str:
    """Formats a share as a percentage with two digits."""
    return f"{_short(100 * share)}%"


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"
