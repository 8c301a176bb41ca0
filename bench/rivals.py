"""What is compared: tritonclip, and what a user of PyTorch would pick instead.

A rival is asked for an `Entry` for given gradients, rule and limit: what is timed is its `call`,
nothing else. Rivals from other frameworks, on arrays of their own, are in `foreign`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import tritonclip
from bench.gradients import Gradients

# Compilers unroll a list: a list of 10,000 takes them minutes.
MOST_COMPILED = 1000
# Norms of others may be off by this much: torch's own are by up to 1% on a CPU. `norm_error` of a
# row says by how much.
LENIENT = 0.05
OURS = 1e-6


class Entry:
    """One rival, ready to clip given gradients.

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
class Rival:
    """Something that clips.

    Attributes:
        name: what rows call it.
        make: gets it ready for gradients, a rule and a limit.
        passes: by rule that it serves, how many times it reads or writes all gradients; None where
            that depends on the gradients (`measure.bytes_moved`).
        baseline: one of torch's ways to clip, the best of which the others are divided by.
        clips: false where it only measures.
        compiles: left out for lists of more than MOST_COMPILED tensors.
        flat: it sees one buffer instead of many gradients.
        tolerance: largest relative error of norms and gradients that is let pass.
        absent: why it cannot run on a device with a dtype; None where it can.
    """

    name: str
    make: Make
    passes: Mapping[str, int | None]
    baseline: bool = False
    clips: bool = True
    compiles: bool = False
    flat: bool = False
    tolerance: float = LENIENT
    absent: Callable[[torch.device, str], str | None] = field(default=lambda device, dtype: None)


def _numbers(output: Any) -> list[float]:
    """Norms as a 0-d or 1-d tensor, or one tensor each."""
    if isinstance(output, Tensor):
        return [float(n) for n in output.detach().double().reshape(-1).tolist()]
    return [float(norm) for norm in output]


def _entry(gradients: Gradients, rule: str, call: Callable[[], Any]) -> Entry:
    return Entry(gradients, call, None if rule == "value" else _numbers)


def _our_rule(rule: str, limit: float) -> Any:
    rules: dict[str, Any] = {
        "norm": tritonclip.ClipByGlobalNorm,
        "value": tritonclip.ClipByValue,
        "gradient": tritonclip.ClipByNorm,
    }
    return rules[rule](limit)


def _ours(gradients: Gradients, rule: str, limit: float) -> Entry:
    parameters, clip = gradients.parameters, _our_rule(rule, limit)
    return _entry(gradients, rule, lambda: tritonclip.clip_(parameters, clip))


def _flat(gradients: Gradients, rule: str, limit: float) -> Entry:
    own = Gradients(gradients.list, gradients.dtype, gradients.device, like=gradients)
    flat = tritonclip.FlatGradients(own.parameters)
    own.refill()
    clip = _our_rule(rule, limit)
    return _entry(own, rule, lambda: tritonclip.clip_(flat, clip))


def _torch_call(parameters: list[Tensor], rule: str, limit: float, foreach: bool | None) -> Any:
    """Each gradient by its own norm takes a call each: torch has no function for it."""
    if rule == "norm":
        return clip_grad_norm_(parameters, limit, foreach=foreach)
    if rule == "value":
        return clip_grad_value_(parameters, limit, foreach=foreach)
    return [clip_grad_norm_(p, limit, foreach=foreach) for p in parameters]


def _foreach_each(gradients: list[Tensor], limit: float) -> Tensor:
    """Each gradient by its own norm, as someone writes it who knows torch's foreach functions."""
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (limit / (norms + 1e-6)).clamp_(max=1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))
    return norms


def _torch(foreach: bool | None) -> Make:
    def make(gradients: Gradients, rule: str, limit: float) -> Entry:
        parameters = gradients.parameters
        if rule == "gradient" and foreach:
            return _entry(gradients, rule, lambda: _foreach_each(gradients.grads, limit))
        return _entry(gradients, rule, lambda: _torch_call(parameters, rule, limit, foreach))

    return make


def _compiled_entry(gradients: Gradients, rule: str, call: Callable[[], Any]) -> Entry:
    entry = _entry(gradients, rule, call)
    # torch.compile makes its own graphs, with mode="reduce-overhead"; that is not compared.
    entry.graphable = False
    return entry


def _ours_compiled(gradients: Gradients, rule: str, limit: float) -> Entry:
    parameters, clip = gradients.parameters, _our_rule(rule, limit)
    call = torch.compile(lambda: tritonclip.clip_(parameters, clip), fullgraph=True)
    return _compiled_entry(gradients, rule, call)


def _torch_compiled(gradients: Gradients, rule: str, limit: float) -> Entry:
    parameters = gradients.parameters
    call = torch.compile(lambda: _torch_call(parameters, rule, limit, None), fullgraph=True)
    return _compiled_entry(gradients, rule, call)


def _torch_norm(gradients: Gradients, rule: str, limit: float) -> Entry:
    grads = gradients.grads
    return _entry(gradients, rule, lambda: get_total_norm(grads))


def _no_flat(device: torch.device, dtype: str) -> str | None:
    return None if hasattr(tritonclip, "FlatGradients") else "this version has no FlatGradients"


ALWAYS = {"norm": 3, "gradient": 3}
DEPENDS: dict[str, int | None] = {"norm": None, "value": None, "gradient": None}

RIVALS = (
    Rival("tritonclip", _ours, DEPENDS, tolerance=OURS),
    Rival("tritonclip flat", _flat, DEPENDS, flat=True, tolerance=OURS, absent=_no_flat),
    Rival(
        "tritonclip compiled",
        _ours_compiled,
        DEPENDS,
        compiles=True,
        tolerance=OURS,
    ),
    # Foreach functions clamp twice; a clamp with two bounds reads and writes once.
    Rival("torch", _torch(None), {**ALWAYS, "value": 4}, baseline=True),
    Rival("torch foreach", _torch(True), {**ALWAYS, "value": 4}, baseline=True),
    Rival("torch no foreach", _torch(False), {**ALWAYS, "value": 2}, baseline=True),
    Rival(
        "torch compiled",
        _torch_compiled,
        {**ALWAYS, "value": 2},
        baseline=True,
        compiles=True,
    ),
    Rival("torch norm only", _torch_norm, {"norm": 1}, clips=False),
)
