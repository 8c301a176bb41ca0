"""`suggest_max_norm`: a limit from the norms of a run, and the reason for it.

Warm-up, drift and tail are found by medians and quartiles of the logarithms of norms: norms are
positive and their spread is relative, so that logarithms are about as symmetric as norms get.
Spikes move neither medians nor quartiles.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tritonclip.messages import NamesAttributes
from tritonclip.monitor.history import History, read
from tritonclip.monitor.recorder import Recorder

# A tail of 5% is one step of these.
LEAST_STEPS = 20


@dataclass(frozen=True)
class Suggestion(NamesAttributes):
    """A limit for a run, the candidates beside it, and the reason.

    Attributes:
        max_norm: the recommended limit; None where none is needed, or none can be told.
        reason: for it, in sentences.
        verdict: "clip"; "nothing to clip"; "drift", where a limit that follows the norm fits better
            than the recommended one; "clipped before", where norms are cut off at one value;
            "constant", where all are equal.
        candidates: from the lowest limit to the highest; none for the last two verdicts.
        spikes: the largest norms, from the largest on.
        medians: of the three thirds of the run after the warm-up.
        warmup: steps at the start that were left out.
        steps: finite, nonzero norms after the warm-up, on which everything rests.
        nonfinite: norms that are NaN or inf, left out.
        zeros: norms that are 0, left out.
        run: the number of the run that all of this is of; 1 where the history has one.
    """

    max_norm: float | None
    reason: str
    verdict: Verdict
    candidates: tuple[Candidate, ...]
    spikes: tuple[Spike, ...]
    medians: tuple[float, float, float]
    warmup: int
    steps: int
    nonfinite: int
    zeros: int
    run: int


def suggest_max_norm(
    history: str | os.PathLike[str] | Recorder | History | Tensor | Iterable[float | Tensor],
    *,
    warmup: int | None = None,
    run: int | None = None,
) -> Suggestion:
    """Suggests a limit from norms *before* clipping.

    The limit clips the tail: the steps beyond Tukey's fence (1.5 interquartile ranges over the
    upper quartile of the log norm, relative to the median of its part of the run; the lower half of
    the norms gives the range), but at least 1% and at most 10% of the steps after the warm-up.

    Args:
        history: the file of a recorder; the recorder, which then writes its rows; or norms in
            order: a 1-d tensor, or numbers. The run may have been clipped: its norms are those
            before it.
        warmup: steps to leave out at the start of each run. None: found as the blocks of the first
            fifth up to the last whose median is not among the middle 90% of the second fifth.
        run: the number of a run, from 1 on, where the file has several: a recorder went on in it
            without a checkpoint, or its step numbers start again. None: the last run with 100 steps
            after the warm-up or, where none has so many, with 20; `reason` says which, and whether
            the others agree.

    Returns:
        The suggestion. `max_norm` is None where no norm is over three times the median of its part
        of the run, where something else clipped the gradients before they were measured, and where
        all norms are equal.

    Raises:
        FileNotFoundError: no such file.
        TypeError: a history of another kind.
        ValueError: a file that is no history; negative norms; fewer than 20 finite ones after the
            warm-up; a run that is not there.

    Notes:
        Everything is computed on the host; norms on a device are waited for.

    Example:
        >>> norms = 1 + 0.2 * torch.sin(0.7 * torch.arange(1000))
        >>> norms[49::50] *= 10
        >>> suggestion = suggest_max_norm(norms)
        >>> suggestion.max_norm, suggestion.verdict
        (1.3, 'clip')

    References:
        Tukey, Exploratory Data Analysis, 1977 (the fence). Seetharaman et al., AutoClip: Adaptive
        Gradient Clipping for Source Separation Networks, https://arxiv.org/abs/2007.14469, 2020
        (limits at a quantile of the norms).
    """
    recorded = _as_history(history)
    runs = dict(enumerate(recorded.runs, 1))
    norms = {n: one.norms[_usable(one, warmup)[0]] for n, one in runs.items()}
    if run is None:
        # The last with enough steps.
        run = max((len(x) >= ENOUGH, len(x) >= LEAST_STEPS, n) for n, x in norms.items())[-1]
    recorded.run(run)
    suggestion = _suggest(run, runs, warmup)
    others: dict[int, str | None] = {}
    for n in (n for n in runs if n != run):
        others[n] = None
        if len(norms[n]) >= LEAST_STEPS:
            others[n] = _other(suggestion, _suggest(n, runs, warmup), norms[n])
    return replace(suggestion, reason=suggestion.reason + of_runs(run, recorded.runs, others))


def _other(suggestion: Suggestion, other: Suggestion, norms: Tensor) -> str:
    """The suggestion for another run in words; "" where this one fits it: clips its tail, too."""
    limit, its_limit = suggestion.max_norm, other.max_norm
    if suggestion.verdict == other.verdict and (
        limit is None or limit == its_limit or LEAST_SHARE <= share_over(norms, limit) <= MOST_SHARE
    ):
        return ""
    return other.verdict if its_limit is None else f"max_norm {its_limit:g}"


def _usable(run: History, warmup: int | None) -> tuple[Tensor, int]:
    """The steps of a run that count, as truth values, and how many its warm-up has."""
    usable = run.norms.isfinite() & (run.norms > 0)
    left_out = warmup_of(run.norms, usable) if warmup is None else _checked_warmup(warmup)
    usable[:left_out] = False
    return usable, left_out


def _suggest(number: int, runs: Mapping[int, History], warmup: int | None) -> Suggestion:
    """The suggestion for one of several runs by itself."""
    run = runs[number]
    usable, left_out = _usable(run, warmup)
    n_finite, n_positive = int(run.norms.isfinite().sum()), int((run.norms > 0).sum())
    norms, steps = run.norms[usable], run.steps[usable]
    if len(norms) < LEAST_STEPS:
        remedy = "record some hundred steps"
        if len(run) >= LEAST_STEPS > n_finite:
            remedy = "the others are NaN or inf: nonfinite='error' names their gradients"
        elif 0 < len(run) <= left_out:
            remedy = "the warm-up leaves none of the run: make it shorter"
        elif len(run) >= LEAST_STEPS > n_positive:
            remedy = "the others are 0: measure after backward() and before zero_grad()"
        of_run = f" of run {number}, of {len(runs)}" if len(runs) > 1 else ""
        remarks = of_replaced(run)
        raise ValueError(
            f"expected at least {LEAST_STEPS} finite norms over 0 after a warm-up of {left_out} "
            f"steps, got {len(norms)} in {len(run)} steps{of_run}; {remedy}"
            f"{remarks and '.' + remarks}"
        )
    trend = trend_of(norms)
    spikes = spikes_of(norms, steps)
    limit = limit_at(norms, min(max(trend.outside, LEAST_SHARE), MOST_SHARE))
    verdict, reason = judge(norms, trend, limit)
    in_use = _limit_in_use(run)
    recommended = limit if verdict in ("clip", "drift") else None
    n_nonfinite = len(run) - n_finite
    return Suggestion(
        recommended,
        reason
        + of_limit_in_use(norms, verdict, in_use)
        + remarks_on(len(norms), n_nonfinite)
        + of_replaced(run),
        verdict,
        ()
        if verdict in ("clipped before", "constant")
        else candidates_of(norms, spikes, recommended, in_use),
        spikes,
        trend.medians,
        left_out,
        len(norms),
        n_nonfinite,
        int((run.norms == 0).sum()),
        number,
    )


def _as_history(history: object) -> History:
    if isinstance(history, History):
        return history
    if isinstance(history, str | os.PathLike):
        return read(history)
    if isinstance(history, Recorder):
        if history.is_closed:
            return read(history.path)
        history.flush()
        return read(history.path)
    expected = "history must be a path, a Recorder, or norms before clipping in order"
    if isinstance(history, Tensor):
        if history.dim() != 1 or history.is_complex():
            raise TypeError(
                f"{expected}, as a 1-d tensor of real numbers; got shape {tuple(history.shape)}, "
                f"{history.dtype}"
            )
        norms = history.detach().to("cpu", torch.float64)
    else:
        try:
            numbers = [float(norm) for norm in history]  # type: ignore[attr-defined]
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{expected}, got {history!r:.80}") from None
        norms = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    if (norms < 0).any():
        raise ValueError(f"{expected}; got a negative one, {float(norms.nan_to_num().min())}")
    unknown = torch.full_like(norms, torch.nan)
    steps = torch.arange(1, len(norms) + 1, device="cpu")
    return History(steps, norms, unknown, unknown, unknown)


def _checked_warmup(warmup: object) -> int:
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"warmup must be a number of steps, 0 or more, got {warmup!r}")
    return warmup


def _limit_in_use(run: History) -> float | None:
    """The limit of the run, where it had one and the same."""
    limits = run.limits[run.limits.isfinite()].unique().tolist()
    return limits[0] if len(limits) == 1 else None


# The warm-up ends within this part of a run; a later change is drift.
_MOST_WARMUP = 0.2
# Blocks of a warm-up; a median of fewer than 5 norms is that of a spike too often.
_BLOCKS, _LEAST_BLOCK = 20, 5
# Below it, a fifth of the run holds two blocks: too few to see an end.
_LEAST_STEPS = 50
# Thirds whose medians differ by less share a limit: it stands as well with either.
_LEAST_DRIFT = 1.5
# Parts of a run, whose medians follow it as it drifts. A part of fewer steps, or one of very many
# parts, could be all spike.
_PARTS, _LEAST_PART = 12, 20
# The 95% quantile of a normal distribution lies so many interquartile ranges over its median.
_TAIL = 1.645 / 1.349


class Trend(NamedTuple):
    """How norms change over a run, and how they spread around the median of their part of it.

    Attributes:
        medians: of the thirds of the run, in order.
        spread: interquartile range of the logarithms of norms over their part's median: twice that
            from the lower quartile to the median, which many spikes do not widen.
        outside: share of these beyond Tukey's fence, 1.5 interquartile ranges over the upper
            quartile: 0.35% of normal logarithms.
        largest: the largest norm over its part's median.
    """

    medians: tuple[float, float, float]
    spread: float
    outside: float
    largest: float

    @property
    def drifts(self) -> bool:
        """Whether no one limit clips the tail of all thirds.

        At such a distance, the median of one third lies where the 5% tail of another begins.
        """
        distance = math.log(max(self.medians) / min(self.medians))
        return distance >= max(math.log(_LEAST_DRIFT), _TAIL * self.spread)


def trend_of(norms: Tensor) -> Trend:
    """The trend of at least 3 finite, positive norms; 1-d float64."""
    logs = norms.log()
    a, b, c = (float(third.quantile(0.5).exp()) for third in logs.tensor_split(3))
    parts = logs.tensor_split(min(_PARTS, max(1, len(logs) // _LEAST_PART)))
    relative = torch.cat([part - part.quantile(0.5) for part in parts])
    low, middle = relative.quantile(relative.new_tensor([0.25, 0.5])).tolist()
    spread = 2 * (middle - low)
    outside = relative > middle + (0.5 + 1.5) * spread
    return Trend((a, b, c), spread, float(outside.double().mean()), float(relative.max().exp()))


def warmup_of(norms: Tensor, usable: Tensor) -> int:
    """Steps at the start whose norms are not yet, or no longer, those of the run.

    The blocks within the first fifth, up to the last whose median is outside of the middle 90% of
    the second fifth.

    Args:
        norms: in order; 1-d float64.
        usable: those that are finite and positive.
    """
    n = len(norms)
    end = int(n * _MOST_WARMUP)
    reference = norms[end : 2 * end][usable[end : 2 * end]]
    if n < _LEAST_STEPS or not len(reference):
        return 0
    low, high = reference.quantile(reference.new_tensor([0.05, 0.95])).tolist()
    size = max(_LEAST_BLOCK, end // _BLOCKS)
    warmup = 0
    for start in range(0, end - size + 1, size):
        block = norms[start : start + size][usable[start : start + size]]
        if len(block) and not low <= float(block.quantile(0.5)) <= high:
            warmup = start + size
    return warmup


# Of the steps after the warm-up. More, and the limit becomes a part of the learning rate; fewer,
# and a limit from some hundred steps hangs on one or two of them.
LEAST_SHARE, MOST_SHARE = 0.01, 0.10
# torch adds it to the norm that it divides by.
EPS = 1e-6
_N_SPIKES = 3


@dataclass(frozen=True)
class Spike:
    """One of the largest norms of a run, after the warm-up.

    Attributes:
        step: its number.
        norm: before clipping.
    """

    step: int
    norm: float


@dataclass(frozen=True)
class Candidate:
    """A limit that might be chosen.

    Attributes:
        max_norm: the limit.
        origin: why it is among the candidates.
        share: of the steps after the warm-up, those that it would clip.
        coefficients: the factors by which it would scale the largest spikes, in their order.
    """

    max_norm: float
    origin: str
    share: float
    coefficients: tuple[float, ...]


def spikes_of(norms: Tensor, steps: Tensor) -> tuple[Spike, ...]:
    """The largest norms, from the largest on."""
    largest = norms.topk(_N_SPIKES)
    return tuple(
        Spike(step, norm)
        for step, norm in zip(steps[largest.indices].tolist(), largest.values.tolist(), strict=True)
    )


def share_over(norms: Tensor, limit: float) -> float:
    """The share of the steps that a limit would clip."""
    return float((norms > limit).double().mean())


def limit_at(norms: Tensor, share: float) -> float:
    """A limit that clips a share of the steps, in as few digits as keep the share."""
    exact = float(norms.quantile(1 - share))
    tolerance = max(share / 2, 1 / len(norms))
    for digits in (2, 3):
        nearest = f"{exact:.{digits - 1}e}"
        last = float(f"1e{nearest.partition('e')[2]}") / 10 ** (digits - 1)
        for change in (0.0, last, -last):
            limit = float(f"{float(nearest) + change:.{digits - 1}e}")
            clipped = share_over(norms, limit)
            if LEAST_SHARE <= clipped <= MOST_SHARE and abs(clipped - share) <= tolerance:
                return limit
    return exact


def candidates_of(
    norms: Tensor,
    spikes: Sequence[Spike],
    recommended: float | None,
    in_use: float | None,
) -> tuple[Candidate, ...]:
    """Limits in ascending order, each once, under the first of its origins."""
    limits: dict[float, str] = {}
    if recommended is not None:
        limits[recommended] = "recommended"
    if in_use is not None:
        limits.setdefault(in_use, "in use")
    # A share of less than one step is none.
    for share in (s for s in (LEAST_SHARE, 0.02, 0.05, MOST_SHARE) if s * len(norms) >= 1):
        limits.setdefault(limit_at(norms, share), f"about {share:.0%}")
    limits.setdefault(1.0, "usual for transformers")
    return tuple(
        Candidate(
            limit,
            origin,
            share_over(norms, limit),
            tuple(min(1.0, limit / (spike.norm + EPS)) for spike in spikes),
        )
        for limit, origin in sorted(limits.items())
    )


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
