"""Random calls of every public function on random gradient lists, for tools/answers.py."""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from digests import Digest, bytes_of
from torch import Tensor

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer, ClipState
from tritonclip import functional as F

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BAD = (math.nan, math.inf, -math.inf)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
NORM_TYPES = (2.0, 2.0, 2.0, 1.0, math.inf, -math.inf, 0.0, 3.0, 0.5)
POLICIES = ("propagate", "zero", "zero", "error")
FORMS = (
    *("offset", "transposed", "gaps", "padded", "negated", "conjugated", "sparse", "uncoalesced"),
    *("tied", "alias", "missing", "left out"),
)
REFUSED = ("broadcast", "integer", "subclass", "in common")


class Subclass(Tensor):
    """Tensors of a kind that the library refuses."""


class Gradients:
    """A random gradient list: parameters, and one memory in which all of their gradients lie.

    `odd`: how likely a gradient is an odd one; None for a choice.
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
            entries = (at[None], self.slots[-1], (2 * n + 1,))
            kept: Any = {"is_coalesced": form == "sparse", "check_invariants": False}
            grad = torch.sparse_coo_tensor(*entries, **kept)
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

    def fill(self, digest: Digest) -> None:
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
        for param in self.params if digest.shown else ():
            print(f"  a parameter {tuple(param.shape)}: {param.grad}")

    def all_versions(self) -> list[int]:
        tensors = [t for param in self.params for t in (param, param.grad) if t is not None]
        return [t._version for t in tensors]

    def add_to(self, digest: Digest) -> None:
        """Every byte of the gradients and between them, and what became of their versions."""
        after = self.all_versions()
        changes = [now - then for now, then in zip(after, self.versions, strict=False)]
        digest.mark(f"written {len(after)} {[change > 0 for change in changes]}")
        digest.bits.update(repr(changes).encode())
        digest.bits.update(bytes_of(self.memory))
        for param in self.params:
            grad = param.grad
            if grad is None:
                digest.mark("None")
            elif digest.shown or not self.holds(grad):
                digest.add(grad)

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


def clip(choice: random.Random, digest: Digest) -> None:
    """`clip_` by every rule, over several calls."""
    grads, follows = Gradients(choice), choice.random() < 0.4
    make, options = random_rule(choice, follows=follows), random_options(choice, POLICIES)
    rule = digest.call(make)
    if follows and choice.random() < 0.97:
        options["state"] = ClipState()
    for _ in range(6 if follows else 3):
        grads.fill(digest)
        digest.call(tritonclip.clip_, grads.handed(), rule, **options)
        grads.add_to(digest)
        if "state" in options:
            digest.call(options["state"].state_dict)
    if "state" in options and choice.random() < 0.5:
        again = ClipState()
        digest.call(again.load_state_dict, options["state"].state_dict())
        grads.fill(digest)
        digest.call(tritonclip.clip_, grads.params, rule, **{**options, "state": again})
        grads.add_to(digest)


def change(choice: random.Random, digest: Digest) -> None:
    """`clip_` by one rule on a list whose gradients come, go and move between calls."""
    grads = Gradients(choice, 0.2)
    rule = digest.call(random_rule(choice, follows=False))
    for _ in range(5):
        grads.fill(digest)
        digest.call(tritonclip.clip_, grads.params, rule)
        grads.add_to(digest)
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


def compat(choice: random.Random, digest: Digest) -> None:
    """The functions with torch's signatures."""
    grads, p, limit = Gradients(choice), choice.choice(NORM_TYPES), random_number(choice)
    options = {"foreach": choice.choice([None, None, True, False])}
    error = {**options, "error_if_nonfinite": choice.random() < 0.2}
    for _ in range(2):
        grads.fill(digest)
        present = [param.grad for param in grads.params]
        norm = digest.call(tritonclip.get_total_norm, present, p, **error)
        way = choice.randrange(3)
        if way == 0:
            digest.call(tritonclip.clip_grad_norm_, grads.handed(), limit, p, **error)
        elif way == 1:
            digest.call(tritonclip.clip_grad_value_, grads.handed(), limit, **options)
        elif norm is not None:
            digest.call(tritonclip.clip_grads_with_norm_, grads.handed(), limit, norm, **options)
        grads.add_to(digest)


def name(choice: random.Random, digest: Digest) -> None:
    """Norms by name, of each parameter or of groups."""
    grads = Gradients(choice)
    options: dict[str, Any] = {"norm_type": choice.choice(NORM_TYPES)}
    if choice.random() < 0.5:
        options["group_of"] = lambda name: name[:7]
    options |= {k: v for k, v in random_options(choice, POLICIES).items() if k == "grad_scale"}
    for _ in range(2):
        grads.fill(digest)
        digest.call(tritonclip.norms_by_name, grads.handed(), **options)
        grads.add_to(digest)


def formula(choice: random.Random, digest: Digest) -> None:
    """The functions out of place, and their derivatives."""
    grads = Gradients(choice, choice.choice([0.0, 0.1]))
    grads.fill(digest)
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
    result = digest.call(
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
    grads.add_to(digest)
    flat = torch.utils._pytree.tree_leaves(result)
    outs = [out for out in flat if isinstance(out, Tensor) and out.requires_grad]
    if outs:
        ins = [g for g in [*leaves, limit] if isinstance(g, Tensor) and g.requires_grad]
        ones = [torch.ones_like(out) for out in outs]
        digest.call(torch.autograd.grad, outs, ins, ones, allow_unused=True)


def backward(choice: random.Random, digest: Digest) -> None:
    """Clipping inside of backward."""
    grads = Gradients(choice, 0.0, DTYPES[:4])
    make = random_rule(choice, follows=False)
    low, limit, p = -(10 ** choice.uniform(-3, 1)), random_number(choice), choice.choice(NORM_TYPES)
    makers = [make, lambda: ClipByValue(low, limit), lambda: ClipByNorm(limit, p)]
    rule = digest.call(choice.choice([*makers, *makers[1:] * 3]))
    policy = choice.choice(POLICIES)
    for param in grads.params:
        param.grad = None
    handle = None
    if arrives := choice.random() < 0.5:
        handle = digest.call(tritonclip.clip_on_backward_, grads.handed(), rule, nonfinite=policy)
    for _ in range(2):
        grads.fill(digest)
        losses = []
        for param, slot in zip(grads.params, grads.slots, strict=True):
            seen = param * 2
            if not arrives:
                seen = digest.call(tritonclip.clip_backward, seen, rule, nonfinite=policy)
            if seen is not None:
                losses.append((seen * slot.clone()).sum().double())
        if losses:
            digest.call(torch.stack(losses).sum().backward)
        digest.add([param.grad for param in grads.params])
    if handle is not None:
        digest.call(handle.remove)


def flatten(choice: random.Random, digest: Digest) -> None:
    """Gradients that are views of buffers."""
    grads = Gradients(choice, choice.choice([0.0, 0.0, 0.05]), DTYPES[:4])
    flat = digest.call(tritonclip.FlatGradients, grads.handed())
    rule = digest.call(random_rule(choice, follows=False))
    options = random_options(choice, POLICIES)
    grads.slots = [p.grad for p in grads.params if p.grad is not None and not p.grad.is_sparse]
    for _ in range(3):
        if flat is None:
            return
        grads.fill(digest)
        digest.call(tritonclip.clip_, flat, rule, **options)
        digest.call(lambda: list(flat.buffers))
        grads.add_to(digest)
        if choice.random() < 0.3 and grads.params:
            choice.choice(grads.params).grad = None
            digest.call(tritonclip.clip_, flat, rule)
            digest.call(flat.attach_)
    digest.call(flat.zero_)
    digest.call(lambda: list(flat.buffers))


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
    """Steps of a random wrapper, with or without a loss scale, closure, recorder."""

    def __init__(self, choice: random.Random, digest: Digest, folder: str) -> None:
        self.choice, self.digest = choice, digest
        self.grads = Gradients(choice, choice.choice([0.0, 0.0, 0.0, 0.1]), DTYPES[:4])
        self.grads.params = [p for p in self.grads.params if p.requires_grad]
        self.options = random_options(choice, STEP_POLICIES)
        self.scale = self.options.pop("grad_scale", None)
        bounds = [10 ** choice.uniform(-1, 3), tritonclip.Outlier(2.0, 4)]
        if choice.random() < 0.3:
            self.options["skip_above"] = choice.choice(bounds)
        if "skip_above" in self.options and choice.random() < 0.3:
            self.options["max_consecutive_skips"] = 2
        self.path = f"{folder}/norms.csv"
        self.recorder = None
        if choice.random() < 0.3:
            each = choice.random() < 0.5
            self.recorder = digest.call(tritonclip.record, self.path, every=2, each=each)
            self.options["recorder"] = self.recorder
        self.inner, self.make = choice.choice(INNER), random_rule(choice, follows=True)
        self.grads.spoils = max(self.grads.spoils, choice.choice([0.0, 0.2]))
        self.own = random_rule(choice, follows=True) if choice.random() < 0.3 else None
        if self.own is not None and choice.random() < 0.2:
            # Leaves the group alone.
            self.own = lambda: None
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
        self.digest.call(another.load_state_dict, state)
        return another

    def loss(self) -> Tensor:
        """Has new gradients, beside a backward of a sum that adds none."""
        self.grads.fill(self.digest)
        return torch.tensor(1.0)

    def step(self, optimizer: Any) -> None:
        if self.closes and self.scaler is None:
            self.digest.call(optimizer.step, self.loss, grad_scale=self.scale)
            return
        self.loss()
        if self.scaler is None:
            self.digest.call(optimizer.step, grad_scale=self.scale)
            return
        self.digest.call(self.scaler.scale, torch.tensor(1.0))
        if self.choice.random() < 0.2:
            self.digest.call(self.scaler.unscale_, optimizer)
        self.digest.call(self.scaler.step, optimizer)
        self.digest.call(self.scaler.update)
        self.digest.call(self.scaler.get_scale)

    def run(self) -> None:
        digest = self.digest
        optimizer: Any = digest.call(self.build)
        for turn in range(5):
            if turn == 3 and self.choice.random() < 0.4:
                optimizer = self.resumed(optimizer)
            if optimizer is None:
                break
            if turn == 4 and self.choice.random() < 0.1:
                optimizer.clip = random_rule(self.choice, follows=True)()
            self.step(optimizer)
            self.grads.add_to(digest)
            digest.add(self.grads.params)
            if self.choice.random() < 0.15:
                digest.call(optimizer.zero_grad, set_to_none=False)
            stats = optimizer.stats
            digest.call(stats.summary)
            digest.add([stats.steps, stats.measured_steps, stats.consecutive_skips])
            digest.add([stats.last_norm, stats.last_coefficient, stats.last_limit])
        if optimizer is not None:
            digest.call(optimizer.state_dict)
        if self.recorder is not None:
            digest.call(self.recorder.close)
            if Path(self.path).exists():
                text = Path(self.path).read_text()
                digest.bits.update(text.encode())
                digest.say(text)


def suggest(choice: random.Random, digest: Digest) -> None:
    """A limit from the norms of a run."""
    drift, spread = choice.uniform(-0.02, 0.01), choice.uniform(0.0, 1.0)
    norms = [math.exp(choice.gauss(drift * i, spread)) for i in range(choice.choice([10, 60, 200]))]
    norms = [choice.choice([*BAD[:2], 0.0]) if choice.random() < 0.02 else x for x in norms]
    found = digest.call(tritonclip.suggest_max_norm, norms)
    if found is not None:
        digest.add([found.max_norm, found.medians, found.warmup, found.steps, found.nonfinite])
        digest.add([(one.max_norm, one.share) for one in found.candidates])
        digest.add_text(f"{found.verdict} {found.reason}")


def train(choice: random.Random, digest: Digest) -> None:
    """Steps of `ClippedOptimizer`."""
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        Training(choice, digest, folder).run()


# One of them for each list, by turns.
KINDS = (*[clip] * 4, *[train] * 2, compat, change, formula, backward, flatten, name, suggest)
