"""Trials for `find_max_norm`: short trainings of the user's from one start, under other limits.

A trial begins with the same weights, random state and batches as every other of its seed. Once all
are done, everything is as it was before the first.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import operator
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tritonclip.advice.series import least_equal, n_cut_off
from tritonclip.clipping import clip_
from tritonclip.distributed.process_groups import mean_of_all
from tritonclip.engine.arguments import as_list
from tritonclip.optim.clipped_optimizer import ClippedOptimizer
from tritonclip.optim.watches import DELAY_STEPS, sent
from tritonclip.rules import ClipByGlobalNorm, ClipState, Rule

_MAKE = (
    "expected a function that gives (model, optimizer), or a step function step(batch, clip) that "
    "returns the loss; beside held_out, (step, evaluate) with evaluate(batch)"
)
# Held-out batches of unknown number are kept up to so many; more may be endless.
_MOST_HELD_OUT = 1000
# Unlike seeds of trials: a function may draw the batches of training too.
_HELD_OUT_SEED = 0x5EED0
# Gradients of one norm are the same if their largest magnitudes differ by less.
_SAME = 1e-3


@dataclass(frozen=True)
class Trial:
    """Measurements of a trial, on the CPU.

    Attributes:
        losses: of its steps, before each update; they end with the first that is NaN or inf.
        norms: before clipping, of the rules that have one for all gradients.
        held_out: the loss on held-out batches at the end; None without any.
    """

    losses: Tensor
    norms: Tensor
    held_out: float | None

    @property
    def diverged(self) -> bool:
        """Whether the last loss is NaN or inf."""
        return not math.isfinite(float(self.losses[-1]))


class _Seen(BaseException):
    """Ends a step once its parameters are known; no `except Exception` stops it."""


class Training:
    """The user's training, begun anew for each trial; arguments as for `find_max_norm`."""

    def __init__(self, make: Any, batches: Any, loss: Any, held_out: Any) -> None:
        if not callable(make) or isinstance(make, Module):
            raise TypeError(f"make: {_MAKE}; got {type(make).__name__}")
        if str(getattr(loss, "__module__", None)).startswith("torch.nn."):
            name = getattr(loss, "__name__", type(loss).__name__)
            raise TypeError(
                f"expected a function loss(model, batch), got {name} of torch, which takes an "
                "output and a target; write loss=lambda model, batch: "
                "criterion(model(batch[0]), batch[1])"
            )
        self._make, self._batches, self._loss = make, batches, loss
        self._evaluate: Callable[[Any, Any], Any] = self._loss_of
        # Of an iterator, which gives each batch once.
        self._kept: list[Any] = []
        # Of a DataLoader.
        owners = (batches, getattr(batches, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        self._generators = [item for item in found if isinstance(item, torch.Generator)]
        self._start: _Start | None = None
        self._known: list[weakref.ref[Tensor]] = []
        self._has_run = False
        self.optimizer: Optimizer | None = None
        self._held_out: list[Any] | None = None
        if held_out is not None:
            with self.untouched():
                _seed_all(_HELD_OUT_SEED)
                self._held_out = _held_out_batches(held_out)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Puts random states, and objects that `make` gives again, back as they were."""
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        seed = torch.initial_seed()
        numpy: Any = sys.modules.get("numpy")
        before = random.getstate(), numpy and numpy.random.get_state()
        states = [(generator, generator.get_state()) for generator in self._generators]
        try:
            with torch.random.fork_rng([*devices]), torch.enable_grad():
                yield
        finally:
            if not devices:
                # CUDA would have begun with the seed of the CPU.
                torch.cuda.manual_seed_all(seed)
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])
            for generator, state in states:
                generator.set_state(state)
            if self._start is not None:
                self._start.end()

    def begin(self, seed: int, most: int) -> None:
        """Makes a training, to know its objects; a step function clips within `most` steps."""
        step, model, self.optimizer = self._made(seed)
        if model is not None:
            self._known = [weakref.ref(p) for p in _tensors_of(model, self.optimizer)]
            return
        clipping = _Clipping(math.inf, only_looks=True)
        try:
            for batch in self._stream(seed, 0, most):
                step(batch, clipping)
        except _Seen:
            self._known = [weakref.ref(p) for p in clipping.parameters]
            return
        raise ValueError(
            f"clip was not called in {most} steps; expected a step function that calls "
            "clip(parameters) after backward, where clip_grad_norm_ would stand"
        )

    def run(
        self, seed: int, turn: float, clip: float | Rule, steps: int, tick: Callable[[], None]
    ) -> Trial:
        """Trains from a seed under a limit or a rule; the host waits for an accelerator at the end.

        `turn` is the share of a list of batches at which it begins, so that seeds differ.
        """
        step, model, optimizer = self._made(seed)
        if model is not None and self._is_known(_tensors_of(model, optimizer)):
            if self._start is None:
                self._start = _Start(model, optimizer)
            self._start.restore(optimizer)
        clipping = _Clipping(clip, self._is_known if model is None else lambda parameters: False)
        losses: list[Tensor] = []
        arriving: deque[Callable[[], int]] = deque()
        with clipping.watching():
            for batch in self._stream(seed, turn, steps):
                loss = _as_loss(step(batch, clipping)).detach()
                # The same on all processes: they end a trial at one step.
                losses.append(torch.as_tensor(mean_of_all(loss, loss.device)))
                tick()
                arriving.append(sent(losses[-1].isfinite()))
                is_late = loss.device.type == "cpu" or len(arriving) > DELAY_STEPS
                if is_late and not arriving.popleft()():
                    break
        trial = self._measured(losses, clipping, model)
        if not self._has_run:
            self._check_first(trial, clipping)
            self._has_run = True
        if clip == math.inf:
            _refuse_second_clip(_numbers(clipping.taken))
        return trial

    def _measured(self, losses: list[Tensor], clipping: _Clipping, model: Any) -> Trial:
        found = torch.stack(losses).cpu().double()
        if bad := (~found.isfinite()).nonzero().flatten().tolist():
            found = found[: bad[0] + 1]
        held_out = None
        if self._held_out is not None and not bad:
            with torch.no_grad():
                if model is not None:
                    model.eval()
                each = [_as_loss(self._evaluate(model, batch)) for batch in self._held_out]
                mean = torch.stack([loss.double() for loss in each]).mean()
                held_out = float(mean_of_all(mean, None))
        return Trial(found, _numbers(clipping.norms), held_out)

    def _check_first(self, trial: Trial, clipping: _Clipping) -> None:
        """Refuses a training in which no limit could matter."""
        if not math.isfinite(float(trial.losses[0])):
            raise ValueError(
                f"the first loss is {float(trial.losses[0])}, before any update, so that no limit "
                "can help; expected a model and batches with a finite loss: look for NaN or inf in "
                "the batch, or for a loss scale or a dtype that overflows"
            )
        after = [*map(_size_of, clipping.parameters)]
        # None were seen where the loss diverged before the first clip.
        if after and all(map(torch.equal, clipping.before, after)):
            raise ValueError(
                f"{len(trial.losses)} steps changed no parameter, so that no limit matters; "
                "expected a step that ends with optimizer.step(), over the parameters that clip "
                "got, and a learning rate above 0 from the first steps on"
            )

    def _made(self, seed: int) -> tuple[Callable[[Any, Any], Any], Any, Any]:
        """A step function; with its model and optimizer, where they are known."""
        _seed_all(seed)
        found = self._make()
        items: tuple[Any, ...] = found if isinstance(found, tuple) else (found,)
        first, second = (*items, None, None)[:2] if len(items) < 3 else (None, None)
        self._evaluate = self._loss_of
        if isinstance(second, ClippedOptimizer):
            raise TypeError(
                "make gave a ClippedOptimizer, which clips by itself; expected the optimizer that "
                "it wraps, since each trial clips by another limit"
            )
        if isinstance(second, Optimizer) and isinstance(first, Module):
            return self._step_of(first, second), first, second
        if isinstance(first, Module) or not all(map(callable, (first, second or first))):
            got = ", ".join(type(item).__name__ for item in items)
            raise TypeError(f"make: {_MAKE}; got {got}")
        if self._loss is not None:
            raise TypeError(
                "loss= is for a model and its optimizer, and make gave a step function, which "
                "returns the loss itself; leave loss= out, and for held_out give (step, evaluate)"
            )
        if self._held_out is not None:
            if second is None:
                raise TypeError(
                    "held_out needs a loss, and make gave a step function alone; expected "
                    "(step, evaluate), where evaluate(batch) returns the loss on a batch"
                )
            self._evaluate = lambda model, batch: second(batch)
        return first, None, None

    def _step_of(self, model: Module, optimizer: Optimizer) -> Callable[[Any, Any], Any]:
        """The usual step of a model and an optimizer."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        closures = inspect.signature(optimizer.step).parameters.get("closure")
        # As LBFGS does, which evaluates it several times and returns the first loss.
        needs_closure = closures is not None and closures.default is inspect.Parameter.empty

        def step(batch: Any, clip: Any) -> Any:
            def closure() -> Any:
                optimizer.zero_grad()
                loss = self._loss_of(model, batch)
                loss.backward()
                clip(parameters)
                return loss

            if needs_closure:
                return optimizer.step(closure)
            loss = closure()
            optimizer.step()
            return loss

        return step

    def _loss_of(self, model: Module, batch: Any) -> Tensor:
        if self._loss is not None:
            return _as_loss(self._loss(model, batch))
        try:
            if isinstance(batch, Mapping):
                found = model(**batch)
            else:
                found = model(*batch) if isinstance(batch, list | tuple) else model(batch)
        except TypeError as error:
            if "forward()" not in str(error):
                raise
            raise TypeError(
                f"without a loss, the model is called with the whole batch, which failed: {error}; "
                "pass loss=lambda model, batch: ..., in a terminal --loss mymodule:loss"
            ) from error
        found = found["loss"] if isinstance(found, Mapping) else getattr(found, "loss", found)
        return _as_loss(found)

    def _is_known(self, parameters: Iterable[Tensor]) -> bool:
        """Whether one of these was made before."""
        known = {id(p) for ref in self._known if (p := ref()) is not None}
        return any(id(p) in known for p in parameters)

    def _stream(self, seed: int, turn: float, steps: int) -> Iterator[Any]:
        """The batches of a trial, from the start again where they end."""
        _seed_all(seed)
        source = self._batches
        for generator in self._generators:
            generator.manual_seed(seed)
        if isinstance(source, Iterator):
            yield from self._once(source, steps)
            return
        n = n_before = 0
        if isinstance(source, Sequence) and source:
            # Of a list the order is kept, as of a curriculum.
            start = int(turn * len(source))
            source = [*source[start:], *source[:start]]
        while n < steps:
            for batch in _iterable("batches", source):
                yield batch
                n += 1
                if n == steps:
                    return
            if n == n_before:
                raise ValueError(
                    f"batches ran out after {n} of {steps} steps, and gave none when they were "
                    "iterated again; expected a list, a DataLoader, or a function that gives new "
                    "ones at each call"
                )
            n_before = n

    def _once(self, source: Iterator[Any], steps: int) -> Iterator[Any]:
        """Batches of an iterator, which are kept for later trials."""
        for i in range(steps):
            if i == len(self._kept):
                try:
                    self._kept.append(next(source))
                except StopIteration:
                    raise ValueError(
                        f"batches ran out after {i} of {steps} steps: an iterator gives each "
                        "batch once; expected a list or a DataLoader, which is iterated again, a "
                        f"function that gives new batches, or steps={max(i, 1)}"
                    ) from None
            yield self._kept[i]


class _Clipping:
    """`clip` as a step gets it, for one trial; with `only_looks` it ends the first step."""

    def __init__(
        self,
        clip: float | Rule,
        is_known: Callable[[Iterable[Tensor]], bool] = lambda parameters: False,
        *,
        only_looks: bool = False,
    ) -> None:
        self._clip, self._is_known, self._only_looks = clip, is_known, only_looks
        self._has_state = isinstance(clip, Rule) and not clip.fixed
        self._states: dict[int, ClipState] = {}
        self.parameters: list[Tensor] = []
        # Of the parameters, before the first step.
        self.before: list[Tensor] = []
        # Norms before clipping; and, without a limit, norms and largest magnitudes as an optimizer
        # takes the gradients.
        self.norms: list[Tensor] = []
        self.taken: list[Tensor] = []
        self._last: list[Tensor] = []

    def __call__(self, parameters: Any) -> Tensor | None:
        """Clips by the limit of the trial; returns the norm before clipping."""
        items = as_list(parameters)
        tensors = [item[1] if isinstance(item, tuple) else item for item in items]
        if not self.parameters:
            if self._is_known(tensors):
                raise ValueError(
                    "make gave a step function that trains the same parameters again; expected "
                    "new ones at each call, as of a model that make builds, or of "
                    "copy.deepcopy(model). No step was taken"
                )
            self.parameters, self.before = tensors, [*map(_size_of, tensors)]
        if self._only_looks:
            raise _Seen
        state = None
        if self._has_state and tensors:
            state = self._states.setdefault(id(tensors[0]), ClipState())
        norm = clip_(items, self._clip, state=state)
        if norm is not None and norm.dim() == 0:
            self.norms.append(norm)
            if self._clip == math.inf:
                self.taken.append(_norm_and_largest(tensors))
                self._last = tensors
        return norm

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Without a limit, measures gradients once more when an optimizer takes them."""
        if self._clip != math.inf:
            yield
            return
        hook = register_optimizer_step_pre_hook(self._measure)
        try:
            yield
        finally:
            hook.remove()

    def _measure(self, *_: Any) -> None:
        # The last hook counts, since a ClippedOptimizer clips between its own and the one inside.
        if any(p.grad is not None for p in self._last):
            self.taken[-1] = _norm_and_largest(self._last)


class _Start:
    """The state of a model and an optimizer that `make` gives again and again."""

    def __init__(self, model: Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        tensors = [*_tensors_of(model, optimizer), *model.buffers()]
        self._values = [(x, x.detach().clone()) for x in tensors]
        self._grads = [(x, x.grad, None if x.grad is None else x.grad.clone()) for x in tensors]
        self._modes = [(module, module.training) for module in model.modules()]
        # The tensors themselves come back: trials get copies.
        self._state = dict(optimizer.state)
        self._groups = [dict(group) for group in optimizer.param_groups]

    def restore(self, optimizer: Optimizer) -> None:
        """Begins a trial, maybe with a new optimizer."""
        self._restore_model()
        for x, _, _ in self._grads:
            x.grad = None
        if optimizer is self._optimizer:
            self._restore_optimizer(copy.deepcopy)

    def end(self) -> None:
        """Ends the last trial."""
        self._restore_model()
        for x, grad, values in self._grads:
            if grad is not None and values is not None:
                grad.copy_(values)
            x.grad = grad
        self._restore_optimizer(lambda value: value)

    @torch.no_grad()
    def _restore_model(self) -> None:
        for x, values in self._values:
            x.copy_(values)
        for module, mode in self._modes:
            module.training = mode

    def _restore_optimizer(self, taken: Callable[[Any], Any]) -> None:
        self._optimizer.state.clear()
        for parameter, state in self._state.items():
            self._optimizer.state[parameter] = taken(state)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update({k: v if k == "params" else taken(v) for k, v in before.items()})


def _tensors_of(model: Module, optimizer: Optimizer | None) -> list[Tensor]:
    """The parameters of a model and of its optimizer, each once."""
    groups = [] if optimizer is None else optimizer.param_groups
    trained = [p for group in groups for p in group["params"]]
    return [*{id(p): p for p in [*model.parameters(), *trained]}.values()]


def _iterable(name: str, batches: Any) -> Iterable[Any]:
    """An iterable of batches, or what a function gives."""
    given = batches if isinstance(batches, Iterable) or not callable(batches) else batches()
    if not isinstance(given, Iterable):
        raise TypeError(
            f"{name} must be an iterable of batches, such as a DataLoader, or a function that "
            f"gives one, got {type(given).__name__}"
        )
    return given


def _held_out_batches(held_out: Any) -> list[Any]:
    """All of them."""
    given = _iterable("held_out", held_out)
    most = max(operator.length_hint(given), _MOST_HELD_OUT)
    found = [*itertools.islice(given, most + 1)]
    if len(found) > most:
        raise ValueError(
            f"expected held_out batches that end, got more than {most:,}; pass a list, such as "
            "held_out = list(itertools.islice(batches(), 20))"
        )
    if not found:
        raise ValueError("held_out has no batches; expected one or more, or None")
    return found


def _norm_and_largest(tensors: list[Tensor]) -> Tensor:
    """Global norm and largest magnitude of gradients."""
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
    # One gradient again, as of absolute errors, or while the learning rate is nearly 0, is no sign.
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
    """Norms on the CPU, of all processes: those that train apart differ, and decisions must not."""
    found = torch.stack(norms) if norms else torch.zeros(0)
    return torch.as_tensor(mean_of_all(found, found.device)).cpu().double()


def _as_loss(found: Any) -> Tensor:
    if isinstance(found, float | int):
        found = torch.tensor(float(found))
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise TypeError(
            f"the loss must be a number or a scalar tensor, got {type(found).__name__}{shape}; "
            "expected a step function that returns it, a model whose output is the loss or has "
            "it as .loss, or loss=lambda model, batch: ..."
        )
    return found.reshape(())


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
