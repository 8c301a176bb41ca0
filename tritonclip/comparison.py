"""`compare`: what a model gains from tritonclip in place of `torch.nn.utils`.

Both clip copies of the model's own gradients. tritonclip's results are verified first: wrong ones
are not timed. Then the calls are timed in turn (`tritonclip.samples`), so that ratios
hold on a machine that does other work meanwhile.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from tritonclip import settings
from tritonclip.backends import choose
from tritonclip.backends.operators import norm_of
from tritonclip.clipping import Parameters
from tritonclip.engine.arguments import LabelOf, checked_parameters, labelled, needs_clip
from tritonclip.engine.plan import result_dtype
from tritonclip.engine.verify import VerificationError, mismatch, raise_mismatches
from tritonclip.functional.formulas import real_of
from tritonclip.integrations.patching import original_of
from tritonclip.messages import in_columns, join_names
from tritonclip.modes import outside_inference, refuse_tracer
from tritonclip.samples import Timed, interleaved, paired, spread
from tritonclip.torch_compat import clip_grad_norm_, clip_grad_value_

Source = Literal["present", "loss", "random"]
LossOf = Callable[[Any], Tensor]

# The calls that are compared: by what they clip, and whether the limit is exceeded.
_Case = tuple[str, bool]
_CLIPPED, _UNCLIPPED = ("by global norm", True), ("by global norm", False)
_BY_VALUE = ("by value", True)
# torch's ways to clip, by their `foreach=`.
_VARIANTS = {"default": None, "foreach": True, "no foreach": False}
# Added to a norm before a limit is divided by it, by torch and by tritonclip.
_EPS = 1e-6
# Fewest and most samples of each call, so that only the time ends them.
_LEAST, _MOST = 5, sys.maxsize
# Where compare measures.
_DEVICES = ("cpu", "cuda")
# Of random gradients.
_SIGMA = 1e-3
_SOURCES: dict[Source, str] = {
    "present": "gradients of the model",
    "loss": "gradients of the loss",
    "random": "random gradients, because the model has none",
}


@dataclass(frozen=True)
class CallTimes:
    """One call, by torch and by tritonclip, on the same gradients.

    Attributes:
        rule: "by global norm" or "by value".
        clipped: whether the limit is below the norm, or below the largest magnitude.
        variant: the fastest of torch's: "default", "foreach" or "no foreach".
        torch_us: its median time in microseconds.
        tritonclip_us: that of tritonclip.
        ratio: torch's time over tritonclip's, the median over paired rounds.
        ratio_lo: the lower quartile.
        ratio_hi: the upper quartile.
        torch_error: of the norm that torch returns, relative to float64; None by value.
        tritonclip_error: that of tritonclip.
    """

    rule: str
    clipped: bool
    variant: str
    torch_us: float
    tritonclip_us: float
    ratio: float
    ratio_lo: float
    ratio_hi: float
    torch_error: float | None
    tritonclip_error: float | None


@dataclass(frozen=True)
class StepTimes:
    """Clipping by global norm within a training step: after a backward pass.

    Attributes:
        step_us: median time of forward, backward and AdamW in microseconds, without clipping.
        torch_us: that of clipping by the variant of torch that was the fastest by itself.
        tritonclip_us: that of tritonclip.
        torch_share: clipping's part of a step, the median over paired rounds.
        torch_share_lo: the lower quartile.
        torch_share_hi: the upper quartile.
        tritonclip_share: clipping's part of a step.
        tritonclip_share_lo: the lower quartile.
        tritonclip_share_hi: the upper quartile.
    """

    step_us: float
    torch_us: float
    tritonclip_us: float
    torch_share: float
    torch_share_lo: float
    torch_share_hi: float
    tritonclip_share: float
    tritonclip_share_lo: float
    tritonclip_share_hi: float


@dataclass(frozen=True)
class Comparison:
    """The answer of :func:`compare`; `print` shows it as a table.

    Attributes:
        calls: by global norm clipped, by global norm unclipped, and by value, which complex
            gradients have not.
        step: the share of a training step; None without a loss.
        source: of the gradients: "present", "loss" or "random".
        n_gradients: how many there are.
        n_elements: their elements.
        dtypes: theirs.
        device: theirs.
        backends: that served tritonclip's calls.
    """

    calls: tuple[CallTimes, ...]
    step: StepTimes | None
    source: Source
    n_gradients: int
    n_elements: int
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    backends: tuple[str, ...]

    def __str__(self) -> str:
        table = in_columns([_HEADS, *map(_cells, self.calls)])
        lines = [self._about(), table, _share(self.step), _LEGEND]
        quartiles = [(call.ratio_lo, call.ratio_hi) for call in self.calls]
        if (step := self.step) is not None:
            quartiles.append((step.torch_share_lo, step.torch_share_hi))
            quartiles.append((step.tritonclip_share_lo, step.tritonclip_share_hi))
        if any(high > _STEADY * low for low, high in quartiles):
            lines.append(_UNSTEADY)
        return "\n".join(lines)

    def _about(self) -> str:
        """What was compared, in a line."""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        n = torch.get_num_threads()
        threads = f" with {n} thread{'s' * (n > 1)}" if self.device.type == "cpu" else ""
        return (
            f"{_SOURCES[self.source]}: {self.n_gradients:,} with {self.n_elements:,} elements, "
            f"{dtypes}\non {self.device}{threads}; tritonclip's backend: {', '.join(self.backends)}"
        )


_HEADS = ("", "torch", "tritonclip", "ratio", "norm off by")
_LEGEND = """\
torch: the fastest of its variants. ratio: torch's time over tritonclip's, median and
quartiles. norm off by: torch's norm and tritonclip's, relative to float64. All elements
of tritonclip's results were compared with float64, too."""
_UNSTEADY = """\
The quartiles of a ratio or a share are far apart, because the machine does other work.
Compare again when it is idle, or for longer (seconds)."""
# Times that an upper quartile may be over the lower one.
_STEADY = 2.0


def _name(rule: str, clipped: bool) -> str:
    return rule if rule == "by value" else f"{rule}, {'clipped' if clipped else 'unclipped'}"


def _cells(call: CallTimes) -> tuple[str, ...]:
    errors = "-"
    if call.torch_error is not None and call.tritonclip_error is not None:
        errors = f"{call.torch_error:.0e}, {call.tritonclip_error:.0e}"
    return (
        _name(call.rule, call.clipped),
        f"{time_text(call.torch_us)} ({call.variant})",
        time_text(call.tritonclip_us),
        f"{call.ratio:.2f}x ({call.ratio_lo:.2f} to {call.ratio_hi:.2f})",
        errors,
    )


def _share(step: StepTimes | None) -> str:
    name = "share of a training step"
    if step is None:
        return (
            f"{name}: not measured, because no loss was given; write\n"
            "compare(model, lambda model: ...), or let MODULE:NAME return (model, loss_of)"
        )
    torchs = step.torch_share, step.torch_share_lo, step.torch_share_hi
    ours = step.tritonclip_share, step.tritonclip_share_lo, step.tritonclip_share_hi
    shares = ["{:.1%} ({:.1%} to {:.1%})".format(*three) for three in (torchs, ours)]
    return (
        f"{name}: torch {shares[0]}, tritonclip {shares[1]},\n"
        f"beside {time_text(step.step_us)} of forward, backward and AdamW"
    )


def time_text(us: float) -> str:
    """A time in microseconds, with its unit."""
    return (
        f"{us:,.1f} us" if us < 100 else f"{us:,.0f} us" if us < 10_000 else f"{us / 1e3:,.1f} ms"
    )


@outside_inference
def compare(
    model: Parameters, loss_of: LossOf | None = None, *, seconds: float = 4.0
) -> Comparison:
    """Compares clipping by `torch.nn.utils` and by tritonclip on the gradients of a model.

    The norm and every element of tritonclip's results are compared with float64 first. Then
    `clip_grad_norm_` and `clip_grad_value_` of both are timed in turn, on the same gradients: by
    global norm with half of the norm as the limit, and with ten times the norm; by value with three
    times the root mean square, or half of the largest magnitude where that is less.

    Example:
        >>> import torch, tritonclip
        >>> model, x = torch.nn.Linear(10, 1), torch.randn(32, 10)
        >>> comparison = tritonclip.compare(
        ...     model, lambda model: model(x).square().mean(), seconds=0.1
        ... )
        >>> [call.rule for call in comparison.calls]
        ['by global norm', 'by global norm', 'by value']
        >>> comparison.step.tritonclip_share < 1
        True

    Nothing of the model changes unless `loss_of` runs it in place of the copy, nor of torch's
    random numbers, even if the call raises or is interrupted. One more copy of the gradients is
    held, and while they are checked two in float64. With `loss_of`, a copy of the model is held as
    well, with gradients and the states of AdamW.

    Args:
        model: as `parameters` for :func:`clip_`; a module with `loss_of`. Parameters with
            `need_clip = False` are left out.
        loss_of: a function of a model, which runs the forward pass and returns the loss. It gets a
            copy of `model`, and is called some dozen times. Its gradients are compared, and
            clipping is timed within training steps of the copy, with AdamW and a learning rate
            of 0. Anything else that it draws from or reads, such as a data loader, goes on. None:
            the gradients that the model has are compared, or random ones if it has none.
        seconds: about how long to take samples. Five rounds are taken in any case: some 20 steps
            with `loss_of`.

    Returns:
        Times, ratios, errors and shares; `print` shows them as a table.

    Raises:
        VerificationError: a result of tritonclip is wrong; names the gradients and both values.
        TypeError: arguments of another kind; gradients that are sparse, DTensors, or other
            subclasses of Tensor; `loss_of` that returns no scalar tensor with a graph.
        ValueError: no parameter with a gradient; gradients that are NaN or inf, that are all 0, or
            that lie on several devices; a loss that does not depend on the copy, or depends on
            other tensors that require a gradient, such as parameters of `model` itself.
        RuntimeError: torch rejects the gradients, or a copy of the model; verification is on.
    """
    refuse_tracer()
    _check_arguments(model, loss_of, seconds)
    if loss_of is None:
        return _compared(*_present_or_random(model), None, seconds / 3)
    assert isinstance(model, Module)
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(sorted(device.index for device in devices)), torch.enable_grad():
        steps = _Steps(_copied(model), loss_of)
        return _compared(steps.gradients(), "loss", steps, seconds / 4)


def _check_arguments(model: object, loss_of: object, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be a positive number, got {seconds!r:.40}")
    if settings.current().verifying:
        raise RuntimeError(
            "verification is on, and a check in float64 would be timed with every call; expected "
            "compare outside of verify() and without TRITONCLIP_VERIFY: it checks results itself"
        )
    if loss_of is not None and not isinstance(model, Module):
        raise TypeError(
            f"with loss_of, model must be a module, which is copied; got {type(model).__name__}"
        )


class _Copies:
    """Copies of gradients, each in the `.grad` of a tensor; `fresh` is never written."""

    def __init__(self, fresh: list[Tensor], label_of: LabelOf) -> None:
        self.fresh, self.label_of = fresh, label_of
        self.device = fresh[0].device
        self._check()
        self.grads = [f.clone() for f in fresh]
        # Nothing reads the tensors that have the gradients: they need no memory but the gradients'.
        self.parameters = [grad.detach().requires_grad_() for grad in self.grads]
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        self.named = [(label_of(i), parameter) for i, parameter in enumerate(self.parameters)]

    def _check(self) -> None:
        devices = {grad.device for grad in self.fresh}
        if len(devices) > 1:
            raise ValueError(
                "compare measures gradients on one device, got "
                f"{', '.join(sorted(map(str, devices)))}; expected the parameters of one of them"
            )
        self.norm = self._norm(2.0)
        dtype = result_dtype(self.fresh)
        if not self.norm < torch.finfo(dtype).max / 100:
            bad = [i for i, f in enumerate(self.fresh) if not bool(f.isfinite().all())]
            got = f"NaN or inf in {join_names([self.label_of(i) for i in bad])}"
            raise ValueError(
                f"gradients must be finite, and their norm within the range of {dtype}, got "
                f"{got if bad else f'a norm of {self.norm:.3g}'}; expected those of a step that "
                "trains"
            )
        if self.norm == 0:
            raise ValueError(
                "all gradients are 0, so that nothing can be clipped; expected those of a step "
                "that trains"
            )

    def _norm(self, norm_type: float) -> float:
        """The norm of pairs of reals, where gradients are complex."""
        return float(norm_of([*map(real_of, self.fresh)], norm_type, torch.float64))

    def refill(self) -> None:
        """Gives all copies their first values again."""
        torch._foreach_copy_(self.grads, self.fresh)

    def free(self) -> None:
        """Gives the memory back."""
        self.fresh, self.grads, self.parameters, self.named = [], [], [], []

    def bound(self) -> float:
        """A limit by value that some elements are beyond."""
        n_elements = sum(f.numel() for f in self.fresh)
        return min(3 * self.norm / math.sqrt(n_elements), self._norm(math.inf) / 2)


def _present_or_random(model: Parameters) -> tuple[_Copies, Source]:
    """Of the gradients that are there; of random ones if there are none."""
    items, label_of = labelled(model)
    if present := _present(items, label_of):
        return present, "present"
    positions = _positions(items, lambda parameter: parameter.requires_grad)
    if not positions:
        raise ValueError(
            f"expected parameters that require a gradient, got none among {len(items)}; pass the "
            "model that is trained, and set requires_grad before"
        )
    parameters = [_plain(items[i], label_of(i)) for i in positions]
    # Equal on every run, and nothing is drawn from torch's random numbers.
    of = {p.device: torch.Generator(p.device).manual_seed(0) for p in parameters}
    fresh = [torch.empty_like(p).normal_(0, _SIGMA, generator=of[p.device]) for p in parameters]
    return _Copies(fresh, lambda i: label_of(positions[i])), "random"


def _present(items: Sequence[Tensor], label_of: LabelOf) -> _Copies | None:
    """Of the gradients that parameters have; None if there are none."""
    positions = _positions(items, lambda parameter: parameter.grad is not None)
    if not positions:
        return None
    fresh = [_plain(items[i].grad, label_of(i)) for i in positions]
    return _Copies(fresh, lambda i: label_of(positions[i]))


def _positions(items: Sequence[Tensor], is_asked: Callable[[Tensor], bool]) -> list[int]:
    """Of the parameters that are to be clipped, each once."""
    first = {id(p): i for i, p in reversed([*enumerate(items)]) if needs_clip(p) and is_asked(p)}
    return sorted(first.values())


def _plain(x: Tensor | None, name: str) -> Tensor:
    """The tensor itself, if torch and tritonclip can both clip one like it."""
    assert x is not None
    is_dense = type(x) in (Tensor, Parameter) and x.layout == torch.strided
    if (
        not is_dense
        or x.device.type not in _DEVICES
        or not (x.is_floating_point() or x.is_complex())
    ):
        raise TypeError(
            f"expected dense floating-point tensors on a CPU or on CUDA, got a {type(x).__name__} "
            f"of {x.dtype}, {x.layout}, on {x.device} for the gradient of {name}"
        )
    return x.detach()


def _copied(model: Module) -> Module:
    checked_parameters(model)
    twin = copy.deepcopy(model)
    for parameter, copied in zip(model.parameters(), twin.parameters(), strict=True):
        # An attribute of Python, which copies do not have.
        if not needs_clip(parameter):
            copied.need_clip = False  # type: ignore[attr-defined]
    return twin


class _Steps:
    """Training steps of a copy of the user's model, which do not move it."""

    def __init__(self, model: Module, loss_of: LossOf) -> None:
        self._model, self._loss_of = model, loss_of

    def gradients(self) -> _Copies:
        """Of the first loss; the model loses them."""
        loss = self._loss()
        if others := self._others(loss):
            # Leaves that a loss makes, as inputs that require a gradient, are new in each call.
            del loss
            loss = self._loss()
            again = {*map(id, _leaves(loss))}
            if kept := [tuple(leaf.shape) for leaf in others if id(leaf) in again]:
                raise ValueError(
                    "the loss depends on tensors that are not of the model that loss_of got and "
                    f"require a gradient, {len(kept)} in number, the first of shape {kept[0]}; "
                    "their gradients would change. Expected all parameters in one module, a loss "
                    "of the copy that loss_of gets, and detach() for other tensors"
                )
        loss.backward()
        copies = _present(*labelled(self._model))
        if copies is None:
            raise ValueError(
                "every parameter that the loss depends on has need_clip = False; expected one that "
                "is clipped"
            )
        self._model.zero_grad()
        return copies

    def _loss(self) -> Tensor:
        loss = self._loss_of(self._model)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_of must return the loss, a tensor, got {type(loss).__name__}")
        return loss

    def _others(self, loss: Tensor) -> list[Tensor]:
        """The leaves that are not of the copy; raises if no parameter of it is among them."""
        parameters = {*map(id, self._model.parameters())}
        reached = [*_leaves(loss)]
        if not parameters.intersection(map(id, reached)):
            raise ValueError(
                "the loss depends on no parameter of the model that loss_of got; expected a loss "
                "of that model, which is a copy: lambda model: model(x).square().mean(), and "
                "use_reentrant=False where torch.utils.checkpoint runs the whole model, because "
                "reentrant checkpointing hides its parameters"
            )
        ids = parameters.union(map(id, self._model.buffers()))
        return [leaf for leaf in reached if id(leaf) not in ids]

    def measure(
        self, limit: float, variant: str, device: torch.device, seconds: float
    ) -> StepTimes:
        """Times steps, and both clips after a backward pass of their own."""
        model, foreach = self._model, _VARIANTS[variant]
        trained = [p for p in model.parameters() if p.requires_grad]
        # torch clips parameters with need_clip = False, too.
        clipped = [p for p in trained if needs_clip(p)]
        # The usual 1e-8 is 0 in float16, where an update of 0 / 0 would make parameters NaN.
        eps = 1e-4 if any(p.dtype == torch.float16 for p in trained) else 1e-8
        optimizer = torch.optim.AdamW(trained, lr=0.0, eps=eps)

        def step() -> None:
            self._backward()
            optimizer.step()

        def clip_by_torch() -> None:
            original_of(torch.nn.utils.clip_grad_norm_)(clipped, limit, foreach=foreach)

        def clip() -> None:
            clip_grad_norm_(clipped, limit)

        timed = [Timed(step), Timed(clip_by_torch, self._backward), Timed(clip, self._backward)]
        found = interleaved(
            timed, device, _LEAST, seconds, most_samples=_MOST, most_calls=1, warm_up=2
        )
        steps, torchs, ours = (samples.walls for samples in found)
        return StepTimes(
            step_us=statistics.median(steps),
            torch_us=statistics.median(torchs),
            tritonclip_us=statistics.median(ours),
            **spread("torch_share", _shares(torchs, steps)),
            **spread("tritonclip_share", _shares(ours, steps)),
        )

    def _backward(self) -> None:
        self._model.zero_grad()
        self._loss_of(self._model).backward()


def _shares(clips: Sequence[float], steps: Sequence[float]) -> list[float]:
    return paired(clips, [clip + step for clip, step in zip(clips, steps, strict=True)])


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaves to which a backward pass from a tensor adds gradients."""
    if loss.grad_fn is None:
        yield from [loss] if loss.requires_grad else []
        return
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        waiting += following


def _compared(copies: _Copies, source: Source, steps: _Steps | None, seconds: float) -> Comparison:
    """Compares all calls; `seconds` are of each."""
    fresh, device, norm = copies.fresh, copies.device, copies.norm
    dtypes = tuple(dict.fromkeys(f.dtype for f in fresh))
    n_gradients, n_elements = len(fresh), sum(f.numel() for f in fresh)
    limits = {_CLIPPED: norm / 2, _UNCLIPPED: 10 * (norm + _EPS)}
    if not any(dtype.is_complex for dtype in dtypes):
        limits[_BY_VALUE] = copies.bound()
    calls = tuple(_call_times(case, limit, copies, seconds) for case, limit in limits.items())
    backends = dict.fromkeys(choose.backend_name(device, d.to_real()) for d in dtypes)
    # For the states of the optimizer.
    copies.free()
    del fresh
    step = None
    if steps is not None:
        step = steps.measure(limits[_CLIPPED], calls[0].variant, device, seconds)
    return Comparison(calls, step, source, n_gradients, n_elements, dtypes, device, tuple(backends))


def _call_times(case: _Case, limit: float, copies: _Copies, seconds: float) -> CallTimes:
    """Checks tritonclip, then times it and the variants of torch in turn."""
    rule, clipped = case
    clip = clip_grad_value_ if case == _BY_VALUE else clip_grad_norm_
    ours = partial(clip, copies.parameters, limit)
    norm = _verified(case, copies, ours, partial(clip, copies.named, limit))
    torchs, norms = _torchs(original_of(getattr(torch.nn.utils, clip.__name__)), copies, limit)
    copies.refill()
    prepare = copies.refill if clipped else None
    timed = [Timed(call, prepare) for call in (ours, *torchs.values())]
    found = interleaved(timed, copies.device, _LEAST, seconds, most_samples=_MOST)
    our_walls, *others = (samples.walls for samples in found)
    walls = dict(zip(torchs, others, strict=True))
    best = min(walls, key=lambda name: statistics.median(walls[name]))
    return CallTimes(
        rule=rule,
        clipped=clipped,
        variant=best,
        torch_us=statistics.median(walls[best]),
        tritonclip_us=statistics.median(our_walls),
        **spread("ratio", paired(walls[best], our_walls)),
        torch_error=_error(norms[best], copies),
        tritonclip_error=_error(norm, copies),
    )


def _torchs(
    clip: Callable[..., Any], copies: _Copies, limit: float
) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """The variants of torch that take these gradients, and the norm that each returns."""
    calls, norms = dict[str, Callable[[], Any]](), dict[str, Any]()
    faults: list[Exception] = []
    for name, foreach in _VARIANTS.items():
        call = partial(clip, copies.parameters, limit, foreach=foreach)
        copies.refill()
        try:
            norms[name], calls[name] = call(), call
        except (RuntimeError, TypeError) as error:
            faults.append(error)
    if not calls:
        raise RuntimeError(
            f"torch.nn.utils.{clip.__name__} rejects these gradients, so that there is nothing to "
            f"compare with: {faults[0]}"
        )
    return calls, norms


def _error(norm: Tensor | None, copies: _Copies) -> float | None:
    return None if norm is None else abs(float(norm) / copies.norm - 1)


def _verified(
    case: _Case, copies: _Copies, ours: Callable[[], Any], named: Callable[[], Any]
) -> Tensor | None:
    """The norm before clipping by `named`, which is verified; `ours`, which is timed, agrees."""
    copies.refill()
    try:
        with settings.verify():
            norm: Tensor | None = named()
        expected = [grad.clone() for grad in copies.grads]
        copies.refill()
        found = ours()
        wrong = [] if norm is None else mismatch("norm", found, norm, found != norm)
        for i, (grad, right) in enumerate(zip(copies.grads, expected, strict=True)):
            wrong += mismatch(copies.label_of(i), grad, right, grad != right)
        raise_mismatches(wrong)
    except VerificationError as error:
        raise VerificationError(f"{_name(*case)}: {error}") from None
    return norm
