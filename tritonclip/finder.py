"""`find_max_norm`: the limit with which the user's own training goes best, found by trying.

Many limits train for a short time, and the better ones for longer, over several seeds (successive
halving: Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943). No limit is always among
them, up to the end.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonclip.distributed.process_groups import mean_of_all
from tritonclip.messages import NamesAttributes
from tritonclip.modes import outside_inference, refuse_tracer
from tritonclip.rules import Rule
from tritonclip.rules.arguments import as_count, as_number
from tritonclip.trials import Training, Trial

# Of a candidate, by position of the seed.
Trials = dict[int, Trial]

# Limits of the first round: this many, each the next by this ratio, from this multiple of the
# median of the first norms downwards.
_N_LIMITS, _RATIO, _TOP = 7, 10**0.5, 3.0
# First norms that set the grid.
_FIRST_NORMS = 20
# Lower limits that may be added while the lowest is the best.
_MOST_EXTRA = 4
# Steps of the shortest trial.
_FEWEST = 10
# The last part of a trial, whose median loss judges it.
_JUDGED = 0.25
# Standard errors within which losses are not distinguishable (the rule of one standard error of
# Breiman et al. 1984), and a share of the loss below which no limit gains anything.
_ERRORS, _NO_GAIN = 1.0, 0.002
# A share of the gain over no limit that the recommended limit may give up.
_GIVEN_UP = 0.1
# A limit that clips this share of the steps acts as a smaller step.
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Candidate(NamesAttributes):
    """A limit or a rule that was tried.

    Attributes:
        clip: the limit, inf for none; or the rule.
        losses: for each seed of its last round, at the end of a trial; inf where it diverged.
        steps: of each of these trials.
        clipped_share: the share of their steps that a limit clipped; NaN for a rule.
        scale: the median factor by which a limit multiplied gradients; NaN for a rule.
    """

    clip: float | Rule
    losses: tuple[float, ...]
    steps: int
    clipped_share: float
    scale: float

    @property
    def name(self) -> str:
        """The limit in words."""
        if isinstance(self.clip, Rule):
            return repr(self.clip)
        return "no limit" if self.clip == math.inf else f"{self.clip:g}"

    @property
    def loss(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.losses)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of the losses over seeds."""
        return _quartiles(self.losses)


@dataclass(frozen=True)
class Found(NamesAttributes):
    """The answer of :func:`find_max_norm`; `print` shows a verdict, and a table.

    Attributes:
        max_norm: the recommended limit; None where no limit helps, or where a rule is better.
        rule: the rule that is recommended in place of a limit; None without one.
        best: the candidate with the lowest loss.
        equals: those of the last round that are not distinguishable from the best, itself included.
        candidates: all, by limit; rules come last.
        seeds: of the last round.
        steps: of a whole trial.
        spent: training steps that were taken.
        reason: the verdict in sentences.
        is_held_out: whether losses are those of held-out batches.
        is_interrupted: whether the search was ended before its last trial.
    """

    max_norm: float | None
    rule: Rule | None
    best: Candidate
    equals: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    seeds: tuple[int, ...]
    steps: int
    spent: int
    reason: str
    is_held_out: bool
    is_interrupted: bool

    @property
    def clip(self) -> float | Rule:
        """What to clip by, as :func:`clip_` and :class:`ClippedOptimizer` take it; inf for none."""
        if self.rule is not None:
            return self.rule
        return math.inf if self.max_norm is None else self.max_norm

    def __str__(self) -> str:
        rows = [_HEADS, *map(self._cells, self.candidates)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self.reason, "", *table])

    def _cells(self, candidate: Candidate) -> tuple[str, ...]:
        low, middle, high = candidate.quartiles
        mark = "recommended" if candidate.clip == self.clip else ""
        if not mark and candidate in self.equals:
            mark = "not distinguishable from the best"
        share = candidate.clipped_share
        return (
            candidate.name,
            f"{middle:.4g}",
            f"{low:.4g} to {high:.4g}",
            "" if math.isnan(share) else f"{share:.0%}",
            f"{len(candidate.losses)} x {candidate.steps}",
            mark,
        )


_HEADS = ("limit", "loss", "quartiles", "clipped", "seeds x steps", "")


class Round(NamedTuple):
    """Trials of one length.

    Attributes:
        steps: of each.
        seeds: positions.
        most: candidates, with no limit.
    """

    steps: int
    seeds: range
    most: int

    @property
    def cost(self) -> int:
        """Steps of all its trials."""
        return self.steps * len(self.seeds) * self.most


def rounds(steps: int, n_seeds: int, n_first: int) -> list[Round]:
    """The rounds of a search, of which each keeps the better candidates of the one before.

    Args:
        steps: of a whole trial.
        n_seeds: of the last round.
        n_first: candidates of the first round, with no limit.
    """
    least = min(steps, _FEWEST)
    second = range(min(1, n_seeds - 1), min(2, n_seeds))
    return [
        Round(max(steps // 8, least), range(1), n_first),
        Round(max(steps // 4, least), second, min(5, n_first)),
        Round(steps, range(n_seeds), min(3, n_first)),
    ]


class _Search:
    """Which trials to run, and their losses.

    Args:
        run: a trial of a seed's position, a limit or rule, and a number of steps.
        limits: to try; empty for a grid from the first norms.
        rules: that compete.
        steps: of a whole trial.
        n_seeds: of the last round.
    """

    def __init__(
        self,
        run: Callable[[int, float | Rule, int], Trial],
        limits: Sequence[float],
        rules: Sequence[Rule],
        steps: int,
        n_seeds: int,
    ) -> None:
        self._run, self._limits, self._rules = run, limits, rules
        n_first = (len(limits) or _N_LIMITS) + len(rules) + 1
        self.rounds = rounds(steps, n_seeds, n_first)
        # The most steps that the search takes.
        extra = 0 if limits else _MOST_EXTRA * self.rounds[0].cost // n_first
        self.budget = sum(one.cost for one in self.rounds) + extra
        # By round, then by candidate and position of the seed.
        self.trials: list[dict[float | Rule, Trials]] = []
        self.is_interrupted = False

    def run(self) -> None:
        """Runs all rounds; an interrupt ends them once something is known."""
        try:
            for i, one in enumerate(self.rounds):
                self.trials.append({})
                self._run_all(one, self._chosen(one) if i else [math.inf])
                if not i:
                    self._run_all(one, [*(self._limits or self._grid()), *self._rules])
                    self._extend(one)
        except KeyboardInterrupt:
            if self.last is None:
                raise
            self.is_interrupted = True

    @property
    def last(self) -> dict[float | Rule, Trials] | None:
        """The trials of the last round in which candidates can be compared, over common seeds."""
        for found in reversed(self.trials):
            common = (
                set.intersection(*(set(trials) for trials in found.values())) if found else set()
            )
            if common and len(found) > 1:
                return {clip: {i: trials[i] for i in common} for clip, trials in found.items()}
        return None

    def _run_all(self, one: Round, clips: Iterable[float | Rule]) -> None:
        clips = [*clips]
        found = self.trials[-1]
        found.update((clip, {}) for clip in clips)
        for position in one.seeds:
            for clip in clips:
                found[clip][position] = self._run(position, clip, one.steps)

    def _grid(self) -> list[float]:
        """Limits around the first norms, from large to small."""
        norms = self.trials[0][math.inf][0].norms[:_FIRST_NORMS]
        norms = norms[norms.isfinite() & (norms > 0)]
        median = mean_of_all(norms.median() if len(norms) else torch.tensor(math.nan), None)
        if math.isnan(median):
            raise ValueError(
                "no norm of the first steps is finite and above 0, so that no limits follow from "
                "them; expected limits=(0.1, 1.0, 10.0), or a step whose clip gets parameters with "
                "gradients"
            )
        return [_round(_TOP * float(median) / _RATIO**i) for i in range(_N_LIMITS)]

    def _extend(self, one: Round) -> None:
        """Adds lower limits while the lowest is the best."""
        for _ in range(0 if self._limits else _MOST_EXTRA):
            limits = [clip for clip in self.trials[0] if not isinstance(clip, Rule)]
            lowest = min(limits)
            if min(limits, key=self._loss) != lowest:
                return
            self._run_all(one, [_round(lowest / _RATIO)])

    def _chosen(self, one: Round) -> list[float | Rule]:
        """The best candidates of the round before, and no limit."""
        before = self.trials[-2]
        others = sorted((clip for clip in before if clip != math.inf), key=self._loss)
        return [math.inf, *others[: one.most - 1]]

    def _loss(self, clip: float | Rule) -> float:
        trials = next(found[clip] for found in reversed(self.trials) if found.get(clip))
        return statistics.fmean(map(judged, trials.values()))


def ending(trial: Trial) -> Tensor:
    """The losses that judge a trial: of its last steps, or on held-out batches."""
    if trial.diverged or trial.held_out is not None:
        loss = math.inf if trial.held_out is None else trial.held_out
        return torch.tensor([loss if math.isfinite(loss) else math.inf], dtype=torch.float64)
    return trial.losses[-max(math.ceil(_JUDGED * len(trial.losses)), 1) :]


def judged(trial: Trial) -> float:
    """The loss at the end of a trial; inf where it diverged."""
    return float(ending(trial).median())


def _round(limit: float) -> float:
    """A limit in two digits."""
    return float(f"{limit:.2g}")


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    # Of infinite values nothing is interpolated.
    low, middle, high = (
        float(
            torch.quantile(
                ordered, q, interpolation="nearest" if ordered.isinf().any() else "linear"
            )
        )
        for q in (0.25, 0.5, 0.75)
    )
    return low, middle, high


def excess(worse: Trials, better: Trials) -> tuple[float, float]:
    """How much higher losses are, as a share from -1 to 1: the mean over seeds, and its error.

    Differences are relative, step by step: trials of a seed have the same batches, and among losses
    that explode an absolute one of a single seed would drown all others.
    """
    found = [_relative(ending(worse[i]), ending(better[i])) for i in worse]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    return statistics.fmean(found), error


def _relative(a: Tensor, b: Tensor) -> float:
    ratio = (a - b) / (a.abs() + b.abs())
    # inf - inf, or 0 / 0: equal. inf / inf: all the difference there is.
    ratio = torch.where(a == b, 0.0, torch.where(a.isinf() | b.isinf(), (a - b).sign(), ratio))
    return float(ratio.median())


def recommended(last: dict[float | Rule, Trials]) -> tuple[Any, Any, list[Any]]:
    """The clip to recommend, the best, and those that are not distinguishable from the best.

    Args:
        last: the trials of the last round, over the same seeds; no limit is a candidate.
    """
    mean = {c: statistics.fmean(map(judged, trials.values())) for c, trials in last.items()}
    # Where means are equal, the mildest: a limit above every norm changes nothing.
    best = min(last, key=lambda clip: (mean[clip], -_mildness(clip)))
    differences = {clip: excess(trials, last[best]) for clip, trials in last.items()}
    equals = [
        clip
        for clip, (more, error) in differences.items()
        if more <= _ERRORS * error or clip == best
    ]
    if (
        math.inf in equals
        or _relative(*(torch.tensor([mean[c]]) for c in (math.inf, best))) < _NO_GAIN
    ):
        return math.inf, best, [*dict.fromkeys([*equals, math.inf])]
    gain = mean[math.inf] - mean[best]
    near = [clip for clip in equals if mean[clip] - mean[best] <= _GIVEN_UP * gain]
    limits = [clip for clip in near if not isinstance(clip, Rule)]
    return (max(limits) if limits else best), best, equals


def _mildness(clip: float | Rule) -> float:
    return -1.0 if isinstance(clip, Rule) else clip


@outside_inference
def find_max_norm(
    make: Callable[[], Any],
    batches: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    limits: Sequence[float] | None = None,
    rules: Sequence[Rule] = (),
    steps: int = 200,
    seeds: int | Sequence[int] = 3,
    held_out: Iterable[Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Tries limits on your own training, and says with which it goes best.

    Each trial is a short training that begins with the same weights, random state and batches, and
    differs in its limit. All limits train for an eighth of `steps` with one seed, the better ones
    for a quarter with another, and the best two for all of them with every seed (successive
    halving). No limit is always among them. A trial whose loss is NaN or inf ends there. With three
    seeds all take the steps of some eleven whole trials, fewer where trials diverge.

    Example:
        >>> import torch, tritonclip
        >>> def make():
        ...     model = torch.nn.Linear(4, 1)
        ...     return model, torch.optim.SGD(model.parameters(), lr=0.1)
        >>> generator = torch.Generator().manual_seed(0)
        >>> batches = [torch.randn(8, 4, generator=generator) for _ in range(40)]
        >>> for i in range(5, 40, 10):
        ...     batches[i] *= 1000  # a corrupt one
        >>> found = tritonclip.find_max_norm(
        ...     make, batches, loss=lambda model, x: (model(x) - x[:, :1]).square().mean(), steps=40
        ... )
        >>> found.max_norm is not None
        True

    Random states, the objects that `make` gives again and again, their gradients, optimizer states
    and modes are afterwards as they were, also where the call raises or is interrupted. Other
    things that your code changes stay changed. Within a process group, all processes call this with
    the same arguments and get one answer: losses are averaged.

    Args:
        make: a function that gives `(model, optimizer)`, or a step function
            `step(batch, clip) -> loss`, which calls `clip(parameters)` where `clip_grad_norm_`
            would stand: closures, loss scaling, schedulers and accumulation belong there. It is
            called for each trial; a step function has to train new parameters each time. It may
            give the same model and optimizer again: they are put back.
        batches: an iterable, such as a list or a DataLoader, which is iterated again where it ends;
            or a function that gives one. Of an iterator, which gives each batch once, `steps`
            batches are kept.
        loss: `loss(model, batch)`, for a model and an optimizer. None: the model is called with the
            batch, and its output is the loss or has it as `.loss`, as in Hugging Face.
        limits: to try; None for those around the median of the first norms.
        rules: that compete with limits, such as ``[ClipByQuantile(0.9)]``.
        steps: of a whole trial: enough to see whether training goes well.
        seeds: how many, or a list.
        held_out: batches whose mean loss judges a trial at its end; a step function then comes
            with its loss, `(step, evaluate)`. None: the median of the last quarter of the training
            losses judges it.
        progress: called with the steps so far and the most there will be, first before any step.
            None: the most there will be are written to stderr.

    Returns:
        The recommendation, and how sure it is; `print` shows it with a table. It is the largest of
        the limits that are not distinguishable from the best: the mildest that works. It is never a
        limit that was worse than none.

    Raises:
        TypeError: arguments of another kind, or a step that returns no loss.
        ValueError: a first loss that is NaN or inf; steps that change no parameter, or never call
            `clip`; batches that run out; fewer than two limits and rules; a step function over
            parameters that were trained before; lazy parameters.
        KeyboardInterrupt: an interrupt before any two candidates can be compared; a later one ends
            the search, and the answer is what is known by then.
    """
    refuse_tracer()
    chosen = _checked_seeds(seeds)
    steps = as_count("steps", steps, 4)
    tried, rules = _checked_clips(limits, rules)
    training = Training(make, batches, loss, held_out)
    spent = 0

    def run(position: int, clip: float | Rule, n: int) -> Trial:
        return training.run(chosen[position], position / len(chosen), clip, n, tick)

    def tick() -> None:
        nonlocal spent
        spent += 1
        if progress is not None:
            progress(spent, search.budget)

    search = _Search(run, tried, rules, steps, len(chosen))
    _say_budget(search.budget, steps, progress)
    with training.untouched():
        training.begin(chosen[0], search.rounds[0].steps)
        search.run()
    return _answer(search, training, chosen, steps, spent, held_out is not None)


def _say_budget(budget: int, steps: int, progress: Callable[[int, int], None] | None) -> None:
    if progress is not None:
        progress(0, budget)
        return
    sys.stderr.write(
        f"find_max_norm: at most {budget:,} training steps, {budget / steps:.1f} times a training "
        f"of {steps:,}; Ctrl-C ends it with what is known by then\n"
    )


def _checked_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        found = [as_count(f"seeds[{i}]", seed, 0) for i, seed in enumerate(seeds)]
        if found and len({*found}) == len(found):
            return found
        raise ValueError(f"seeds must be different numbers, or how many there are, got {seeds!r}")
    return [*range(as_count("seeds", seeds, 1))]


def _checked_clips(limits: Any, rules: Any) -> tuple[list[float], list[Rule]]:
    """Limits from large to small, and rules."""
    if isinstance(rules, Rule) or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(
            f"rules must be a list of rules, as [ClipByQuantile(0.9)], got {rules!r:.80}"
        )
    rules = [*dict.fromkeys(rules)]
    if limits is None:
        return [], rules
    if isinstance(limits, float | int | str) or not isinstance(limits, Iterable):
        raise TypeError(
            f"limits must be several numbers, such as (0.1, 0.3, 1.0), got {limits!r:.40}"
        )
    found = {as_number(f"limits[{i}]", limit) for i, limit in enumerate(limits)}
    if any(not limit > 0 for limit in found):
        raise ValueError(f"limits must be above 0, got {sorted(found)}")
    # No limit is always tried.
    found.discard(math.inf)
    if len(found) + len(rules) < 2:
        raise ValueError(
            f"expected two or more limits or rules to choose from, got {[*found, *rules]}; no "
            "limit is always tried beside them. Pass more, such as limits=(0.1, 0.3, 1.0, 3.0), or "
            "limits=None for those that follow from the norms of your training"
        )
    return sorted(found, reverse=True), rules


def _answer(
    search: _Search, training: Training, seeds: list[int], steps: int, spent: int, is_held_out: bool
) -> Found:
    last = search.last
    assert last is not None
    shown = {clip: trials for found in search.trials for clip, trials in found.items() if trials}
    shown.update(last)
    candidates = {clip: _candidate(clip, trials) for clip, trials in shown.items()}
    clip, best, equals = recommended(last)
    used = [seeds[i] for i in last[best]]
    ordered = sorted(candidates.values(), key=lambda one: -_mildness(one.clip))
    reason = _reason(candidates, clip, best, training.optimizer, len(used))
    if search.is_interrupted:
        reason += (
            f" The search was interrupted: this is known from trials of {candidates[best].steps} "
            f"of {steps} steps over {len(used)} of {len(seeds)} seeds."
        )
    return Found(
        max_norm=None if isinstance(clip, Rule) or clip == math.inf else clip,
        rule=clip if isinstance(clip, Rule) else None,
        best=candidates[best],
        equals=tuple(one for one in ordered if one.clip in equals),
        candidates=tuple(ordered),
        seeds=tuple(used),
        steps=steps,
        spent=spent,
        reason=reason,
        is_held_out=is_held_out,
        is_interrupted=search.is_interrupted,
    )


def _candidate(clip: float | Rule, trials: Trials) -> Candidate:
    norms = torch.cat([trial.norms for trial in trials.values()])
    norms = norms[norms.isfinite()]
    share = scale = math.nan
    if not isinstance(clip, Rule) and len(norms):
        share = float((norms > clip).double().mean())
        scale = float((clip / norms).clamp(max=1.0).median())
    longest = max(len(trial.losses) for trial in trials.values())
    return Candidate(clip, tuple(map(judged, trials.values())), longest, share, scale)


def _reason(
    candidates: dict[Any, Candidate],
    clip: Any,
    best: Any,
    optimizer: Any,
    n: int,
) -> str:
    """The verdict in sentences."""
    over = f"over {n} seed{'s' * (n > 1)}"
    without, chosen, lowest = candidates[math.inf], candidates[clip], candidates[best]
    if clip == math.inf:
        text = f"No limit helps: without one the loss is {without.loss:.4g} {over}, "
        text += "the lowest." if best == clip else "not distinguishable from the lowest, "
        text += "" if best == clip else f"{lowest.loss:.4g} with {lowest.name}."
    else:
        text = (
            f"Clip by {chosen.name}: the loss is {chosen.loss:.4g} {over}, and {without.loss:.4g} "
            "without a limit."
        )
        if clip != best:
            text += (
                f" {lowest.name} had {lowest.loss:.4g}, which is no clear difference; of limits "
                "that are as good, the largest changes the least."
            )
        if chosen.clipped_share >= _NEARLY_ALL:
            text += _on_smaller_steps(chosen, optimizer)
    if n < 2:
        text += " One seed cannot say how sure this is: pass seeds=3 or more."
    return text


def _on_smaller_steps(chosen: Candidate, optimizer: Any) -> str:
    rate = ""
    if optimizer is not None and isinstance(lr := optimizer.param_groups[0].get("lr"), float):
        rate = f", here {lr * chosen.scale:.2g}"
    return (
        f" It is below {chosen.clipped_share:.0%} of the norms, and acts as a smaller step of even "
        f"length: with SGD, {chosen.scale:.2g} times the learning rate{rate} takes steps of the "
        "same median length."
    )
