"""What is compared: tritonclip, and what a user of PyTorch would pick instead.

A provider is asked for an `Entry` for given gradients, rule and limit; nothing but its `call` is
timed. Providers from other frameworks, on arrays of theirs, are in `frameworks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import tritonclip
from bench.accuracy import EPS, OURS, Gradients

# Compilers unroll a list: a list of 10,000 takes them minutes.
MOST_COMPILED = 1000
# Norms of others may be off by this much: torch's are by up to 1% on a CPU. `norm_error` of a row
# says by how much.
LENIENT = 0.05
# Lists of more bytes stand beside torch.sum over as many.
SUMMED = 2**23


class Entry:
    """One provider, ready to clip given gradients.

    Args:
        gradients: what it clips.
        call: clips and returns what it measured, or None; all that is timed.
        norms: numbers from what `call` returned; none where it measures nothing.
    """

    # It works on torch's current stream: events time it.
    on_torch_stream = True
    # A CUDA graph can capture it.
    graphable = True

    def __init__(
        self,
        gradients: Gradients,
        call: Callable[[], Any],
        norms: Callable[[Any], list[float]] | None = None,
    ) -> None:
        self.gradients = gradients
        self.call = call
        self._norms = norms

    def refill(self) -> None:
        """Makes the gradients what they were before any clipping."""
        self.gradients.refill()

    def grads(self, output: Any) -> list[Tensor]:
        """The gradients after `call` returned `output`."""
        return self.gradients.grads

    def norms(self, output: Any) -> list[float]:
        """The norms before clipping that `call` returned; empty where it returns none."""
        return [] if self._norms is None else self._norms(output)


Make = Callable[[Gradients, str, float], Entry]


@dataclass(frozen=True)
class Provider:
    """Something that clips.

    Attributes:
        name: in rows and on the command line.
        make: gets it ready for gradients, a rule and a limit.
        passes: by rule that it serves, how many times it reads or writes all gradients; None where
            that depends on the gradients (`speed.bytes_moved`).
        baseline: one of torch's ways to clip, the best of which the others are divided by.
        clips: false where it only measures.
        compiles: left out for lists of more than MOST_COMPILED tensors.
        flat: it sees one buffer instead of many gradients.
        tolerance: largest relative error of norms and gradients that is let pass.
        eps: what it adds to a norm.
        absent: why it cannot run on gradients; None where it can.
    """

    name: str
    make: Make
    passes: Mapping[str, int | None]
    baseline: bool = False
    clips: bool = True
    compiles: bool = False
    flat: bool = False
    tolerance: float = LENIENT
    eps: float = EPS
    absent: Callable[[Gradients], str | None] = field(default=lambda gradients: None)

    def why_absent(self, gradients: Gradients) -> str | None:
        """Why it is not compared on these gradients; None where it is."""
        n = len(gradients.fresh)
        if self.compiles and n > MOST_COMPILED:
            return f"compiling a list of {n} takes minutes"
        return self.absent(gradients)


def _numbers(output: Any) -> list[float]:
    """Norms as a 0-d or 1-d tensor, or one tensor each."""
    if isinstance(output, Tensor):
        return [float(n) for n in output.detach().double().reshape(-1).tolist()]
    return [float(norm) for norm in output]


def _sgd(gradients: Gradients) -> torch.optim.Optimizer:
    with torch.no_grad():
        torch._foreach_zero_(gradients.parameters)
    return torch.optim.SGD(gradients.parameters, lr=1e-3, foreach=True)


def _entry(gradients: Gradients, rule: str, call: Callable[[], Any]) -> Entry:
    if rule != "step":
        return Entry(gradients, call, None if rule == "value" else _numbers)
    sgd = _sgd(gradients)

    def step() -> Any:
        norm = call()
        sgd.step()
        return norm

    return Entry(gradients, step, _numbers)


def our_rule(rule: str, limit: float) -> Any:
    """A rule of the library by its name in rows."""
    rules: dict[str, Any] = {
        "norm": tritonclip.ClipByGlobalNorm,
        "step": tritonclip.ClipByGlobalNorm,
        "value": tritonclip.ClipByValue,
        "gradient": tritonclip.ClipByNorm,
    }
    return rules[rule](limit)


def _ours(gradients: Gradients, rule: str, limit: float) -> Entry:
    parameters, clip = gradients.parameters, our_rule(rule, limit)
    return _entry(gradients, rule, lambda: tritonclip.clip_(parameters, clip))


def _flat(gradients: Gradients, rule: str, limit: float) -> Entry:
    own = Gradients(gradients.workload, gradients.dtype, gradients.device, like=gradients)
    flat = tritonclip.FlatGradients(own.parameters)
    own.refill()
    clip = our_rule(rule, limit)
    return _entry(own, rule, lambda: tritonclip.clip_(flat, clip))


def _wrapper(gradients: Gradients, rule: str, limit: float) -> Entry:
    wrapper = tritonclip.ClippedOptimizer(_sgd(gradients), our_rule(rule, limit))

    def step() -> Tensor:
        wrapper.step()
        return wrapper.stats.last_norm

    return Entry(gradients, step, _numbers)


def _torch_call(parameters: list[Tensor], rule: str, limit: float, foreach: bool | None) -> Any:
    """Each gradient by its own norm takes a call each: torch has no function for it."""
    if rule == "value":
        return clip_grad_value_(parameters, limit, foreach=foreach)
    if rule == "gradient":
        return [clip_grad_norm_(p, limit, foreach=foreach) for p in parameters]
    return clip_grad_norm_(parameters, limit, foreach=foreach)


def _foreach_each(gradients: list[Tensor], limit: float) -> Tensor:
    """Each gradient by its own norm, as someone writes it who knows torch's foreach functions."""
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (limit / (norms + EPS)).clamp_(max=1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))
    return norms


def _torch(foreach: bool | None) -> Make:
    def make(gradients: Gradients, rule: str, limit: float) -> Entry:
        parameters = gradients.parameters
        if rule == "gradient" and foreach:
            return _entry(gradients, rule, lambda: _foreach_each(gradients.grads, limit))
        return _entry(gradients, rule, lambda: _torch_call(parameters, rule, limit, foreach))

    return make


def _compiled(make: Make) -> Make:
    def compiled(gradients: Gradients, rule: str, limit: float) -> Entry:
        entry = make(gradients, rule, limit)
        entry.call = torch.compile(entry.call, fullgraph=True)
        # torch.compile makes CUDA graphs itself, with mode="reduce-overhead": not compared.
        entry.graphable = False
        return entry

    return compiled


def _torch_norm(gradients: Gradients, rule: str, limit: float) -> Entry:
    grads = gradients.grads
    return _entry(gradients, rule, lambda: get_total_norm(grads))


def _torch_sum(gradients: Gradients, rule: str, limit: float) -> Entry:
    """The time to read as many bytes: as float32, whatever the dtype of the gradients."""
    bytes_as_float32 = torch.ones(gradients.n_bytes // 4, device=gradients.device)
    return Entry(gradients, lambda: torch.sum(bytes_as_float32))


def _no_sum(gradients: Gradients) -> str | None:
    return None if gradients.n_bytes > SUMMED else "compared with lists over 8 MiB only"


DEPENDS: dict[str, int | None] = {"norm": None, "value": None, "gradient": None, "step": None}
ALWAYS = {**DEPENDS, "norm": 3, "gradient": 3}

PROVIDERS = (
    Provider("tritonclip", _ours, DEPENDS, tolerance=OURS),
    Provider("tritonclip flat", _flat, DEPENDS, flat=True, tolerance=OURS),
    Provider("tritonclip wrapper", _wrapper, {"step": None}, tolerance=OURS),
    Provider("tritonclip compiled", _compiled(_ours), DEPENDS, compiles=True, tolerance=OURS),
    # Foreach functions clamp twice; a clamp with two bounds reads and writes once.
    Provider("torch", _torch(None), {**ALWAYS, "value": 4}, baseline=True),
    Provider("torch foreach", _torch(True), {**ALWAYS, "value": 4}, baseline=True),
    Provider("torch no foreach", _torch(False), {**ALWAYS, "value": 2}, baseline=True),
    Provider("torch compiled", _compiled(_torch(None)), {**ALWAYS, "value": 2}, compiles=True),
    Provider("torch norm only", _torch_norm, {"norm": 1}, clips=False),
    Provider(
        "torch sum",
        _torch_sum,
        {"norm": 1, "value": 1, "gradient": 1},
        clips=False,
        absent=_no_sum,
    ),
)
