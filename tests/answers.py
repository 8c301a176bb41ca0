"""The answers of public calls on random gradient lists, a line for each, to compare two versions.

    python tests/answers.py --lists 20000 --seed 1 --out after.txt
    python tests/answers.py --compare before.txt after.txt

A list depends on the seed and its index alone, and this file draws it without any other of tests/,
so that one and the same copy of it serves both versions. The columns:

- `bits`: of every gradient with the memory around it, every result, every `_version`;
- `form`: the same but for finite floating-point values, which `digits` sums up;
- `errors`, `warnings`: their classes, in order; `messages`: their texts.

Where only the messages may differ, leave out `--messages`; where digits may, pass `--digits torch`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer, ClipState
from tritonclip import functional as F

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("triton",) if INTERPRETED else ("native", "torch")
COLUMNS = ("index", "kind", "backend", "bits", "form", "errors", "warnings", "messages", "digits")
BAD = (math.nan, math.inf, -math.inf)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
NORM_TYPES = (2.0, 2.0, 2.0, 1.0, math.inf, -math.inf, 0.0, 3.0, 0.5)
FORMS = (
    *("offset", "transposed", "gaps", "padded", "negated", "conjugated", "sparse", "uncoalesced"),
    *("tied", "alias", "missing", "left out"),
)
REFUSED = ("broadcast", "integer", "subclass", "in common")
# By the narrowest dtype of a list: as many digits as one rounding more or less may change.
TOLERANCES = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float16: 1e-3}
TOLERANCES |= {torch.bfloat16: 8e-3, torch.float8_e4m3fn: 0.13}


class Subclass(Tensor):
    """Tensors of a kind that the library refuses."""


@functools.cache
def weights(n: int) -> Tensor:
    """Factors by which values are summed up, so that their order counts."""
    return torch.arange(n, dtype=torch.float64).cos()


class Answer:
    """All that the calls on one list gave.

    Args:
        sums: whether values are summed up, for comparisons by digits.
        shown: whether each value is printed.
    """

    def __init__(self, *, sums: bool, shown: bool) -> None:
        self.bits, self.form, self.texts = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.sums, self.shown = sums, shown
        self.n, self.direction, self.size, self.tolerance = 0, 0.0, 0.0, 1e-12

    def say(self, text: str) -> None:
        if self.shown:
            print(f"  {text}")

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Adds a result, or an error, and the warnings; returns the result."""
        result = None
        self.say(f"> {function!r:.80} {[a for a in args if not isinstance(a, list)]} {kwargs}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                self.errors.append(type(error).__name__)
                self.add_text(f"{type(error).__name__}: {error}")
        for warning in caught:
            here = "" if warning.filename == __file__ else " elsewhere"
            self.warnings.append(warning.category.__name__ + here)
            self.add_text(f"{warning.category.__name__}: {warning.message}")
        self.add(result)
        return result

    def add_text(self, text: str) -> None:
        text = re.sub(r"0x[0-9a-f]+|\S*answers-\w+", "...", text)
        self.say(text)
        self.texts.update(text.encode() + b"\0")

    def add(self, value: Any) -> None:
        """A result: tensors, numbers and text, in any nesting."""
        if isinstance(value, Tensor):
            self.add_tensor(value)
        elif isinstance(value, Mapping):
            self.add([*value])
            self.add([*value.values()])
        elif isinstance(value, (list, tuple)):
            self.mark(f"{len(value)} of")
            for one in value:
                self.add(one)
        elif type(value) is float:
            self.add_tensor(torch.tensor(value, dtype=torch.float64))
        elif value is None or isinstance(value, (bool, int, str)):
            self.mark(repr(value))
        else:
            self.mark(type(value).__name__)

    def mark(self, text: str) -> None:
        self.say(text)
        self.bits.update(text.encode() + b"\0")
        self.form.update(text.encode() + b"\0")

    def add_tensor(self, value: Tensor) -> None:
        value = value.detach()
        self.mark(f"{value.dtype} {tuple(value.shape)} {value.layout} {value.is_neg()}")
        if value.layout == torch.sparse_coo:
            self.mark(f"coalesced {value.is_coalesced()}")
            self.add(value._indices())
            value = value._values()
        value = value.resolve_conj().resolve_neg().as_subclass(Tensor)
        if self.shown:
            print(f"  {value}")
        # In the order of indices, so that a layout may be any.
        self.bits.update(bytes_of(value))
        if not value.is_floating_point() and not value.is_complex():
            self.form.update(bytes_of(value))
        elif self.sums:
            self.sum_up(value)

    def sum_up(self, value: Tensor) -> None:
        """Adds direction and size of a tensor to those of all."""
        real = torch.view_as_real(value) if value.is_complex() else value
        real = real.double().reshape(-1)
        finite = real.isfinite()
        self.form.update(bytes_of(real[~finite]))
        real = real.where(finite, 0.0)
        # Below the normal numbers there are no digits to compare.
        smallest = 1e-300 if real.dtype == value.dtype else 1e-6 * torch.finfo(value.dtype).tiny
        total = max(float(real.abs().sum()), smallest * max(real.numel(), 1))
        self.n += 1
        self.direction += math.cos(self.n) * float(real @ weights(real.numel())) / total
        self.size += math.sin(self.n) * math.log(total)

    def line(self, index: int, kind: str, backend: str) -> str:
        """The columns, with tabs between them."""
        digits = f"{self.n} {self.direction!r} {self.size!r} {self.tolerance}" if self.n else "-"
        hashes = [one.hexdigest()[:32] for one in (self.bits, self.form)]
        said = [
            ",".join(f"{name} {len([*group])}" for name, group in itertools.groupby(names)) or "-"
            for names in (self.errors, self.warnings)
        ]
        cells = [str(index), kind, backend, *hashes, *said, self.texts.hexdigest()[:32], digits]
        return "\t".join(cells)


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a tensor, in the order of its indices."""
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


class Gradients:
    """A random gradient list: parameters, and one memory in which all of their gradients lie.

    Args:
        choice: decides everything.
        odd: how likely a gradient is an odd one; None for a choice.
        kinds: dtypes to choose from.
    """

    def __init__(
        self, choice: random.Random, odd: float | None = None, kinds: Sequence[Any] = DTYPES
    ) -> None:
        self.choice = choice
        self.params: list[Any] = []
        self.slots: list[Tensor] = []
        odd = choice.choice([0.0, 0.0, 0.1, 0.5]) if odd is None else odd
        shapes = [self.shape_of(size) for size in random_sizes(choice)]
        lists = choice.choice([kinds[:1], [choice.choice(kinds)], kinds])
        plans = [(shape, choice.choice(lists), self.form(odd)) for shape in shapes]
        room = sum((math.prod(shape) * 2 + 80) * dtype.itemsize for shape, dtype, _ in plans)
        self.memory = torch.full((room + 64 * len(plans),), 170, dtype=torch.uint8)
        self.end = 0
        for shape, dtype, form in plans:
            self.append(shape, dtype, form)
        self.generator = torch.Generator().manual_seed(choice.randrange(2**31))
        self.size = 10 ** choice.uniform(-2, 2)
        if choice.random() < 0.15:
            self.size = choice.choice([0.0, 1e30, 1e-30, 1e-42, 6e4, 1e-7, 1e200, 1e-310])
        self.spoils = choice.choice([0.0, 0.0, 0.0, 0.3])
        self.versions: list[int] = []

    def form(self, odd: float) -> str:
        if self.choice.random() >= odd:
            return "plain"
        if self.choice.random() < 0.005:
            return self.choice.choice(REFUSED)
        return "float8" if self.choice.random() < 0.02 else self.choice.choice(FORMS)

    def shape_of(self, size: int) -> tuple[int, ...]:
        way = self.choice.randrange(4)
        if way == 0 and size % 3 == 0:
            return (size // 3, 3)
        if way == 1 and size % 4 == 0:
            return (2, size // 4, 2)
        return () if way == 2 and size == 1 else (size,)

    def slot(self, shape: Sequence[int], dtype: torch.dtype, form: str) -> Tensor:
        """Strided memory for a gradient, with guard bytes behind it."""
        strides = list(torch.empty(shape, device="meta").stride())
        if form == "gaps":
            strides = [2 * stride for stride in strides]
        elif form == "padded" and len(shape) > 1:
            strides[:-1] = [stride + 1 for stride in strides[:-1]]
        elif form == "transposed":
            strides = list(torch.empty(shape[::-1], device="meta").stride())[::-1]
        elif form == "broadcast":
            strides = [0 for _ in strides]
        first = 1 if form == "offset" else 0
        last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        n_bytes = 0 if 0 in shape else (last + 1) * dtype.itemsize
        whole = self.memory[self.end : self.end + n_bytes].view(dtype)
        self.end += n_bytes // 64 * 64 + 64
        # Not a view for autograd, so that each has a version of its own.
        return whole.as_strided(shape, strides, whole.storage_offset() + (first if n_bytes else 0))

    def append(self, shape: tuple[int, ...], dtype: torch.dtype, form: str) -> None:
        choice, last = self.choice, self.params[-1] if self.params else None
        dtype = {"integer": torch.int32, "float8": torch.float8_e4m3fn}.get(form, dtype)
        if form in ("tied", "alias") and last is not None and last.grad is not None:
            grad = last.grad if form == "tied" else last.grad.detach()
        elif form in ("sparse", "uncoalesced"):
            n = math.prod(shape)
            at = torch.arange(n) * 2 if form == "sparse" else torch.arange(n) // 2
            self.slots.append(self.slot((n,), dtype, form).data)
            grad = torch.sparse_coo_tensor(
                at[None],
                self.slots[-1],
                (2 * n + 1,),
                is_coalesced=form == "sparse",
                check_invariants=False,
            )
        elif form == "in common" and self.slots and self.slots[-1].numel() > 1:
            grad = self.slots[-1].as_strided((2,), (1,), self.slots[-1].storage_offset()).data
        else:
            grad = self.slot(shape, dtype, form).data
            if form != "broadcast":
                self.slots.append(grad)
        if form in ("negated", "conjugated"):
            grad = grad.conj() if grad.is_complex() else torch._neg_view(grad)
        elif form == "subclass":
            grad = grad.as_subclass(Subclass)
        self.params.append(self.parameter(grad, form))
        if form == "left out":
            self.params[-1].need_clip = choice.random() < 0.1

    def parameter(self, grad: Tensor, form: str) -> Any:
        made = torch.zeros(grad.shape, dtype=grad.dtype)
        if grad.dtype not in (torch.int32, torch.float8_e4m3fn):
            seeded = torch.Generator().manual_seed(len(self.params))
            made = torch.randn(grad.shape, generator=seeded, dtype=torch.float64).to(grad.dtype)
            made = torch.nn.Parameter(made)
        made.grad = None if form == "missing" else grad
        return made

    def fill(self, answer: Answer) -> None:
        """Writes other values into every gradient, now and then NaN or inf."""
        choice = self.choice
        count = sum(slot.numel() for slot in self.slots)
        noise = torch.randn(2 * count, generator=self.generator, dtype=torch.float64)
        noise.mul_(self.size * choice.choice([0.1, 1.0, 1.0, 10.0, 1e3]))
        begin = 0
        for slot in self.slots:
            end = begin + slot.numel()
            values = noise[begin:end]
            if slot.dtype == torch.int32:
                values = values.clamp(-1e6, 1e6)
            elif slot.is_complex():
                values = torch.complex(values, noise[count + begin : count + end])
            slot.copy_(values.view(slot.shape))
            begin = end
        floats = [slot for slot in self.slots if slot.numel() and slot.dtype.itemsize > 1]
        if floats and choice.random() < self.spoils:
            for _ in range(choice.randint(1, 3)):
                slot = choice.choice(floats)
                at = tuple(choice.randrange(n) for n in slot.shape)
                slot[at] = 7 if slot.dtype == torch.int32 else choice.choice(BAD)
        self.versions = self.all_versions()
        for param in self.params if answer.shown else ():
            print(f"  a parameter {tuple(param.shape)}: {param.grad}")

    def all_versions(self) -> list[int]:
        tensors = [t for param in self.params for t in (param, param.grad) if t is not None]
        return [t._version for t in tensors]

    def add_to(self, answer: Answer) -> None:
        """Every byte of the gradients and between them, and what became of their versions."""
        after = self.all_versions()
        changes = [now - then for now, then in zip(after, self.versions, strict=False)]
        answer.mark(f"versions {len(after)} {changes}")
        answer.bits.update(bytes_of(self.memory))
        for param in self.params:
            grad = param.grad
            if grad is None:
                answer.mark("None")
            elif answer.sums or answer.shown or not self.holds(grad):
                answer.add(grad)
            if grad is not None:
                dtype = TOLERANCES.get(grad.dtype, 1e-6)
                answer.tolerance = max(answer.tolerance, dtype)

    def holds(self, grad: Tensor) -> bool:
        """Whether all bytes of a gradient are in the memory."""
        if grad.layout != torch.strided:
            return False
        return 0 <= grad.data_ptr() - self.memory.data_ptr() < self.memory.numel()

    def handed(self) -> Any:
        """The parameters, in a form that calls take."""
        named = [(f"layer{i}.weight", param) for i, param in enumerate(self.params)]
        module = torch.nn.ParameterList([p for p in self.params if type(p) is torch.nn.Parameter])
        return self.choice.choice(
            [self.params, self.params, tuple(self.params), iter(self.params), named, module]
        )


def random_sizes(choice: random.Random) -> list[int]:
    """Few large gradients or many small ones; less where kernels are interpreted."""
    n = choice.choice([1, 2, 3, 7] if INTERPRETED else [0, 1, 1, 2, 3, 3, 7, 7, 20, 50])
    n = choice.randint(100, 300) if not INTERPRETED and choice.random() < 0.04 else n
    most = 10 ** choice.uniform(0.5, 3.6 if INTERPRETED else 4.5)
    most *= 8 if not INTERPRETED and choice.random() < 0.03 else 1
    most = 300_000 if not INTERPRETED and choice.random() < 0.01 else most
    largest = max(1, int(most / max(n, 1)))
    blocks = [b + d for b in (1024, 2048, 4096, 8192, 16384) for d in (-1, 0, 1) if b < largest]
    kinds = [0, 1, largest, *[None] * 3, *([choice.choice(blocks)] if blocks else [])]
    sizes = [choice.choice(kinds) for _ in range(n)]
    return [choice.randint(1, largest) if size is None else size for size in sizes]


def random_number(choice: random.Random) -> Any:
    """A limit; one in a hundred is refused."""
    if choice.random() < 0.01:
        return choice.choice([-1.0, math.nan, True, "1", None])
    return choice.choice([0.0, 1, math.inf, *[10 ** choice.uniform(-3, 3) for _ in range(7)]])


def random_rule(choice: random.Random, *, follows: bool) -> Callable[[], Any]:
    """Makes a rule, which may be refused; `follows`: an adaptive one, or a schedule, too."""
    limit: Any = random_number(choice)
    if follows and choice.random() < 0.1:
        base = limit if type(limit) is float else 1.0
        limit = lambda step: base / (1 + step)  # noqa: E731
    p, eps = choice.choice(NORM_TYPES), choice.choice([1e-6, 1e-6, 0.0, 1e-3])
    low, high = sorted(10 ** choice.uniform(-3, 2) * choice.choice([-1, 1]) for _ in range(2))
    ratio, share = 10 ** choice.uniform(-2, 1), choice.random()
    fixed: list[Callable[[], Any]] = [
        lambda: limit,
        lambda: ClipByGlobalNorm(limit),
        lambda: ClipByGlobalNorm(limit, p, eps),
        lambda: ClipByGlobalNorm(limit, norm_type=p),
        lambda: ClipByNorm(limit, p, eps),
        lambda: ClipByNorm(limit),
        lambda: ClipByValue(limit),
        lambda: ClipByValue(low, high),
        lambda: tritonclip.ClipByRMS(limit),
        lambda: tritonclip.ClipByUnitNorm(ratio, eps=10 * eps),
    ]
    adaptive: list[Callable[[], Any]] = [
        lambda: tritonclip.ClipByQuantile(share, 3),
        lambda: tritonclip.ClipByQuantile(share, 100, max_norm=limit, norm_type=p),
        lambda: tritonclip.ClipByZScore(1 + share, 0.9, 2),
        lambda: tritonclip.ClipByZScore(1 + share, 0.9, 2, max_norm=limit, norm_type=p),
        lambda: tritonclip.ClipByOwnHistory(1 + share, 0.9, 2, limit),
    ]
    return choice.choice(adaptive if follows and choice.random() < 0.5 else fixed)


def random_options(choice: random.Random, policies: Sequence[str]) -> dict[str, Any]:
    """A policy for NaN and inf, and a loss scale."""
    options: dict[str, Any] = {}
    if choice.random() < 0.4:
        options["nonfinite"] = choice.choice(policies)
    if choice.random() < 0.3:
        scale = choice.choice([2.0**16, 3.0, 0.125, 1e-3])
        options["grad_scale"] = choice.choice([scale, torch.tensor(scale)])
    return options


POLICIES = ("propagate", "zero", "zero", "error")


def clip(choice: random.Random, answer: Answer) -> None:
    """`clip_` by every rule, over several calls."""
    grads, follows = Gradients(choice), choice.random() < 0.4
    make, options = random_rule(choice, follows=follows), random_options(choice, POLICIES)
    rule = answer.call(make)
    if isinstance(rule, tritonclip.ClipByUnitNorm) and choice.random() < 0.3:
        rule = answer.call(dataclasses.replace, rule, exclude=grads.params[:2])
    if follows and choice.random() < 0.97:
        options["state"] = ClipState()
    for _ in range(6 if follows else 3):
        grads.fill(answer)
        answer.call(tritonclip.clip_, grads.handed(), rule, **options)
        grads.add_to(answer)
        if "state" in options:
            answer.call(options["state"].state_dict)
    if "state" in options and choice.random() < 0.5:
        again = ClipState()
        answer.call(again.load_state_dict, options["state"].state_dict())
        grads.fill(answer)
        answer.call(tritonclip.clip_, grads.params, rule, **{**options, "state": again})
        grads.add_to(answer)


def change(choice: random.Random, answer: Answer) -> None:
    """`clip_` by one rule on a list whose gradients come, go and move between calls."""
    grads = Gradients(choice, 0.2)
    rule = answer.call(random_rule(choice, follows=False))
    for _ in range(5):
        grads.fill(answer)
        answer.call(tritonclip.clip_, grads.params, rule)
        grads.add_to(answer)
        for param in choice.sample(grads.params, min(2, len(grads.params))):
            way = choice.randrange(4)
            if way == 0:
                param.grad = None
            elif way == 1 and param.grad is not None:
                param.grad = param.grad.clone()
            elif way == 2:
                param.need_clip = choice.random() < 0.5
            else:
                grads.params = [other for other in grads.params if other is not param]


def compat(choice: random.Random, answer: Answer) -> None:
    """The functions with torch's signatures."""
    grads, p, limit = Gradients(choice), choice.choice(NORM_TYPES), random_number(choice)
    options = {"foreach": choice.choice([None, None, True, False])}
    error = {**options, "error_if_nonfinite": choice.random() < 0.2}
    for _ in range(2):
        grads.fill(answer)
        present = [param.grad for param in grads.params]
        norm = answer.call(tritonclip.get_total_norm, present, p, **error)
        way = choice.randrange(3)
        if way == 0:
            answer.call(tritonclip.clip_grad_norm_, grads.handed(), limit, p, **error)
        elif way == 1:
            answer.call(tritonclip.clip_grad_value_, grads.handed(), limit, **options)
        elif norm is not None:
            answer.call(tritonclip.clip_grads_with_norm_, grads.handed(), limit, norm, **options)
        grads.add_to(answer)


def name(choice: random.Random, answer: Answer) -> None:
    """Norms by name, of each parameter or of groups."""
    grads = Gradients(choice)
    options: dict[str, Any] = {"norm_type": choice.choice(NORM_TYPES)}
    if choice.random() < 0.5:
        options["group_of"] = lambda name: name[:7]
    options |= {k: v for k, v in random_options(choice, POLICIES).items() if k == "grad_scale"}
    for _ in range(2):
        grads.fill(answer)
        answer.call(tritonclip.norms_by_name, grads.handed(), **options)
        grads.add_to(answer)


def formula(choice: random.Random, answer: Answer) -> None:
    """The functions out of place, and their derivatives."""
    grads = Gradients(choice, choice.choice([0.0, 0.1]))
    grads.fill(answer)
    limit, p = random_number(choice), choice.choice(NORM_TYPES)
    leaves = [param.grad for param in grads.params]
    needs = choice.random() < 0.4 and all(g is None or not g.is_sparse for g in leaves)
    if needs:
        leaves = [None if g is None else g.clone() for g in leaves]
        leaves = [
            g.requires_grad_() if g is not None and g.is_floating_point() else g for g in leaves
        ]
    tree: Any = choice.choice([leaves, dict(enumerate(leaves)), (leaves[:1], {"rest": leaves[1:]})])
    tree = leaves[0] if leaves and choice.random() < 0.3 else tree
    if type(limit) in (int, float) and choice.random() < 0.2:
        limit = torch.tensor(float(limit), requires_grad=needs)
    dim = choice.choice([(0,), (-1,), (0, 1)])
    result = answer.call(
        choice.choice(
            [
                lambda: F.clip_by_global_norm(tree, limit),
                lambda: F.clip_by_global_norm(tree, limit, F.global_norm(tree)),
                lambda: F.clip_by_norm(tree, limit, norm_type=p),
                lambda: F.clip_by_norm(tree, limit, dim=dim, norm_type=p),
                lambda: F.clip_by_average_norm(tree, limit),
                lambda: F.clip_by_rms(tree, limit),
                lambda: F.clip_by_value(tree, -0.5, limit),
                lambda: F.clip_by_value(tree, min=-0.5, max=limit),
                lambda: F.global_norm(tree),
            ]
        )
    )
    grads.add_to(answer)
    flat = torch.utils._pytree.tree_leaves(result)
    outs = [out for out in flat if isinstance(out, Tensor) and out.requires_grad]
    if outs:
        ins = [g for g in [*leaves, limit] if isinstance(g, Tensor) and g.requires_grad]
        ones = [torch.ones_like(out) for out in outs]
        answer.call(torch.autograd.grad, outs, ins, ones, allow_unused=True)


def backward(choice: random.Random, answer: Answer) -> None:
    """Clipping inside of backward."""
    grads = Gradients(choice, 0.0, DTYPES[:4])
    make = random_rule(choice, follows=False)
    low, limit, p = -(10 ** choice.uniform(-3, 1)), random_number(choice), choice.choice(NORM_TYPES)
    makers = [make, lambda: ClipByValue(low, limit), lambda: ClipByNorm(limit, p)]
    rule = answer.call(choice.choice([*makers, *makers[1:] * 3]))
    policy = choice.choice(POLICIES)
    for param in grads.params:
        param.grad = None
    handle = None
    if arrives := choice.random() < 0.5:
        handle = answer.call(tritonclip.clip_on_backward_, grads.handed(), rule, nonfinite=policy)
    for _ in range(2):
        grads.fill(answer)
        losses = []
        for param, slot in zip(grads.params, grads.slots, strict=True):
            seen = param * 2
            if not arrives:
                seen = answer.call(tritonclip.clip_backward, seen, rule, nonfinite=policy)
            if seen is not None:
                losses.append((seen * slot.clone()).sum().double())
        if losses:
            answer.call(torch.stack(losses).sum().backward)
        answer.add([param.grad for param in grads.params])
    if handle is not None:
        answer.call(handle.remove)


def flatten(choice: random.Random, answer: Answer) -> None:
    """Gradients that are views of buffers."""
    grads = Gradients(choice, choice.choice([0.0, 0.0, 0.05]), DTYPES[:4])
    flat = answer.call(tritonclip.FlatGradients, grads.handed())
    rule = answer.call(random_rule(choice, follows=False))
    options = random_options(choice, POLICIES)
    grads.slots = [p.grad for p in grads.params if p.grad is not None and not p.grad.is_sparse]
    for _ in range(3):
        if flat is None:
            return
        grads.fill(answer)
        answer.call(tritonclip.clip_, flat, rule, **options)
        answer.call(tritonclip.get_total_norm, flat)
        answer.call(lambda: list(flat.buffers))
        grads.add_to(answer)
        if choice.random() < 0.3 and grads.params:
            choice.choice(grads.params).grad = None
            answer.call(tritonclip.clip_, flat, rule)
            answer.call(flat.attach_)
            answer.call(flat.check)
    answer.call(flat.zero_)
    answer.call(lambda: list(flat.buffers))


INNER: tuple[Callable[[Any], Any], ...] = (
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    lambda params: torch.optim.Adagrad(params, lr=0.01),
    lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
)
STEP_POLICIES = (*POLICIES, "skip", "skip")


class Training:
    """Steps of a random wrapper, with or without a loss scale, closure, recorder, flat buffers."""

    def __init__(self, choice: random.Random, answer: Answer, folder: str) -> None:
        self.choice, self.answer = choice, answer
        self.grads = Gradients(choice, choice.choice([0.0, 0.0, 0.0, 0.1]), DTYPES[:4])
        self.grads.params = [p for p in self.grads.params if p.requires_grad]
        self.options = random_options(choice, STEP_POLICIES)
        self.scale = self.options.pop("grad_scale", None)
        bounds = [10 ** choice.uniform(-1, 3), tritonclip.Outlier(2.0, 4)]
        if choice.random() < 0.3:
            self.options["skip_above"] = choice.choice(bounds)
        if "skip_above" in self.options and choice.random() < 0.3:
            self.options["max_consecutive_skips"] = 2
        self.path = f"{folder}/norms{choice.choice(['.csv', '.jsonl'])}"
        self.recorder = None
        if choice.random() < 0.3:
            each = choice.random() < 0.5
            self.recorder = answer.call(tritonclip.record, self.path, every=2, each=each)
            self.options["recorder"] = self.recorder
        if choice.random() < 0.2:
            self.options["flat"] = answer.call(tritonclip.FlatGradients, self.grads.params)
        self.inner, self.make = choice.choice(INNER), random_rule(choice, follows=True)
        self.grads.spoils = max(self.grads.spoils, choice.choice([0.0, 0.2]))
        self.own = random_rule(choice, follows=True) if choice.random() < 0.3 else None
        self.closes = choice.random() < (0.9 if self.inner is INNER[-1] else 0.2)
        scalers = [None, None, None, torch.amp.GradScaler, tritonclip.GradScaler]
        kind = choice.choice(scalers)
        self.scaler = kind("cpu", init_scale=4.0, growth_interval=2) if kind else None

    def build(self) -> Any:
        named = [(f"layer{i}.weight", param) for i, param in enumerate(self.grads.params)]
        groups: Any = named
        if self.own is not None and len(named) > 1:
            half = len(named) // 2
            groups = [{"params": named[:half]}, {"params": named[half:], "clip": self.own()}]
        return ClippedOptimizer(self.inner(groups), self.make(), **self.options)

    def resumed(self, optimizer: Any) -> Any:
        """Another wrapper, which goes on from the checkpoint of one; None without one."""
        if optimizer is None:
            return None
        state, another = optimizer.state_dict(), self.build()
        self.answer.call(another.load_state_dict, state)
        return another

    def loss(self) -> Tensor:
        """Has new gradients, beside a backward of a sum that adds none."""
        self.grads.fill(self.answer)
        return torch.tensor(1.0)

    def step(self, optimizer: Any) -> None:
        if self.scale is not None and self.scaler is None:
            optimizer.grad_scale = self.scale
        if self.closes and self.scaler is None:
            self.answer.call(optimizer.step, self.loss)
            return
        self.loss()
        if self.scaler is None:
            self.answer.call(optimizer.step)
            return
        self.answer.call(self.scaler.scale, torch.tensor(1.0))
        if self.choice.random() < 0.2:
            self.answer.call(self.scaler.unscale_, optimizer)
        self.answer.call(self.scaler.step, optimizer)
        self.answer.call(self.scaler.update)
        self.answer.call(self.scaler.get_scale)

    def run(self) -> None:
        answer = self.answer
        optimizer: Any = answer.call(self.build)
        for turn in range(5):
            if turn == 3 and self.choice.random() < 0.4 and "flat" not in self.options:
                optimizer = self.resumed(optimizer)
            if optimizer is None:
                break
            self.step(optimizer)
            self.grads.add_to(answer)
            answer.add(self.grads.params)
            if self.choice.random() < 0.15:
                answer.call(optimizer.zero_grad, set_to_none=False)
            stats = optimizer.stats
            answer.call(stats.summary)
            answer.add([stats.steps, stats.measured_steps, stats.consecutive_skips])
            answer.add([stats.last_norm, stats.last_coefficient, stats.last_limit])
        if optimizer is not None:
            answer.call(optimizer.state_dict)
        if self.recorder is not None:
            answer.call(self.recorder.close)
            if Path(self.path).exists():
                text = Path(self.path).read_text()
                answer.bits.update(text.encode())
                answer.say(text)


def suggest(choice: random.Random, answer: Answer) -> None:
    """A limit from the norms of a run."""
    drift, spread = choice.uniform(-0.02, 0.01), choice.uniform(0.0, 1.0)
    norms = [math.exp(choice.gauss(drift * i, spread)) for i in range(choice.choice([10, 60, 200]))]
    norms = [choice.choice([*BAD[:2], 0.0]) if choice.random() < 0.02 else x for x in norms]
    found = answer.call(tritonclip.suggest_max_norm, norms)
    if found is not None:
        answer.add([found.max_norm, found.medians, found.warmup, found.steps, found.nonfinite])
        answer.add([(one.max_norm, one.share) for one in found.candidates])
        answer.add_text(f"{found.verdict} {found.reason}")


def train(choice: random.Random, answer: Answer) -> None:
    """Steps of `ClippedOptimizer`."""
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        Training(choice, answer, folder).run()


KINDS = (
    clip,
    clip,
    clip,
    clip,
    train,
    train,
    compat,
    change,
    formula,
    backward,
    flatten,
    name,
    suggest,
)


def answer_of(index: int, seed: int, backend: str, *, shown: bool = False) -> str:
    """The line of a list."""
    choice = random.Random(f"{seed} {index}")
    kind, verifies = KINDS[index % len(KINDS)], choice.random() < 0.05
    answer = Answer(sums=backend == "torch", shown=shown)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tritonclip.use_backend(backend))
        if verifies:
            stack.enter_context(tritonclip.verify())
        # A version that fails outside of the calls has other answers, too.
        answer.call(kind, choice, answer)
    return answer.line(index, kind.__name__, backend)


def say_once() -> None:
    """Has the library warn of mistakes of which it warns once in a process."""
    weight = torch.nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            tritonclip.clip_([weight], 1.0)
        optimizer = ClippedOptimizer(torch.optim.SGD([weight], lr=0.1), 1.0)
        for _ in range(3):
            weight.grad = torch.ones(2)
            tritonclip.clip_([weight], 1.0)
            optimizer.step()


def lines_of(path: str) -> Iterator[dict[str, str]]:
    for line in Path(path).read_text().splitlines():
        yield dict(zip(COLUMNS, line.split("\t"), strict=True))


def differing(before: dict[str, str], after: dict[str, str], digits: str, texts: bool) -> list[str]:
    """The columns in which two lines of a list differ."""
    columns = ["index", "kind", "backend", "errors", "warnings"] + ["messages"] * texts
    if before["backend"] not in digits.split(","):
        return [c for c in [*columns, "bits"] if before[c] != after[c]]
    found = [c for c in [*columns, "form"] if before[c] != after[c]]
    old, new = before["digits"].split(), after["digits"].split()
    if len(old) != len(new) or (len(old) == 4 and not is_near(old, new)):
        found.append("digits")
    return found


def is_near(old: list[str], new: list[str]) -> bool:
    """Whether both have as many values, of like direction and size."""
    most = 4 * float(old[3]) * math.sqrt(float(old[0]))
    gaps = [abs(float(a) - float(b)) for a, b in zip(old[1:3], new[1:3], strict=True)]
    return old[0] == new[0] and max(gaps) <= most


def compare(before: str, after: str, digits: str, texts: bool) -> int:
    """Prints lists with other answers, and how many there are; 1 where there is one."""
    counts: Counter[str] = Counter()
    for old, new in itertools.zip_longest(lines_of(before), lines_of(after)):
        if old is None or new is None:
            print("one file has more lists than the other")
            return 1
        counts[f"{old['backend']} lists"] += 1
        if found := differing(old, new, digits, texts):
            counts[f"{old['backend']} {old['kind']}: {', '.join(found)}"] += 1
            if sum("differs" in key for key in counts) < 10:
                counts[f"differs: --only {old['index']} ({old['backend']} {old['kind']})"] += 1
    for key, count in sorted(counts.items()):
        print(f"{count:8} {key}")
    return int(any(not key.endswith(" lists") for key in counts))


def main() -> int:
    """Writes the answers, shows those of one list, or compares two files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lists", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the list to begin with")
    parser.add_argument("--out", default="answers.txt")
    parser.add_argument("--only", type=int, help="print all of one list")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--digits", default="", help="backends to compare by digits")
    parser.add_argument("--messages", action="store_true", help="compare messages, too")
    options = parser.parse_args()
    if options.compare:
        before, after = options.compare
        return compare(before, after, options.digits, options.messages)

    torch.set_num_threads(1)
    say_once()
    print(f"{tritonclip.__file__}, torch {torch.__version__}", file=sys.stderr)
    if options.only is not None:
        for backend in BACKENDS:
            print(answer_of(options.only, options.seed, backend, shown=True))
        return 0
    with Path(options.out).open("w") as file:
        for index in range(options.first, options.first + options.lists):
            for backend in BACKENDS:
                print(answer_of(index, options.seed, backend), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
