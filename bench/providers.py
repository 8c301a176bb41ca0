"""Providers that are compared: tritonclip, and the functions that users of PyTorch have instead.

A provider is asked for an `Entry` for given gradients, rule and limit; nothing but its `call` is
timed. Those of IN_PLACE change the gradients; those of OUT_OF_PLACE return new ones, where the
baselines are idioms of users of PyTorch, as nothing of torch.nn.utils clips out of place.
Providers from other frameworks, on arrays of theirs, are in `frameworks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import tritonclip
from bench.accuracy import EPS, OURS, Gradients
from bench.workloads import CLIPS, RULES
from tritonclip import functional

# Compilers unroll a list: a list of 10,000 takes them minutes.
MOST_COMPILED = 1000
# Norms of others may be off by this much: torch's are by up to 1% on a CPU. `norm_error` of a row
# says by how much.
LENIENT = 0.05
# Lists of more bytes stand beside torch.sum over as many.
SUMMED = 2**23


@dataclass
class Entry:
    """One provider, ready to clip given gradients in place.

    Attributes:
        gradients: the gradients that it clips.
        call: clips and returns the norms that it measured, or None; all that is timed.
        graphable: a CUDA graph can capture it.
        on_torch_stream: it works on torch's current stream: events time it.
    """

    gradients: Gradients
    call: Callable[[], Any]
    graphable: bool = True
    on_torch_stream: bool = True

    def refill(self) -> None:
        """Gives the gradients their values from before any clipping."""
        self.gradients.refill()

    def grads(self, output: Any) -> list[Tensor]:
        """The gradients after `call` returned `output`."""
        return self.gradients.grads

    def norms(self, output: Any) -> list[float]:
        """The norms before clipping that `call` returned; empty where it returned none."""
        if isinstance(output, Tensor):
            return output.detach().double().reshape(-1).tolist()
        return [] if output is None else [float(norm) for norm in output]


class OutOfPlace(Entry):
    """An entry whose call returns new gradients, and norms or None."""

    def refill(self) -> None:
        """Nothing to do: no call writes to its gradients."""

    def grads(self, output: Any) -> list[Tensor]:
        """The new gradients."""
        return list(output[0])

    def norms(self, output: Any) -> list[float]:
        """The norms beside them."""
        return super().norms(output[1])


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
        tolerance: largest relative error of norms and gradients that is let pass.
        eps: added to a norm before a limit is divided by it.
        absent: why it cannot run on gradients; None where it can.
    """

    name: str
    make: Make
    passes: Mapping[str, int | None]
    baseline: bool = False
    clips: bool = True
    compiles: bool = False
    tolerance: float = LENIENT
    eps: float = EPS
    absent: Callable[[Gradients], str | None] = lambda gradients: None

    def why_absent(self, gradients: Gradients) -> str | None:
        """Why it is not compared on these gradients; None where it is."""
        n = len(gradients.fresh)
        if self.compiles and n > MOST_COMPILED:
            return f"compiling a list of {n} takes minutes"
        return self.absent(gradients)


def _sgd(gradients: Gradients) -> torch.optim.Optimizer:
    with torch.no_grad():
        torch._foreach_zero_(gradients.parameters)
    return torch.optim.SGD(gradients.parameters, lr=1e-3, foreach=True)


def _in_place(gradients: Gradients, rule: str, clip: Callable[[], Any]) -> Entry:
    """An entry that clips, and then takes a step where the rule says so."""
    if rule != "step":
        return Entry(gradients, clip)
    sgd = _sgd(gradients)

    def step() -> Any:
        norm = clip()
        sgd.step()
        return norm

    return Entry(gradients, step)


OUR_RULES: dict[str, Any] = {
    "norm": tritonclip.ClipByGlobalNorm,
    "step": tritonclip.ClipByGlobalNorm,
    "value": tritonclip.ClipByValue,
    "gradient": tritonclip.ClipByNorm,
}


def _ours(gradients: Gradients, rule: str, limit: float) -> Entry:
    parameters, clip = gradients.parameters, OUR_RULES[rule](limit)
    return _in_place(gradients, rule, lambda: tritonclip.clip_(parameters, clip))


def _flat(gradients: Gradients, rule: str, limit: float) -> Entry:
    own = Gradients(gradients.workload, gradients.dtype, gradients.device, like=gradients)
    flat, clip = tritonclip.FlatGradients(own.parameters), OUR_RULES[rule](limit)
    own.refill()
    return _in_place(own, rule, lambda: tritonclip.clip_(flat, clip))


def _wrapper(gradients: Gradients, rule: str, limit: float) -> Entry:
    wrapper = tritonclip.ClippedOptimizer(_sgd(gradients), OUR_RULES[rule](limit))

    def step() -> Tensor:
        wrapper.step()
        return wrapper.stats.last_norm

    return Entry(gradients, step)


def _torch(foreach: bool | None) -> Make:
    def make(gradients: Gradients, rule: str, limit: float) -> Entry:
        return _in_place(gradients, rule, lambda: _torch_clip(gradients, rule, limit, foreach))

    return make


def _torch_clip(gradients: Gradients, rule: str, limit: float, foreach: bool | None) -> Any:
    """Each gradient by its own norm takes a call each, or the foreach functions that torch uses."""
    parameters = gradients.parameters
    if rule == "value":
        return clip_grad_value_(parameters, limit, foreach=foreach)
    if rule != "gradient":
        return clip_grad_norm_(parameters, limit, foreach=foreach)
    if not foreach:
        return [clip_grad_norm_(p, limit, foreach=foreach) for p in parameters]
    # From the parameters, as all that are compared.
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(grads))
    factors = (limit / (norms + EPS)).clamp_(max=1.0)
    torch._foreach_mul_(grads, list(factors.unbind()))
    return norms


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
    return Entry(gradients, lambda: get_total_norm(grads))


def _torch_sum(gradients: Gradients, rule: str, limit: float) -> Entry:
    """The time to read as many bytes: as float32, whatever the dtype of the gradients."""
    bytes_as_float32 = torch.ones(gradients.n_bytes // 4, device=gradients.device)

    def call() -> None:
        torch.sum(bytes_as_float32)

    return Entry(gradients, call)


def _no_sum(gradients: Gradients) -> str | None:
    return None if gradients.n_bytes > SUMMED else "compared with lists over 8 MiB only"


# New gradients, and norms where any were measured.
Clipped = tuple[Sequence[Tensor], Tensor | None]


def _out_of_place(clip: Callable[[list[Tensor], str, float], Clipped]) -> Make:
    def make(gradients: Gradients, rule: str, limit: float) -> Entry:
        return OutOfPlace(gradients, partial(clip, gradients.grads, rule, limit))

    return make


def _functional(grads: list[Tensor], rule: str, limit: float) -> Clipped:
    if rule == "norm":
        return functional.clip_by_global_norm(grads, limit)
    if rule == "value":
        return functional.clip_by_value(grads, -limit, limit), None
    return functional.clip_by_norm(grads, limit), None


def _foreach(grads: list[Tensor], rule: str, limit: float) -> Clipped:
    """As someone writes it who knows torch's foreach functions."""
    if rule == "value":
        return torch._foreach_clamp_max(torch._foreach_clamp_min(grads, -limit), limit), None
    norms = torch.stack(torch._foreach_norm(grads))
    if rule == "gradient":
        factors = (limit / norms).clamp_(max=1.0)
        return torch._foreach_mul(grads, list(factors.unbind())), norms
    norm = torch.linalg.vector_norm(norms)
    return torch._foreach_mul(grads, (limit / norm).clamp(max=1.0)), norm


def _loop(grads: list[Tensor], rule: str, limit: float) -> Clipped:
    """As someone writes it first: an expression for each gradient."""
    if rule == "value":
        return [grad.clamp(-limit, limit) for grad in grads], None
    if rule == "gradient":
        return [grad * (limit / grad.norm()).clamp(max=1.0) for grad in grads], None
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    coefficient = (limit / norm).clamp(max=1.0)
    return [grad * coefficient for grad in grads], norm


DEPENDS: dict[str, int | None] = dict.fromkeys(RULES)
# Measured, then read and written; a clamp with two bounds reads and writes once.
ONCE = {**DEPENDS, "norm": 3, "value": 2, "gradient": 3}
# Foreach functions clamp twice.
TWICE = {**ONCE, "value": 4}
IN_PLACE = (
    Provider("tritonclip", _ours, DEPENDS, tolerance=OURS),
    Provider("tritonclip flat", _flat, DEPENDS, tolerance=OURS),
    Provider("tritonclip wrapper", _wrapper, {"step": None}, tolerance=OURS),
    Provider("tritonclip compiled", _compiled(_ours), DEPENDS, compiles=True, tolerance=OURS),
    Provider("torch", _torch(None), TWICE, baseline=True),
    Provider("torch foreach", _torch(True), TWICE, baseline=True),
    Provider("torch no foreach", _torch(False), ONCE, baseline=True),
    Provider("torch compiled", _compiled(_torch(None)), ONCE, compiles=True),
    Provider("torch norm only", _torch_norm, {"norm": 1}, clips=False),
    Provider("torch sum", _torch_sum, dict.fromkeys(CLIPS, 1), clips=False, absent=_no_sum),
)
OUT_OF_PLACE = (
    Provider("tritonclip", _out_of_place(_functional), ONCE, tolerance=OURS, eps=0.0),
    Provider("torch foreach", _out_of_place(_foreach), TWICE, baseline=True, eps=0.0),
    Provider("torch loop", _out_of_place(_loop), ONCE, baseline=True, eps=0.0),
)
