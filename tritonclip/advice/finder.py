"""`find_max_norm`: the limit with which the user's own training goes best, found by trying.

Every limit trains for the full length with one seed, and the better ones with more seeds: short
trials would leave out limits that start slowly and end lower. No limit is always among them, up to
the end.
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
from tritonclip.distributed.process_groups import mean_of_all
from tritonclip.messages import in_columns
from tritonclip.modes import outside_inference, refuse_tracer
from tritonclip.rules import Rule
from tritonclip.rules.arguments import as_count, as_limit, as_number

Clip = float | Rule
# Of a candidate, by position of the seed.
Trials = dict[int, Trial]

# The constants were chosen on small trainings, by the regret of the limit that was found:
# docs/decisions.md.
# Limits of the grid: so many, from this multiple of the usual norm down, each lower by this ratio.
# At most so many are added where the first norm is not the usual one, and so many while the lowest
# limit is the best.
_N_LIMITS, _TOP, _RATIO, _N_MORE = 7, 3.0, 10**0.5, 4
# First norms that set the grid.
_FIRST_NORMS = 20
# How many limits and rules are tried with the second seed, and with each other one.
_KEPT = 5, 4
# Losses within so many standard errors of the lowest are not distinguishable from it.
_ERRORS = 1.0
# A gain over no limit that is less than this share of the loss is none; and the share of a gain
# that a milder limit may give up.
_NO_GAIN, _GIVEN_UP = 0.002, 0.1
# Noise lowers the losses of three seeds of three with this probability; so many may be higher.
_CHANCE = 1 / 8
# A limit that clips this share of the steps acts as a smaller step.
_NEARLY_ALL = 0.9
# Trials are short if the first part, of at least ten steps, says something with fewer of them;
# trials so many times as long are advised.
_FIRST_PART, _FEWEST, _LEAST_TELLING, _LONGER = 6, 10, 0.5, 3
# Steps of the first trials where the user leaves their length open.
_FIRST_STEPS = 200
# Seconds from one line about progress to the next.
_EVERY = 10.0


@dataclass(frozen=True)
class Candidate:
    """A limit or a rule that was tried.

    Attributes:
        clip: the limit, inf for none; or the rule.
        steps: of each trial.
        seeds: with which it was tried.
        losses: of these seeds, at the end of a trial; inf where it diverged.
        clipped_share: the share of their norms above the limit; NaN for a rule.
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
        """Of the losses over seeds."""
        losses = torch.tensor(self.losses, dtype=torch.float64, device="cpu")
        # Nothing lies between a number and inf.
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
        clip: to pass to :func:`clip_` and :class:`ClippedOptimizer`: `max_norm`, the rule that is
            better than every limit, or inf where no limit helps.
        reason: the verdict in sentences.
        best: the candidate with the lowest loss.
        equals: the candidates that are not distinguishable from the best, itself included.
        candidates: all, from small to large limits; then no limit, and rules.
        spent: training steps that were taken.
        is_held_out: whether losses are those of held-out batches.
        is_too_short: whether trials were too short, or too noisy, to tell.
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
        # Losses of some seeds are not comparable with those of all.
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
    """Which trials to `run`, by position of the seed; no `limits`: a grid from the first norms."""

    def __init__(
        self,
        run: Callable[[int, Clip], Trial],
        limits: Sequence[float],
        rules: Sequence[Rule],
        n_seeds: int,
    ) -> None:
        self._run, self._limits, self._rules = run, limits, rules
        # Of each further seed.
        self._kept = (_KEPT[:1] + _KEPT[1:] * n_seeds)[: n_seeds - 1]
        n_first = len(rules) + (len(limits) or _N_LIMITS + 2 * _N_MORE + 2)
        # The most trials that the search takes, those without a limit among them.
        self.most = n_seeds + n_first + sum(min(n, n_first) for n in self._kept)
        self.trials: dict[Clip, Trials] = {}
        self.is_interrupted = False

    def run(self) -> None:
        """Runs all trials; an interrupt ends them once candidates can be compared."""
        try:
            self._try(0, [])
            limits = self._limits or self._grid()
            # One by one, the likely ones first: an interrupt keeps those before.
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
        """The candidates with most seeds, beside no limit, and their trials of the same seeds."""
        n = sorted(map(len, self.trials.values()))[-2:][0]
        return {
            clip: dict([*trials.items()][:n])
            for clip, trials in self.trials.items()
            if len(trials) >= n
        }

    def _try(self, position: int, clips: Sequence[Clip]) -> None:
        """Runs trials of a seed, beside no limit; keeps all of them, or none."""
        none = self.trials.get(math.inf, {}).get(position) or self._run(position, math.inf)
        found: dict[Clip, Trial] = {math.inf: none}
        # A limit above all norms changes nothing.
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
        # Where nothing is clipped, norms may explode after the first.
        first, median = float(norms[0]), float(norms.median())
        n_more = round(abs(math.log(median / first, _RATIO)))
        lowest = _TOP * min(first, median) / _RATIO ** (_N_LIMITS - 1)
        n = _N_LIMITS + min(n_more, _N_MORE)
        return [two_digits(lowest * _RATIO**i) for i in reversed(range(n))]

    def _add(self) -> None:
        """Adds lower limits while the lowest is the best, and then those halfway to the next."""
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
        """The best so far beside no limit; those that changed nothing come last."""
        last = self.last
        none = last.pop(math.inf)
        above = _above(last)
        return sorted(last, key=lambda clip: (last[clip][0] is none[0], above[clip]))[:n]


def _mean(trials: Trials) -> float:
    return statistics.fmean(trial.loss for trial in trials.values())


def _excesses(trials: Trials, others: Trials) -> list[float]:
    """How much higher losses are than others of the same seed, as shares from -1 to 1.

    Step by step, because trials of a seed have the same batches; and as shares, because among
    losses that explode those of one seed would drown those of all others.
    """
    return [_share(trials[i].ending, others[i].ending) for i in trials]


def _above(last: dict[Clip, Trials]) -> dict[Clip, float]:
    """How much higher the losses of each candidate are than those of all, on average."""
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
    """The clip to recommend, the best, and those that are not distinguishable from the best.

    By the rule of one standard error (Breiman et al. 1984): of those within it that help and give
    up little of the gain, the simplest. No limit is simpler than any, and a large limit than a
    small one, which is simpler than a rule.
    """
    mean = {clip: _mean(trials) for clip, trials in last.items()}
    above = _above(last)
    # Of equal ones, the mildest: a limit above every norm changes nothing.
    best = min(last, key=lambda clip: (above[clip], -_mildness(clip)))
    equals = [best]
    for clip, trials in last.items():
        more = _excesses(trials, last[best])
        error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
        # A limit under which one seed diverges is not as good as one under which none does.
        is_close = statistics.fmean(more) <= _ERRORS * error and mean[clip] - mean[best] < math.inf
        if clip != best and is_close:
            equals.append(clip)
    clear = [clip for clip in equals if clip != math.inf and _helps(last[clip], last[math.inf])]
    if math.inf in equals or not clear:
        return math.inf, best, [*dict.fromkeys([*equals, math.inf])]
    lowest = min(map(mean.__getitem__, clear))
    # Without a limit the loss may explode; then the gain is that over no training.
    start = statistics.fmean(float(trial.losses[0]) for trial in last[best].values())
    most = lowest + _GIVEN_UP * max(min(mean[math.inf], start) - lowest, 0.0)
    return max((c for c in clear if mean[c] <= most), key=_mildness), best, equals


def _helps(trials: Trials, none: Trials) -> bool:
    """Whether losses are lower than without a limit in nearly all seeds, as no chance is."""
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
    """Tries limits on your own training, and says with which it goes best.

    Each trial is a short training, which begins with the same random numbers as all others of its
    seed, and differs in its limit. All limits train with the first seed, those in the middle first,
    and then two beside the best; the best five train with the second seed, and the best four with
    each other one. No limit is always among them. Trials of a seed are compared step by step. One
    whose loss is NaN or inf ends there, and one whose limit is above every norm is not run. With
    three seeds they are 18 to 22 trials, 29 at most, and fewer where trials diverge.

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

    Random states of torch, Python and NumPy are afterwards as they were, also where the call raises
    or is interrupted. Within a process group, all processes call this with the same arguments and
    get one answer: losses are averaged.

    Args:
        train: a generator function, called for each trial after torch, `random` and NumPy were
            seeded. It makes its model, optimizer and data, calls `clip(parameters)` in each step
            where `clip_grad_norm_` would stand, and yields the loss of the step, a number or a
            scalar tensor. `clip` takes the parameters of :func:`clip_` and returns the norm before
            clipping. After `steps` losses the generator is closed, unless it ends there by itself
            and returns a loss, such as that of held-out data: this one judges the trial then.
        limits: to try; None for those around the median of the first norms.
        rules: that compete with limits, such as ``[ClipByQuantile(0.9, max_norm=1.0)]``.
        steps: of a trial: enough to see whether training goes well. None: 200, and three times as
            many again and again, while trials are too short to tell and those would end in time.
        seconds: for all trials, where `steps` is None.
        seeds: how many, or a list.
        progress: called with the steps so far and the most there will be, first before any step.
            None: the most there will be are written to stderr, and every ten seconds what is left.

    Returns:
        The recommendation, and how sure it is; `print` shows it with a table. It is the largest of
        the limits that are not distinguishable from the best: the mildest that works. It is never a
        limit that was clearly worse than none in any of up to seven seeds. `reason` says where
        trials were too short to tell. Without a loss that `train` returns, the median of the last
        quarter of the losses judges a trial.

    Raises:
        TypeError: arguments of another kind, or a `train` that yields no loss.
        ValueError: a first loss that is NaN or inf; a training that ends before `steps` steps,
            changes no parameter, never calls `clip`, clips once more, trains the parameters of the
            trial before, or begins with other gradients than a trial of the same seed; fewer than
            two limits and rules.
        KeyboardInterrupt: an interrupt before any two candidates can be compared; a later one ends
            the search, and the answer is what is known by then.
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
            # Of an interrupt, or of a train that ends: that of shorter trials is an answer too.
            if found is None:
                raise
            return found
        spent += found.spent
        found = replace(found, spent=spent)
        is_told = found.is_held_out or found.is_interrupted or not found.is_too_short
        if steps is not None or is_told:
            return found
        now = monotonic()
        # The same on all processes.
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
    """The answer of trials of one length."""
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
    """Limits from large to small, and rules."""
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
    # No limit is always tried.
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
    # Those of the table.
    of = {one.clip: f"{one.quartiles[1]:.4g}" for one in (chosen, best, none)}
    seeds, loss = f"{n} seed{'s' * (n > 1)}", "median loss" if n > 1 else "loss"
    if chosen is none:
        text = f"No limit helps: without one the {loss} is {of[none.clip]} over {seeds}, "
        # Step by step, as it was decided.
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
    """A sentence on trials of one seed in whose first part nothing happens; "" for others."""
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
