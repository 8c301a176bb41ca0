"""`find_max_norm`: tries limits on the user's own training to find the best one.

Every limit trains for the full length with one seed, because short trials would leave out limits
that start slowly and end lower. The better limits, and no limit, train with more seeds.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from tritonclip.advice.series import EPS, FALLS, fall_of, two_digits
from tritonclip.advice.trials import Training, Trial, kept_random_states
from tritonclip.distributed.domain import mean_of_all
from tritonclip.messages import in_columns
from tritonclip.modes import outside_inference, refuse_tracer
from tritonclip.rules import Rule
from tritonclip.rules.arguments import as_count, as_limit, as_number

Clip = float | Rule
# The trials of a candidate by the position of their seed.
Trials = dict[int, Trial]

# The constants were chosen on small trainings, by the regret of the limit that was found:
# docs/decisions.md.
# The grid has _N_LIMITS limits, from _TOP times the usual norm downwards, each _RATIO times lower.
# At most _N_MORE are added where the first norm is not the usual one, and at most _N_MORE while the
# lowest limit is the best.
_N_LIMITS, _TOP, _RATIO, _N_MORE = 7, 3.0, 10**0.5, 4
# The number of first norms that set the grid.
_FIRST_NORMS = 20
# How many limits and rules are tried with the second seed, and with each later seed.
_KEPT = 5, 4
# Losses within this many standard errors of the lowest are not distinguishable from it.
_ERRORS = 1.0
# A gain over no limit of less than this share of the loss counts as no gain; and a milder limit may
# give up this share of a gain.
_NO_GAIN, _GIVEN_UP = 0.002, 0.1
# All of three seeds improve by chance with this probability; this share of seeds may get worse.
_CHANCE = 1 / 8
# A limit that clips this share of the steps acts as a smaller step.
_NEARLY_ALL = 0.9
# Trials are too short if in their first sixth, of at least 10 steps, the losses of less than half
# of the candidates changed clearly; we then advise trials that are three times as long.
_FIRST_PART, _FEWEST, _LEAST_TELLING, _LONGER = 6, 10, 0.5, 3
# The steps of the first trials if the user leaves the length open.
_FIRST_STEPS = 200
# Seconds between two lines about progress.
_EVERY = 10.0


@dataclass(frozen=True)
class Candidate:
    """A limit or a rule that was tried.

    Attributes:
        clip: the limit, inf for none; or the rule.
        steps: the number of steps of each trial.
        seeds: the seeds with which it was tried.
        losses: the loss at the end of the trial of each seed; inf if the trial diverged.
        clipped_share: the share of all norms that are above the limit; NaN for a rule.
        scale: the median factor by which the limit multiplied gradients; NaN for a rule.
    """

    clip: Clip
    steps: int
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    clipped_share: float
    scale: float

    @property
    def name(self) -> str:
        """The limit in words."""
        if isinstance(self.clip, Rule):
            return repr(self.clip)
        return "no limit" if self.clip == math.inf else f"{self.clip:g}"

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The quartiles of the losses over seeds."""
        losses = torch.tensor(self.losses, dtype=torch.float64, device="cpu")
        # Between a number and inf, interpolation has no meaning.
        how = "linear" if losses.isfinite().all() else "nearest"
        low, middle, high = losses.quantile(
            losses.new_tensor([0.25, 0.5, 0.75]), interpolation=how
        ).tolist()
        return low, middle, high


@dataclass(frozen=True)
class Found:
    """The answer of :func:`find_max_norm`; `print` shows the verdict and a table.

    Attributes:
        max_norm: the recommended limit; None where no limit helps, or where a rule is better.
        clip: the argument for :func:`clip_` and :class:`ClippedOptimizer`: `max_norm`, the rule
            that is better than every limit, or inf where no limit helps.
        reason: the verdict in sentences.
        best: the candidate with the lowest loss.
        equals: the candidates that are not distinguishable from the best, itself included.
        candidates: all candidates: limits from small to large, then no limit, then rules.
        spent: the number of training steps that were taken.
        is_held_out: whether the losses come from held-out batches.
        is_too_short: whether trials were too short or too noisy for a verdict.
        is_interrupted: whether the search ended before its last trial.
    """

    max_norm: float | None
    clip: Clip
    reason: str
    best: Candidate
    equals: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    spent: int
    is_held_out: bool
    is_too_short: bool
    is_interrupted: bool

    def __str__(self) -> str:
        of_all = f"{len(self.best.seeds)} seeds"
        heads = ("limit", f"seed {self.best.seeds[0]}", of_all, "quartiles", "clipped", "")
        table = in_columns([heads, *map(self._cells, self.candidates)])
        about = f"Losses after {self.best.steps} steps; those of a column are of the same seeds."
        return f"{self.reason}\n\n{about}\n\n{table}"

    def _cells(self, one: Candidate) -> tuple[str, ...]:
        # A median over some seeds is not comparable with a median over all.
        is_whole = len(one.seeds) == len(self.best.seeds) > 1
        low, middle, high = (f"{loss:.4g}" if is_whole else "" for loss in one.quartiles)
        mark = "as good as the best" if one in self.equals else ""
        mark = "best" if one is self.best else mark
        if one.clip == self.clip:
            mark = f"recommended{', ' * bool(mark)}{mark}"
        share = "" if math.isnan(one.clipped_share) else f"{one.clipped_share:.0%}"
        spread = f"{low} to {high}" if is_whole else ""
        return one.name, f"{one.losses[0]:.4g}", middle, spread, share, mark


class _Search:
    """Chooses the trials to `run`; without `limits`, it tries a grid around the first norms."""

    def __init__(
        self,
        run: Callable[[int, Clip], Trial],
        limits: Sequence[float],
        rules: Sequence[Rule],
        n_seeds: int,
    ) -> None:
        self._run, self._limits, self._rules = run, limits, rules
        # The number of limits and rules to try with each seed after the first.
        self._kept = (_KEPT[:1] + _KEPT[1:] * n_seeds)[: n_seeds - 1]
        n_first = len(rules) + (len(limits) or _N_LIMITS + 2 * _N_MORE + 2)
        # The most trials that the search takes, including those without a limit.
        self.most = n_seeds + n_first + sum(min(n, n_first) for n in self._kept)
        self.trials: dict[Clip, Trials] = {}
        self.is_interrupted = False

    def run(self) -> None:
        """Runs all trials; an interrupt ends them once candidates can be compared."""
        try:
            self._try(0, [])
            limits = self._limits or self._grid()
            # They run one by one, the likely ones first, because an interrupt keeps earlier ones.
            middle = (len(limits) - 1) / 2
            order = sorted(range(len(limits)), key=lambda i: abs(i - middle))
            clips: list[Clip] = [*(limits[i] for i in order), *self._rules]
            for clip in clips:
                self._try(0, [clip])
            if not self._limits:
                self._add()
            for position, n in enumerate(self._kept, 1):
                self._try(position, self._best(n))
        except KeyboardInterrupt:
            if len(self.trials) < 2:
                raise
            self.is_interrupted = True

    @property
    def last(self) -> dict[Clip, Trials]:
        """The candidates with the most seeds, and no limit, with their trials of the same seeds."""
        n = sorted(map(len, self.trials.values()))[-2:][0]
        return {
            clip: dict([*trials.items()][:n])
            for clip, trials in self.trials.items()
            if len(trials) >= n
        }

    def _try(self, position: int, clips: Sequence[Clip]) -> None:
        """Runs trials of a seed, and one without a limit if needed; keeps all of them, or none."""
        none = self.trials.get(math.inf, {}).get(position) or self._run(position, math.inf)
        found: dict[Clip, Trial] = {math.inf: none}
        # A limit above all norms changes nothing, so its trial need not run.
        highest = math.inf if none.diverged else float(none.norms.max()) + EPS
        for clip in clips:
            is_above = not isinstance(clip, Rule) and highest <= clip
            found[clip] = none if is_above else self._run(position, clip)
        for clip, trial in found.items():
            self.trials.setdefault(clip, {})[position] = trial

    def _grid(self) -> list[float]:
        """Limits around the first norms, from large to small."""
        norms = self.trials[math.inf][0].norms[:_FIRST_NORMS]
        norms = norms[norms.isfinite() & (norms > 0)]
        if not len(norms):
            raise ValueError(
                "no norm of the first steps is finite and above 0, so that no limits follow from "
                "them; expected limits=(0.1, 1.0, 10.0), or a step whose clip gets parameters with "
                "gradients"
            )
        # Without clipping, norms may explode after the first one, so the first one counts as well.
        first, median = float(norms[0]), float(norms.median())
        n_more = round(abs(math.log(median / first, _RATIO)))
        lowest = _TOP * min(first, median) / _RATIO ** (_N_LIMITS - 1)
        n = _N_LIMITS + min(n_more, _N_MORE)
        return [two_digits(lowest * _RATIO**i) for i in reversed(range(n))]

    def _add(self) -> None:
        """Adds lower limits while the lowest is the best, then the two halfway to the next ones."""
        (best,) = self._best(1)
        for _ in range(_N_MORE):
            lowest = min(clip for clip in self.trials if not isinstance(clip, Rule))
            if best != lowest:
                break
            self._try(0, [two_digits(lowest / _RATIO)])
            (best,) = self._best(1)
        if not isinstance(best, Rule):
            for factor in (_RATIO**0.5, _RATIO**-0.5):
                self._try(0, [two_digits(best * factor)])

    def _best(self, n: int) -> list[Clip]:
        """The best candidates so far, except no limit; those that changed nothing come last."""
        last = self.last
        none = last.pop(math.inf)
        above = _above(last)
        return sorted(last, key=lambda clip: (last[clip][0] is none[0], above[clip]))[:n]


def _mean(trials: Trials) -> float:
    return statistics.fmean(trial.loss for trial in trials.values())


def _excesses(trials: Trials, others: Trials) -> list[float]:
    """How much higher losses are than others of the same seed, as shares from -1 to 1.

    Losses are compared step by step, because trials of a seed have the same batches. Shares are
    used because otherwise one seed whose losses explode would outweigh all others.
    """
    return [_share(trials[i].ending, others[i].ending) for i in trials]


def _above(last: dict[Clip, Trials]) -> dict[Clip, float]:
    """How much higher the losses of each candidate are than those of all candidates, on average."""
    return {
        clip: statistics.fmean(
            more for others in last.values() for more in _excesses(trials, others)
        )
        for clip, trials in last.items()
    }


def _share(a: Tensor, b: Tensor) -> float:
    share = (a - b) / (a.abs() + b.abs())
    share = torch.where(a.isinf() | b.isinf(), (a - b).sign(), share)
    return float(torch.where(a == b, 0.0, share).median())


def choose(last: dict[Clip, Trials]) -> tuple[Clip, Clip, list[Clip]]:
    """Returns the clip to recommend, the best, and those not distinguishable from the best.

    It follows the rule of one standard error (Breiman et al. 1984): among the clips within one
    standard error that help and give up little of the gain, it recommends the simplest. No limit is
    simpler than a large limit, which is simpler than a small one, which is simpler than a rule.
    """
    mean = {clip: _mean(trials) for clip, trials in last.items()}
    above = _above(last)
    # The mildest of equal ones, because limits above every norm change nothing.
    best = min(last, key=lambda clip: (above[clip], -_mildness(clip)))
    equals = [best]
    for clip, trials in last.items():
        more = _excesses(trials, last[best])
        error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
        # If one seed diverges under a limit, the limit is worse than one under which none does.
        is_close = statistics.fmean(more) <= _ERRORS * error and mean[clip] - mean[best] < math.inf
        if clip != best and is_close:
            equals.append(clip)
    clear = [clip for clip in equals if clip != math.inf and _helps(last[clip], last[math.inf])]
    if math.inf in equals or not clear:
        return math.inf, best, [*dict.fromkeys([*equals, math.inf])]
    lowest = min(map(mean.__getitem__, clear))
    # Without a limit the loss may explode; then the gain is measured from the loss at the start.
    start = statistics.fmean(float(trial.losses[0]) for trial in last[best].values())
    most = lowest + _GIVEN_UP * max(min(mean[math.inf], start) - lowest, 0.0)
    return max((c for c in clear if mean[c] <= most), key=_mildness), best, equals


def _helps(trials: Trials, none: Trials) -> bool:
    """Whether losses are lower than without a limit in so many seeds that it is hardly chance."""
    means = _mean(none), _mean(trials)
    if math.isinf(means[0]):
        return math.isfinite(means[1])
    gain = _share(*(torch.tensor([mean]) for mean in means))
    n_higher = sum(more < -_NO_GAIN for more in _excesses(none, trials))
    return gain >= _NO_GAIN and n_higher <= _CHANCE * len(trials)


def _mildness(clip: Clip) -> float:
    return 0.0 if isinstance(clip, Rule) else clip


@outside_inference
def find_max_norm(
    train: Callable[[Callable[[Any], Tensor | None]], Generator[Any, None, Any]],
    *,
    limits: Sequence[float] | None = None,
    rules: Sequence[Rule] = (),
    steps: int | None = 200,
    seconds: float = 600.0,
    seeds: int | Sequence[int] = 3,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Tries limits on your own training, and says with which limit it goes best.

    Each trial is a short training. Trials of a seed begin with the same random numbers and differ
    only in their limit. All limits train with the first seed, the middle ones first, followed by
    one on each side of the best; the best five train with the second seed, and the best four with
    each later one. Training without a limit is always included. Trials of a seed are compared step
    by step. A trial ends when its loss is NaN or inf, and does not run if its limit is above every
    norm. Three seeds take 18 to 22 trials, at most 29, and fewer if trials diverge.

    Example:
        >>> import torch, tritonclip
        >>> def train(clip):
        ...     model = torch.nn.Linear(4, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     for step in range(40):
        ...         batch = torch.randn(8, 4)
        ...         if step % 10 == 5:
        ...             batch *= 1000  # a corrupt one
        ...         optimizer.zero_grad()
        ...         loss = (model(batch) - batch[:, :1]).square().mean()
        ...         loss.backward()
        ...         clip(model.parameters())
        ...         optimizer.step()
        ...         yield loss
        >>> found = tritonclip.find_max_norm(train, steps=40)
        >>> found.max_norm is not None
        True

    The random states of torch, Python and NumPy are restored afterwards, even if the call raises or
    is interrupted. Within a process group, all processes call this with the same arguments and get
    the same answer, because losses are averaged.

    Args:
        train: a generator function, called for each trial after torch, `random` and NumPy are
            seeded. It makes its model, optimizer and data, calls `clip(parameters)` in each step
            where `clip_grad_norm_` would stand, and yields the loss of the step, a number or a
            scalar tensor. `clip` takes the parameters of :func:`clip_` and returns the norm before
            clipping. After `steps` losses the generator is closed, unless it ends there and returns
            a loss, for example of held-out data; this loss then judges the trial.
        limits: the limits to try. None tries limits around the median of the first norms.
        rules: rules that compete with limits, such as ``[ClipByQuantile(0.9, max_norm=1.0)]``.
        steps: the steps of a trial, enough to see whether training goes well. None begins with 200
            and triples them while trials are too short to tell and longer ones would end in time.
        seconds: the time for all trials if `steps` is None.
        seeds: the number of seeds, or a list of them.
        progress: called with the steps so far and the most steps there can be, once before the
            first step. None writes the most steps to stderr, and every ten seconds the time left.

    Returns:
        The recommendation, and how sure it is; `print` shows it with a table. Of the limits that
        are not distinguishable from the best it is the largest: the mildest that works. It is never
        a limit that was clearly worse than none in any of up to seven seeds. `reason` says so if
        trials were too short to tell. If `train` returns no loss, the median of the last quarter of
        the losses judges a trial.

    Raises:
        TypeError: arguments of another kind, or a `train` that yields no loss.
        ValueError: a first loss that is NaN or inf; a training that ends before `steps` steps,
            changes no parameter, never calls `clip`, clips a second time, trains the parameters of
            an earlier trial, or begins with other gradients than a trial of the same seed; fewer
            than two limits and rules.
        KeyboardInterrupt: an interrupt before two candidates can be compared. A later one ends the
            search, and the answer is based on the trials so far.
    """
    refuse_tracer()
    chosen, clips = _checked_seeds(seeds), _checked_clips(limits, rules)
    n = _FIRST_STEPS if steps is None else as_count("steps", steps, 4)
    end, spent, found = monotonic() + as_limit("seconds", seconds), 0, None
    training = Training(train)
    while True:
        begun = monotonic()
        try:
            found = _answer(training, *clips, chosen, n, progress)
        except (KeyboardInterrupt, ValueError):
            # After an interrupt, or if train ends early, the shorter trials give the answer.
            if found is None:
                raise
            return found
        spent += found.spent
        found = replace(found, spent=spent)
        is_told = found.is_held_out or found.is_interrupted or not found.is_too_short
        if steps is not None or is_told:
            return found
        now = monotonic()
        # The mean makes all processes decide alike.
        if mean_of_all(end - now - _LONGER * (now - begun), training.device) < 0:
            return found
        n *= _LONGER


def _answer(
    training: Training,
    limits: list[float],
    rules: list[Rule],
    seeds: list[int],
    steps: int,
    progress: Callable[[int, int], None] | None,
) -> Found:
    """Runs the trials of one length and returns their answer."""
    spent = 0

    def run(position: int, clip: Clip) -> Trial:
        return training.run(seeds[position], clip, steps, tick)

    def tick() -> None:
        nonlocal spent
        spent += 1
        show(spent, budget)

    search = _Search(run, limits, rules, len(seeds))
    budget = steps * search.most
    show = progress or _progress_to_stderr(steps)
    show(0, budget)
    with kept_random_states(), torch.enable_grad():
        search.run()
    last = search.last
    clip, best, equals = choose(last)
    found = {
        c: _candidate(c, steps, seeds, trials) for c, trials in {**search.trials, **last}.items()
    }
    too_short = _on_length([trials[0] for trials in search.trials.values()], steps)
    reason = _reason(found[clip], found[best], found[math.inf], last, training.learning_rate)
    reason += too_short
    if search.is_interrupted:
        reason += (
            f" The search was interrupted: this is known from {len(last[best])} of {len(seeds)} "
            f"seeds, and {len(search.trials) - 1} limits and rules."
        )
    return Found(
        max_norm=None if isinstance(clip, Rule) or clip == math.inf else clip,
        clip=clip,
        reason=reason,
        best=found[best],
        equals=tuple(found[c] for c in equals),
        candidates=tuple(
            sorted(
                found.values(), key=lambda one: (isinstance(one.clip, Rule), _mildness(one.clip))
            )
        ),
        spent=spent,
        is_held_out=last[best][0].held_out is not None,
        is_too_short=bool(too_short),
        is_interrupted=search.is_interrupted,
    )


def _progress_to_stderr(steps: int) -> Callable[[int, int], None]:
    """Writes lines rather than a bar, which a file or a pipe would not show."""
    begun = last = monotonic()

    def show(done: int, most: int) -> None:
        nonlocal last
        if not done:
            sys.stderr.write(
                f"find_max_norm: at most {most:,} training steps, {most // steps} times {steps:,}; "
                "Ctrl-C ends it with what is known then\n"
            )
        elif (now := monotonic()) - last >= _EVERY:
            last = now
            left = (now - begun) / done * (most - done)
            time = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
            sys.stderr.write(
                f"find_max_norm: {done:,} of at most {most:,} steps, at most {time} left; "
                "Ctrl-C: an answer now\n"
            )

    return show


def _checked_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        found = [as_count(f"seeds[{i}]", seed, 0) for i, seed in enumerate(seeds)]
        if found and len({*found}) == len(found):
            return found
        raise ValueError(f"seeds must be different numbers, or how many, got {seeds!r:.80}")
    return [*range(as_count("seeds", seeds, 1))]


def _checked_clips(limits: Any, rules: Any) -> tuple[list[float], list[Rule]]:
    """Checks the arguments; returns the limits from large to small, and the rules."""
    is_listed = isinstance(rules, Iterable)
    rules = [*dict.fromkeys(rules)] if is_listed else rules
    if not is_listed or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(
            "rules must be a list of rules, as in rules=[ClipByQuantile(0.9, max_norm=1.0)], got "
            f"{rules!r:.80}"
        )
    if limits is None:
        return [], rules
    if not isinstance(limits, Iterable):
        raise TypeError(
            f"limits must be several numbers, as in limits=(0.3, 1.0, 3.0), got {limits!r:.80}"
        )
    limits = list(limits)
    found = {as_number(f"limits[{i}]", limit) for i, limit in enumerate(limits)}
    if not all(limit > 0 for limit in found):
        raise ValueError(f"limits must be above 0, got {sorted(found)}")
    # Training without a limit is always tried.
    found.discard(math.inf)
    if len(found) + len(rules) < 2:
        raise ValueError(
            "expected two or more limits or rules that differ, inf aside, got "
            f"limits={limits!r:.80}{f', rules={rules!r:.80}' if rules else ''}; the run without a "
            "limit is tried anyway. Pass limits=(0.1, 0.3), in a terminal --limits 0.1 0.3; or "
            "none at all, for those that follow from the norms of your training"
        )
    return sorted(found, reverse=True), rules


def _candidate(clip: Clip, steps: int, seeds: list[int], trials: Trials) -> Candidate:
    norms = torch.cat([trial.norms for trial in trials.values()])
    norms = norms[norms.isfinite()]
    share = scale = math.nan
    if not isinstance(clip, Rule) and len(norms):
        share = float((norms > clip).double().mean())
        scale = float((clip / norms).clamp(max=1.0).median())
    losses = tuple(trial.loss for trial in trials.values())
    return Candidate(clip, steps, tuple(seeds[i] for i in trials), losses, share, scale)


def _reason(
    chosen: Candidate,
    best: Candidate,
    none: Candidate,
    last: dict[Clip, Trials],
    learning_rate: float | None,
) -> str:
    """The verdict in sentences."""
    n = len(chosen.seeds)
    # The medians as the table shows them.
    of = {one.clip: f"{one.quartiles[1]:.4g}" for one in (chosen, best, none)}
    seeds, loss = f"{n} seed{'s' * (n > 1)}", "median loss" if n > 1 else "loss"
    if chosen is none:
        text = f"No limit helps: without one the {loss} is {of[none.clip]} over {seeds}, "
        # Seeds are compared step by step, as for the decision.
        n_lower = sum(more > 0 for more in _excesses(last[none.clip], last[best.clip]))
        lowest = "the lowest on average." if n > 1 else "the lowest."
        text += lowest if best is none else f"and {of[best.clip]} with {best.name}, "
        text += "" if best is none else f"clearly lower in {n_lower}, which may be chance."
    else:
        n_better = sum(a < b for a, b in zip(chosen.losses, none.losses, strict=True))
        n_same = sum(a == b for a, b in zip(chosen.losses, none.losses, strict=True))
        same = f", the same in {n_same}" if n_same else ""
        text = (
            f"Clip by {chosen.name}: the {loss} is {of[chosen.clip]}, and {of[none.clip]} without "
            f"a limit; lower in {n_better} of {seeds}{same}."
        )
        if chosen.quartiles[1] >= none.quartiles[1]:
            means = [f"{_mean(last[one.clip]):.4g}" for one in (chosen, none)]
            text += f" The mean decides: it is {means[0]}, and {means[1]} without a limit."
        if chosen is not best:
            text += (
                f" {best.name} had {of[best.clip]}, no clear difference; of limits that are as "
                "good, and help as clearly, the largest changes the least."
            )
        if chosen.clipped_share >= _NEARLY_ALL:
            scale = f"{chosen.scale:.2g}"
            rate = "" if learning_rate is None else f", here {learning_rate * chosen.scale:.2g},"
            text += (
                f" It is below {chosen.clipped_share:.0%} of the norms, and acts as a smaller step "
                f"of even length: with SGD, {scale} times the learning rate{rate} takes steps of "
                "the same median length. Adam and its kin undo such a factor, and keep the even "
                "lengths."
            )
    if n < 2:
        text += " One seed cannot say how sure this is: pass seeds=3 or more."
    elif len({*none.losses}) == 1 and math.isfinite(none.losses[0]):
        text += (
            " All seeds gave the same losses, so that they say nothing on how sure this is: draw "
            "weights or batches from torch's random numbers."
        )
    return text


def _on_length(trials: list[Trial], steps: int) -> str:
    """A sentence that trials of one seed were too short or too noisy, or "" if they were not."""
    n, first = len(trials), max(steps // _FIRST_PART, min(steps, _FEWEST))
    parts = [trial.losses[:first] for trial in trials]
    n_telling = sum(
        not part.isfinite().all() or abs(fall_of(part)[0] - 0.5) >= FALLS - 0.5 for part in parts
    )
    if n_telling >= _LEAST_TELLING * n:
        return ""
    few = f"only {n_telling}" if n_telling else "none"
    return (
        f" But the trials were too short to tell, or their losses too noisy: in the first {first} "
        f"steps, the loss changed clearly with {few} of {n} candidates, so that those that start "
        f"slowly may have been left out. Ask again with steps={_LONGER * steps}."
    )
