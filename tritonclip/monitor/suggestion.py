"""`suggest_max_norm`: a limit from the norms of a run, and the reason for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tritonclip.attributes import NamesAttributes
from tritonclip.monitor.candidates import (
    LEAST_SHARE,
    MOST_SHARE,
    Candidate,
    Spike,
    candidates_of,
    limit_at,
    share_over,
    spikes_of,
)
from tritonclip.monitor.history import History, read
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.trend import trend_of, warmup_of
from tritonclip.monitor.verdict import (
    ENOUGH,
    Verdict,
    judge,
    of_limit_in_use,
    of_replaced,
    of_runs,
    remarks_on,
)

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
