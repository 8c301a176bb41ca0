"""Trials of `find_max_norm`: short runs of the user's training, each with a seed and a limit.

`train(clip)` makes everything anew, so that trials differ only in the seed and the limit.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tritonclip.advice.series import least_equal, n_cut_off
from tritonclip.clipping import clip_
from tritonclip.distributed.domain import mean_of_all
from tritonclip.engine.arguments import as_list
from tritonclip.optim.watches import DELAY_STEPS, sent
from tritonclip.rules import ClipByGlobalNorm, ClipState, Rule

_TRAIN = (
    "expected a generator function train(clip), which makes its model, optimizer and data, calls "
    "clip(model.parameters()) before each optimizer.step() and yields the loss of each step"
)
# The last part of a trial, whose losses judge it.
_JUDGED = 0.25
# Gradients of equal norm count as the same if their largest magnitudes differ by less than this.
_SAME = 1e-3
# Trials begin alike if their first norms differ by less: atomic additions on a GPU vary as much.
_ALIKE = 1e-4


@dataclass(frozen=True)
class Trial:
    """Measurements of a trial, on the CPU.

    Attributes:
        losses: the loss of each step, before its update; they end with the first NaN or inf.
        norms: the norms before clipping, for rules that have one norm for all gradients.
        held_out: the loss that the training returned, or None.
    """

    losses: Tensor
    norms: Tensor
    held_out: float | None

    @property
    def diverged(self) -> bool:
        """Whether the last loss is NaN or inf."""
        return not math.isfinite(float(self.losses[-1]))

    @cached_property
    def ending(self) -> Tensor:
        """The losses that judge the trial: of its last steps or held out; 1-d float64."""
        if self.held_out is None and not self.diverged:
            return self.losses[-max(math.ceil(_JUDGED * len(self.losses)), 1) :]
        loss = math.inf if self.held_out is None else self.held_out
        return torch.tensor([loss if math.isfinite(loss) else math.inf], dtype=torch.float64)

    @cached_property
    def loss(self) -> float:
        """The loss at the end; inf if the trial diverged."""
        return float(self.ending.median())


class Training:
    """The user's `train`, which is called anew for each trial."""

    def __init__(self, train: Any) -> None:
        try:
            inspect.signature(train).bind(None)
            fits = not isinstance(train, Module)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            name = getattr(train, "__name__", type(train).__name__)
            raise TypeError(f"{_TRAIN}; got {name}, which does not take clip alone")
        self._train = train
        # The parameters of the first trial, the first norm of each seed, and SGD's learning rate.
        self._known: list[weakref.ref[Tensor]] = []
        self._first_norms: dict[int, float] = {}
        self.learning_rate: float | None = None
        # The device of the losses.
        self.device = torch.device("cpu")

    def run(self, seed: int, clip: float | Rule, steps: int, tick: Callable[[], None]) -> Trial:
        """Trains from a seed under a limit; the host waits for an accelerator only at the end."""
        _seed_all(seed)
        clipping = _Clipping(clip, self._known)
        try:
            running = self._train(clipping)
            if not isinstance(running, Generator):
                raise TypeError(
                    f"{_TRAIN}: yield loss; got a function that returns {running!r:.40}"
                )
            hook = register_optimizer_step_pre_hook(clipping.on_step)
            with contextlib.closing(running), hook:
                losses, held_out = _run(running, clipping, steps, tick)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in the trial of find_max_norm with limit {clip} and seed {seed}")
            raise
        self.device = losses[0].device
        found = torch.stack(losses).cpu().double()
        if bad := (~found.isfinite()).nonzero().flatten().tolist():
            found, held_out = found[: bad[0] + 1], None
        judged = None if held_out is None else float(mean_of_all(held_out.double(), None))
        trial = Trial(found, _numbers(clipping.norms), judged)
        if not self._known:
            _check_first(trial, clipping)
            self._known = [weakref.ref(p) for p in clipping.parameters if p.requires_grad]
            self.learning_rate = clipping.learning_rate
        if len(trial.norms) and not isinstance(clip, Rule):
            norm = float(trial.norms[0])
            before = self._first_norms.setdefault(seed, norm)
            if math.isfinite(before) and not math.isclose(before, norm, rel_tol=_ALIKE):
                raise ValueError(
                    f"the first gradients of two trials with seed {seed} have the norms "
                    f"{before:.7g} and {norm:.7g}, so that trials differ in more than the limit; "
                    "expected a train that makes everything anew: model, DataLoader, generators, "
                    "and copies of data that a step changes"
                )
        if clip == math.inf:
            _refuse_second_clip(_numbers(clipping.taken))
        return trial


def _check_first(trial: Trial, clipping: _Clipping) -> None:
    """Refuses a training in which no limit could matter."""
    if not math.isfinite(float(trial.losses[0])):
        raise ValueError(
            f"the first loss is {float(trial.losses[0])}, before any update, so that no limit "
            "can help; expected a model and batches with a finite loss: look for NaN or inf in "
            "the batch, or for a loss scale or a dtype that overflows"
        )
    if not clipping.parameters and not trial.diverged:
        raise ValueError(
            f"clip was not called in {len(trial.losses)} steps; expected clip(model.parameters()) "
            "before each optimizer.step()"
        )
    after = [*map(_size_of, clipping.parameters)]
    # If the loss diverged before the first clip, no parameters were seen.
    if after and all(map(torch.equal, clipping.before, after)):
        raise ValueError(
            f"{len(trial.losses)} steps changed no parameter, so that no limit matters; "
            "expected a step that ends with optimizer.step(), over the parameters that clip "
            "got, and a learning rate above 0 from the first steps on"
        )


def _run(
    running: Generator[Any, None, Any], clipping: _Clipping, steps: int, tick: Callable[[], None]
) -> tuple[list[Tensor], Tensor | None]:
    """The losses of a training, up to one that is not finite, and the loss that it returns."""
    losses: list[Tensor] = []
    arriving: deque[Callable[[], int]] = deque()
    clipping.has_begun = True
    try:
        while len(losses) < steps:
            loss = _as_loss(next(running), "yielded", "yield loss")
            # The mean is the same on all processes, so they end a trial at the same step.
            losses.append(torch.as_tensor(mean_of_all(loss, loss.device)))
            tick()
            arriving.append(sent(losses[-1].isfinite()))
            is_late = loss.device.type == "cpu" or len(arriving) > DELAY_STEPS
            if is_late and not arriving.popleft()():
                return losses, None
        clipping.is_over = True
        next(running)
    except StopIteration as end:
        if not losses:
            raise ValueError(f"train yielded no loss; {_TRAIN}") from None
        if len(losses) < steps:
            raise ValueError(
                f"train ended after {len(losses)} of {steps} steps; expected it to go on, over its "
                f"batches again, or steps={max(len(losses), 4)}"
            ) from None
        if end.value is not None:
            return losses, _as_loss(end.value, "returned", "return held_out_loss, or nothing")
    except GeneratorExit:
        # `clip` raised this in the step after the last.
        pass
    return losses, None


class _Clipping:
    """The `clip` that a training gets in one trial."""

    def __init__(self, clip: float | Rule, known: list[weakref.ref[Tensor]]) -> None:
        self._clip, self._known = clip, known
        # Whether the first step was asked for, and whether the last one was taken.
        self.has_begun = self.is_over = False
        self._states: dict[int, ClipState] = {}
        # The parameters of the first call, and their sizes before the first step.
        self.parameters: list[Tensor] = []
        self.before: list[Tensor] = []
        # Norms before clipping; in a trial without a limit, also the norms and largest magnitudes
        # of the gradients that the optimizer gets.
        self.norms: list[Tensor] = []
        self.taken: list[Tensor] = []
        self._last: list[Tensor] = []
        self.learning_rate: float | None = None

    def __call__(self, parameters: Any) -> Tensor | None:
        """Clips by the limit of the trial; returns the norm before clipping."""
        if not self.has_begun:
            raise TypeError("train has no yield; expected yield loss at the end of each step")
        if self.is_over:
            raise GeneratorExit
        items = as_list(parameters)
        tensors = [item[1] if isinstance(item, tuple) else item for item in items]
        if not self.parameters:
            known = {id(p) for ref in self._known if (p := ref()) is not None}
            if any(id(p) in known for p in tensors):
                raise ValueError(
                    "train trains the same parameters as in the trial before, so that it does not "
                    "begin anew; expected a model that train makes, or copy.deepcopy(model)"
                )
            self.parameters, self.before = tensors, [*map(_size_of, tensors)]
        state = self._states.setdefault(id(tensors[0]), ClipState()) if tensors else None
        norm = clip_(items, self._clip, state=state)
        if norm is not None and norm.dim() == 0:
            self.norms.append(norm)
            if self._clip == math.inf:
                self.taken.append(_norm_and_largest(tensors))
                self._last = tensors
        return norm

    def on_step(self, optimizer: Any, *_: Any) -> None:
        """In a trial without a limit, measures the gradients that the optimizer gets."""
        # The last call counts: a ClippedOptimizer clips between its hook and that of the inner one.
        if any(p.grad is not None for p in self._last):
            self.taken[-1] = _norm_and_largest(self._last)
        is_first = isinstance(optimizer, torch.optim.SGD) and self.learning_rate is None
        if is_first and isinstance(rate := optimizer.param_groups[0].get("lr"), float):
            self.learning_rate = rate


def _norm_and_largest(tensors: list[Tensor]) -> Tensor:
    """The global norm and the largest magnitude of gradients, `[2]`."""
    norms = clip_(tensors, math.inf), clip_(tensors, ClipByGlobalNorm(math.inf, math.inf))
    return torch.stack(norms)


def _refuse_second_clip(taken: Tensor) -> None:
    """Refuses norms that are cut off at one value, although the trial has no limit."""
    norms, largest = taken.reshape(-1, 2).T
    usable = norms.isfinite() & (norms > 0)
    norms, largest = norms[usable], largest[usable]
    n = n_cut_off(norms) if len(norms) else 0
    if not n:
        return
    # Equal gradients are no sign of a clip: absolute errors cause them, or a learning rate near 0.
    largest = largest[norms >= least_equal(float(norms.max()))]
    if largest.max() - largest.min() > _SAME * largest.max():
        raise ValueError(
            f"{n} of {len(norms)} updates had gradients of the same norm, {norms.max():.4g}, and "
            "none had a larger one, in a trial without a limit: most likely something clips or "
            "normalizes gradients beside the clip of the trial; expected a step that calls "
            "clip(parameters) alone, without clip_grad_norm_, a ClippedOptimizer or a clipping "
            "option of a trainer. If nothing does, the loss gives all gradients one norm, as a "
            "hinge loss on single inputs of one length does: a limit then only scales the updates, "
            "so choose the learning rate instead"
        )


def _numbers(norms: list[Tensor]) -> Tensor:
    """Norms on the CPU, averaged over processes, which may differ but have to decide alike."""
    found = torch.stack(norms) if norms else torch.zeros(0)
    return torch.as_tensor(mean_of_all(found, found.device)).cpu().double()


def _as_loss(found: Any, did: str, write: str) -> Tensor:
    if isinstance(found, float | int):
        found = torch.tensor(float(found))
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise TypeError(
            f"train {did} {type(found).__name__}{shape}; expected the loss alone, a number or a "
            f"scalar tensor: {write}"
        )
    return found.detach().reshape(())


def _size_of(parameter: Tensor) -> Tensor:
    """A number that changes with the values of a parameter."""
    values = parameter.detach()
    values = getattr(values, "_local_tensor", values)
    dtype = torch.promote_types(values.dtype, torch.float32)
    size: Tensor = torch.linalg.vector_norm(values, dtype=dtype)
    return size


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Restores the random states of torch, Python and NumPy at the end."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    seed, numpy = torch.initial_seed(), sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng([*devices]):
            yield
    finally:
        if not devices:
            # Otherwise CUDA would begin with the seed of the last trial.
            torch.cuda.manual_seed_all(seed)
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])
