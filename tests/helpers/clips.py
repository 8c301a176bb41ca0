"""Random calls on random gradient lists, each checked by one plain reference.

They are drawn from a `random.Random`, which may be one of hypothesis. A clip whose limit is a
number is compared bit for bit with the formula, from the norm that the call measured. The limits of
other rules are those of NumPy in float64, and equal to a tolerance.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from helpers import reference, units
from helpers.arena import Arena, FusedArena, OptimizerArena, TensorsArena, TorchArena, TwoCallsArena
from helpers.cases import INTERPRETED, SIZES, assert_bits, assert_norm
from helpers.memories import (
    ADAPTIVE,
    assert_near,
    assert_remembers,
    coefficient,
    random_skip_bound,
    remembered,
)
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByRMS,
    ClipByUnitNorm,
    ClipByValue,
    ClipState,
    Outlier,
)

NORM_TYPES = (2.0, 2.0, 2.0, 1.0, 1.5, 3.0, 20.0, torch.inf)
# Of elements whose squares overflow, vanish or lose digits in a dtype.
MAGNITUDES = {
    torch.float16: (0.0, 6e-8, 1e-5, 1e4),
    # No subnormal numbers, which Triton's interpreter misreads in bfloat16.
    torch.bfloat16: (0.0, 1e-30, 1e20, 1e30),
    torch.float32: (0.0, 1e-40, 1e-30, 1e-25, 1e20, 1e30),
    torch.float64: (0.0, 1e-310, 1e-200, 1e30, 1e200),
}
# At the edges of what loops in C and kernels read in one piece.
EDGES = (63, 64, 65, 127, 128, 129, *SIZES)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CHOICES = st.randoms(use_true_random=False)
# Ways to clip; `clip_` has the most options.
ARENAS = (Arena, Arena, TensorsArena, TorchArena, TwoCallsArena, OptimizerArena, FusedArena)
# The number of elements, or the shape.
Sizes = list[int | tuple[int, ...]]


@dataclasses.dataclass
class Clip:
    """A rule with its options, for one arena."""

    rule: Any
    nonfinite: str = "propagate"
    grad_scale: float | None = None
    limits: Callable[[Any], Any] | None = None  # Of an adaptive rule, by the reference.
    state: ClipState | None = None  # Of an adaptive rule outside of an optimizer.
    spoils: bool = False  # Writes NaN or inf into some gradients before some calls.
    is_extreme: bool = False  # Some elements are huge, tiny or 0.
    # The norms that were remembered before the last call.
    before: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)

    def clip(self, arena: Arena, choice: random.Random) -> None:
        """Clips new values, and checks the call."""
        self.fill(arena, choice)
        self.check(arena, *self.call(arena))

    def fill(self, arena: Arena, choice: random.Random) -> None:
        """Other values, of another size, some of them NaN or inf."""
        arena.fill(10 ** choice.uniform(-1, 1))
        drawn = random.Random(choice.randrange(2**32))
        for grad in arena.grads if self.is_extreme else ():
            some = grad[drawn.choice([slice(None), slice(0, None, 7), slice(0, 1)])]
            some.mul_(drawn.choice(MAGNITUDES[grad.dtype.to_real()]))
            # Clamping may turn a -0.0 into a bound of 0.0, or not.
            grad.add_(0.0)
        # NumPy multiplies complex numbers by real ones as if these were complex: inf gives NaN.
        grads = [grad for grad in arena.grads if grad.numel() and not grad.is_complex()]
        if self.spoils and grads and choice.random() < 0.5:
            for _ in range(choice.randint(1, 3)):
                grad = choice.choice(grads)
                at = tuple(choice.randrange(n) for n in grad.shape)
                grad[at] = choice.choice([math.nan, math.inf, -math.inf])
        arena.before = arena.memory.cpu().clone()

    def call(self, arena: Arena) -> tuple[Tensor | None, str]:
        """What the call measured, and the message of its error."""
        options: dict[str, Any] = {}
        if self.nonfinite != "propagate":
            options["nonfinite"] = self.nonfinite
        if self.grad_scale is not None:
            options["grad_scale"] = self.grad_scale
        if self.state is not None:
            options["state"] = self.state
        self.before = remembered(arena, self.state)
        try:
            return arena.call(self.rule, **options), ""
        except RuntimeError as error:
            return None, str(error)

    def check(self, arena: Arena, measured: Tensor | None, error: str) -> None:
        """Norms, gradients, every byte beside them, and parameters."""
        memory, images = arena.images()
        norms = self._norms(images)
        fate = self._fate(arena, images, norms)
        assert bool(error) == (fate == "refused"), error
        self._check_memory(arena, fate)
        if fate == "clipped":
            self._check_norms(arena, norms, measured)
            self._check_grads(arena, images, norms, measured)
        elif fate == "zeroed":
            self._check_norms(arena, norms, measured)
            self._limits(images, norms)
            # The negative of a 0 is -0.0.
            assert not any(grad.count_nonzero() for grad in arena.grads)
        if fate != "refused":
            # Compared above; a step that is left out may have written to gradients.
            for image, grad in zip(images, arena.grads, strict=True):
                image.copy_(grad)
        assert torch.equal(arena.memory.cpu(), memory)
        if fate != "clipped" or all(bool(grad.isfinite().all()) for grad in arena.grads):
            assert_bits(arena.params, arena.weights)
        arena.restore()

    def _fate(self, arena: Arena, images: Sequence[Tensor], norms: Sequence[float]) -> str:
        """What a call does to gradients.

        "clipped", "zeroed", "refused", "left out", or "above" the largest norm that is taken.
        """
        bad_elements = not all(bool(image.isfinite().all()) for image in images)
        bad = bad_elements if isinstance(self.rule, ClipByValue) else not np.isfinite(norms).all()
        if isinstance(arena, OptimizerArena):
            if self.grad_scale is not None and (bad or bad_elements):
                return "left out"
            if arena.takes is not None:
                whole = reference.total_norm(images) / (self.grad_scale or 1.0)
                if whole > arena.takes(whole):
                    return "above"
            if self.nonfinite in ("skip", "error"):
                bad = bad or bad_elements
        if not bad or self.nonfinite == "propagate":
            return "clipped"
        return {"zero": "zeroed", "error": "refused", "skip": "left out"}[self.nonfinite]

    def _check_memory(self, arena: Arena, fate: str) -> None:
        """No norm enters of a call that is left out; of outliers, those skipped enter too."""
        after = remembered(arena, self.state)
        if self.limits is None or fate not in ("clipped", "zeroed"):
            assert_remembers(self.rule, self.before.get("rule"), after.get("rule"))
        if isinstance(arena, OptimizerArena) and fate in ("refused", "left out"):
            bound = arena.optimizer.skip_above
            if isinstance(bound, Outlier):
                assert_remembers(bound, self.before.get("outliers"), after.get("outliers"))

    def _norms(self, images: Sequence[Tensor]) -> list[float]:
        """The norms that the rule measures, one for a global norm."""
        if isinstance(self.rule, ClipByValue):
            return []
        p = self.rule.norm_type
        found = reference.norms(images, p)
        if not self.rule.per_gradient:
            found = [reference.total_norm(images, p)]
        # A number of elements has no scale.
        return [norm if p == 0 else norm / (self.grad_scale or 1.0) for norm in found]

    def _check_norms(self, arena: Arena, norms: list[float], measured: Tensor | None) -> None:
        if not norms:
            return
        assert measured is not None
        dtypes = {grad.dtype.to_real() for grad in arena.grads}
        if not isinstance(arena, OptimizerArena):
            wide = torch.float64 if torch.float64 in dtypes else torch.float32
            assert (measured.dtype, measured.device) == (wide, arena.memory.device)
            assert not measured.requires_grad
        is_mixed = len({grad.dtype for grad in arena.grads}) > 1
        expected: float | list[float] = norms
        if measured.dim() == 0:
            # The statistics of an optimizer have the largest one.
            expected = float(np.max(norms, initial=0.0))
        assert_norm(measured, expected, is_mixed=is_mixed)

    def _check_grads(
        self,
        arena: Arena,
        images: Sequence[Tensor],
        norms: Sequence[float],
        measured: Tensor | None,
    ) -> None:
        """Bit for bit where the call gave the very norms that the formula needs."""
        rule, in_optimizer = self.rule, isinstance(arena, OptimizerArena)
        if isinstance(rule, ClipByValue):
            assert_bits(arena.grads, reference.clipped(images, rule, None, self.grad_scale))
            return
        # An optimizer gives the largest norm, and not that of scaled gradients.
        knows = not in_optimizer or not (rule.per_gradient or self.grad_scale)
        if isinstance(rule, ClipByGlobalNorm | ClipByNorm) and knows:
            assert_bits(arena.grads, reference.clipped(images, rule, measured, self.grad_scale))
            return
        scale = self.grad_scale or 1.0
        double = all(grad.dtype == torch.float64 for grad in arena.grads)
        limits = self._limits(images, norms)
        for i, (grad, image) in enumerate(zip(arena.grads, images, strict=True)):
            if isinstance(rule, ClipByUnitNorm):
                truth = units.expected(image, arena.weights[i], rule, scale)
            else:
                at = i if len(limits) == len(images) else 0
                by = coefficient(norms[at], limits[at], rule.eps)
                with np.errstate(invalid="ignore"):
                    truth = units.wide(image) * (by / scale)
            assert_near(grad, truth, double=double)

    def _limits(self, images: Sequence[Tensor], norms: Sequence[float]) -> Sequence[float]:
        """The largest norm after clipping, of all gradients or of each."""
        rule = self.rule
        if isinstance(rule, ClipByRMS):
            most: Any = rule.max_rms
            return [most * math.sqrt(max(image.numel(), 1)) for image in images]
        if self.limits is None:
            return [] if rule.per_unit else [rule.max_norm for _ in norms]
        return self.limits(norms) if rule.per_gradient else [self.limits(norms[0])]


def clip(arena: Arena, rule: Any, context: AbstractContextManager[Any] | None = None) -> None:
    """Clips new values in a context, and checks the call outside of it."""
    arena.fill()
    with context or nullcontext():
        measured = arena.call(rule)
    Clip(rule).check(arena, measured, "")


def random_sizes(choice: random.Random) -> Sizes:
    """Few large gradients or many small ones, or nothing; less where kernels are interpreted."""
    n = choice.choice([1, 2, 3, 10] if INTERPRETED else [1, 2, 3, 10, 100])
    # Not drawn one by one: a list of hypothesis has few choices.
    drawn = random.Random(choice.randrange(2**32))
    most = 10 ** drawn.uniform(0, 4.0 if INTERPRETED else 5.0)
    largest = max(1, int(most / n))
    if choice.random() < 0.05:
        return [0] * n
    edges = [size for size in EDGES if n <= 3 or size <= largest]
    sizes = [
        drawn.choice([0, 1, drawn.randint(1, largest), largest, drawn.choice(edges)])
        for _ in range(n)
    ]
    return [_shape(size, drawn) if drawn.random() < 0.5 else size for size in sizes]


def _shape(size: int, drawn: random.Random) -> tuple[int, ...]:
    """A shape of about as many elements."""
    n = drawn.choice([1, 2, 3, 64, 257])
    shape = drawn.choice([(size // n, n), (n, size // n), (2, size // (2 * n), n)])
    # Each row takes the interpreter some time.
    return (shape[0] * shape[1], *shape[2:]) if INTERPRETED and shape[0] > 20 else shape


def random_arena(
    choice: random.Random,
    device: torch.device | str = "cpu",
    kinds: Sequence[type[Arena]] = ARENAS,
    *,
    sizes: Sizes | None = None,
) -> Arena:
    """Gradients of one dtype or of several, most of them plain, which one of the calls clips."""
    sizes = random_sizes(choice) if sizes is None else sizes
    kind, seed = choice.choice(kinds), choice.randrange(10**6)
    drawn = random.Random(seed)
    dtypes: list[torch.dtype] = [choice.choice(FLOATS)] * len(sizes)
    layouts = ["plain"] * len(sizes)
    if len(kind.layouts) > 1:
        if choice.random() < 0.3:
            dtypes = [drawn.choice(FLOATS) for _ in sizes]
        if choice.random() < 0.3:
            layouts = [drawn.choice(kind.layouts) for _ in sizes]
        if not issubclass(kind, OptimizerArena) and choice.random() < 0.2:
            some = (torch.complex64, torch.complex64, torch.complex128)
            dtypes = [drawn.choice([dtype, drawn.choice(some)]) for dtype in dtypes]
    arena = kind(sizes, dtypes, device, seed, layouts)
    if isinstance(arena, OptimizerArena) and choice.random() < 0.3:
        arena.optimizer.skip_above, arena.takes = random_skip_bound(choice)
    return arena


def random_rule(choice: random.Random) -> Any:
    """A rule with a limit that is a number, which clips some gradients and leaves others alone."""
    limit, ratio = (
        10 ** choice.uniform(*powers) if choice.random() < 0.85 else choice.choice([0.0, torch.inf])
        for powers in ((-3, 4), (-2, 1))
    )
    eps = choice.choice([1e-6, 1e-6, 0.0, 0.0, 1.0])
    kind = choice.randrange(5)
    if kind == 0:
        return ClipByGlobalNorm(limit, choice.choice(NORM_TYPES), eps=eps)
    if kind == 1:
        return ClipByNorm(limit, choice.choice(NORM_TYPES), eps=eps)
    if kind == 2:
        return ClipByRMS(ratio)
    if kind == 3:
        return ClipByUnitNorm(ratio, choice.choice([1e-3, 1.0]))
    if choice.random() < 0.5:
        return ClipByValue(ratio)
    if choice.random() < 0.3:
        return ClipByValue(*choice.choice([(-torch.inf, 0.1), (-0.1, torch.inf), (-1e30, 1e-30)]))
    return ClipByValue(*sorted(choice.uniform(-2, 2) for _ in range(2)))


def random_clip(arena: Arena, choice: random.Random, *, follows: bool = True) -> Clip:
    """A rule and options that the arena takes; `follows`: also a rule that follows norms."""
    if follows and arena.has_options and choice.random() < 0.3:
        kind, limits, numbers = choice.choice(ADAPTIVE)
        state = None if isinstance(arena, OptimizerArena) else ClipState()
        made = Clip(kind(*numbers), limits=limits(*numbers), state=state)
    else:
        drawn = random.Random(choice.randrange(2**32))
        made = Clip(next(filter(arena.accepts, map(random_rule, itertools.repeat(drawn)))))
        # Of norms that are remembered, references agree to fewer digits.
        remembers = isinstance(arena, OptimizerArena) and isinstance(
            arena.optimizer.skip_above, Outlier
        )
        made.is_extreme = not remembers and choice.random() < 0.3
    if arena.has_options and choice.random() < 0.3:
        made.grad_scale = choice.choice([2.0**16, 3.0, 0.125])
    if choice.random() < 0.3:
        made.spoils = True
        by_value = isinstance(made.rule, ClipByValue) and not arena.has_options
        made.nonfinite = "propagate" if by_value else choice.choice(arena.policies)
    return made


def clip_a_list(choice: random.Random, arena: Arena) -> None:
    """One list under rules by turns, of which one may follow the norms of its turns."""
    clips = [random_clip(arena, choice, follows=first) for first in (True, False, False)]
    for _ in range(choice.choice([3, 6])):
        choice.choice(clips).clip(arena, choice)
