"""Providers that are compared: tritonclip, and the functions that users of PyTorch have instead.

A provider is asked for an `Entry` for given gradients, rule and limit; nothing but its `call` is
timed. Those of IN_PLACE change the gradients; those of OUT_OF_PLACE return new ones, where the
baselines are idioms of users of PyTorch, as nothing of torch.nn.utils clips out of place.
Providers from other frameworks, on arrays of theirs, are in `frameworks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import tritonclip
from bench.accuracy import EPS, NORMS, OURS, Gradients
from bench.workloads import CLIPS, DTYPES, RULES, TWO, Workload
from tritonclip import functional

# Compilers unroll a list: one of 10,000 takes them minutes.
MOST_COMPILED = 1000
# Norms of others may be off by this much, torch's are by up to 1% on a CPU: see `norm_error`.
LENIENT = 0.05
# Lists of so many bytes and more stand beside torch.sum over as many.
SUMMED = 2**23 + 1
BOTH = {"cpu": DTYPES, "cuda": DTYPES}


@dataclass
class Entry:
    """One provider, ready to clip given gradients."""

    gradients: Gradients
    # All that is timed. In place it returns norms or None; out of place, new gradients and these.
    call: Callable[[], Any]
    graphable: bool = True  # A CUDA graph can capture it.
    out_of_place: bool = False  # It never writes to its gradients.
    on_torch_stream: bool = True  # It works on torch's current stream: events time it.

    def refill(self) -> None:
        """Gives the gradients their values from before any clipping, where a call writes them."""
        if not self.out_of_place:
            self.gradients.refill()

    def result(self, output: Any) -> tuple[list[Tensor], list[float]]:
        """Gradients and norms after `call` returned `output`; no norms where it returned none."""
        grads, norms = output if self.out_of_place else (self.gradients.grads, output)
        norms = norms.detach().flatten() if isinstance(norms, Tensor) else norms or ()
        return list(grads), [float(norm) for norm in norms]


# From gradients, a rule and a limit.
Make = Callable[[Gradients, str, float], Entry]


class Provider(NamedTuple):
    """Something that clips."""

    name: str
    make: Make
    # By rule that it serves, how many times it reads or writes all gradients; None where that
    # depends on the gradients (`speed.bytes_moved`).
    passes: Mapping[str, int | None]
    baseline: bool = False  # One of torch's ways, the best of which the others are divided by.
    clips: bool = True  # Else it only measures.
    compiles: bool = False  # Left out for lists of more than MOST_COMPILED tensors.
    least_bytes: int = 0  # Left out for lists of fewer.
    eps: float = EPS  # Added to a norm before a limit is divided by it.
    modules: Sequence[str] = ()  # All that it needs beside torch.
    dtypes: Mapping[str, Sequence[str]] = BOTH  # Compared in these, by type of device.

    @property
    def tolerance(self) -> float:
        """Largest relative error of norms and gradients that is let pass."""
        return OURS if self.name.startswith("tritonclip") else LENIENT

    def why_absent(self, workload: Workload, dtype: str, device: str) -> str | None:
        """Why it is not compared on a list of gradients; None where it is."""
        n = len(workload.shapes)
        # The search for a module within a package imports the package.
        missing = [m for m in self.modules if not (find_spec(m.split(".")[0]) and find_spec(m))]
        reasons = {
            f"{', '.join(missing)} not installed": missing,
            f"not compared in {dtype} on {device}": dtype not in self.dtypes.get(device, ()),
            f"compiling a list of {n} takes minutes": self.compiles and n > MOST_COMPILED,
            "compared with lists over 8 MiB only": workload.n_bytes(dtype) < self.least_bytes,
        }
        return next((f"{self.name}: {why}" for why, holds in reasons.items() if holds), None)


def sgd_of(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """SGD of zeros."""
    with torch.no_grad():
        torch._foreach_zero_(parameters)
    return torch.optim.SGD(parameters, lr=1e-3, foreach=True)


def _in_place(gradients: Gradients, rule: str, clip: Callable[[], Any]) -> Entry:
    """An entry that clips, and then takes a step where the rule says so."""
    if rule != "step":
        return Entry(gradients, clip)
    sgd = sgd_of(gradients.parameters)

    def step() -> Any:
        norm = clip()
        sgd.step()
        return norm

    return Entry(gradients, step)


BY_NORM: Any = tritonclip.ClipByGlobalNorm
OUR_RULES = {"norm": BY_NORM, "step": BY_NORM, "largest": partial(BY_NORM, norm_type=math.inf)}
OUR_RULES |= {"value": tritonclip.ClipByValue, "gradient": tritonclip.ClipByNorm}


def _ours(gradients: Gradients, rule: str, limit: float) -> Entry:
    parameters, clip = gradients.parameters, OUR_RULES[rule](limit)
    return _in_place(gradients, rule, lambda: tritonclip.clip_(parameters, clip))


def _flat(gradients: Gradients, rule: str, limit: float) -> Entry:
    own = copy(gradients)
    own.allocate()
    flat, clip = tritonclip.FlatGradients(own.parameters), OUR_RULES[rule](limit)
    own.refill()
    return _in_place(own, rule, lambda: tritonclip.clip_(flat, clip))


def _wrapper(gradients: Gradients, rule: str, limit: float) -> Entry:
    wrapper = tritonclip.ClippedOptimizer(sgd_of(gradients.parameters), OUR_RULES[rule](limit))
    return Entry(gradients, lambda: wrapper.step() or wrapper.stats.last_norm)


def _torch(foreach: bool | None, gradients: Gradients, rule: str, limit: float) -> Entry:
    """Each gradient by its own norm takes a call each, or the foreach functions that torch uses."""
    parameters, order = gradients.parameters, math.inf if rule == "largest" else 2.0

    def clip() -> Any:
        if rule == "value":
            return clip_grad_value_(parameters, limit, foreach=foreach)
        if rule != "gradient":
            return clip_grad_norm_(parameters, limit, order, foreach=foreach)
        if not foreach:
            return [clip_grad_norm_(p, limit, foreach=foreach) for p in parameters]
        # From the parameters, as all that are compared.
        grads = [p.grad for p in parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads))
        torch._foreach_mul_(grads, list((limit / (norms + EPS)).clamp_(max=1.0).unbind()))
        return norms

    return _in_place(gradients, rule, clip)


def _compiled(make: Make, gradients: Gradients, rule: str, limit: float) -> Entry:
    """torch.compile makes CUDA graphs itself, with mode="reduce-overhead": not compared."""
    call = torch.compile(make(gradients, rule, limit).call, fullgraph=True)
    return Entry(gradients, call, graphable=False)


def _drop_in(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Our functions with the names and signatures of torch's."""
    clip = getattr(tritonclip, f"clip_grad_{rule}_")
    return Entry(gradients, partial(clip, gradients.parameters, limit))


def _norm_only(name: str, gradients: Gradients, *_: Any) -> Entry:
    return Entry(gradients, partial(NORMS[name], gradients.grads))


def _torch_sum(gradients: Gradients, *_: Any) -> Entry:
    """The time to read as many bytes: as float32, whatever the dtype; returns no norm."""
    bytes_as_float32 = torch.ones(gradients.n_bytes // 4, device=gradients.device)

    def call() -> None:
        torch.sum(bytes_as_float32)

    return Entry(gradients, call)


def _out_of_place(clip: Callable[[list[Tensor], str, float], Any]) -> Make:
    """From a function that returns new gradients, and norms or None."""
    return lambda gradients, rule, limit: Entry(
        gradients, partial(clip, gradients.grads, rule, limit), out_of_place=True
    )


def _functional(grads: list[Tensor], rule: str, limit: float) -> Any:
    if rule == "norm":
        return functional.clip_by_global_norm(grads, limit)
    if rule == "value":
        return functional.clip_by_value(grads, -limit, limit), None
    return functional.clip_by_norm(grads, limit), None


def _foreach(grads: list[Tensor], rule: str, limit: float) -> Any:
    """As someone writes it who knows torch's foreach functions."""
    if rule == "value":
        return torch._foreach_clamp_max(torch._foreach_clamp_min(grads, -limit), limit), None
    norms = torch.stack(torch._foreach_norm(grads))
    if rule == "gradient":
        return torch._foreach_mul(grads, list((limit / norms).clamp_(max=1.0).unbind())), norms
    norm = torch.linalg.vector_norm(norms)
    return torch._foreach_mul(grads, (limit / norm).clamp(max=1.0)), norm


def _loop(grads: list[Tensor], rule: str, limit: float) -> Any:
    """As someone writes it first: an expression for each gradient."""
    if rule == "value":
        return [grad.clamp(-limit, limit) for grad in grads], None
    if rule == "gradient":
        return [grad * (limit / grad.norm()).clamp(max=1.0) for grad in grads], None
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    coefficient = (limit / norm).clamp(max=1.0)
    return [grad * coefficient for grad in grads], norm


DEPENDS = dict.fromkeys(RULES)
# Measured, then read and written; a clamp reads and writes once, two with one bound each do twice.
ONCE = {"norm": 3, "value": 2, "gradient": 3}
TWICE = {**ONCE, "value": 4}
TORCH_TWICE, TORCH_ONCE = ({**one, "step": None, "largest": 3} for one in (TWICE, ONCE))
_default = partial(_torch, None)
IN_PLACE = (
    Provider("tritonclip", _ours, DEPENDS),
    Provider("tritonclip flat", _flat, DEPENDS),
    Provider("tritonclip wrapper", _wrapper, {"step": None}),
    Provider("tritonclip drop-in", _drop_in, dict.fromkeys(TWO)),
    Provider("tritonclip norm only", partial(_norm_only, "tritonclip"), {"norm": 1}, clips=False),
    Provider("tritonclip compiled", partial(_compiled, _ours), DEPENDS, compiles=True),
    Provider("torch", _default, TORCH_TWICE, baseline=True),
    Provider("torch foreach", partial(_torch, True), TORCH_TWICE, baseline=True),
    Provider("torch no foreach", partial(_torch, False), TORCH_ONCE, baseline=True),
    Provider("torch compiled", partial(_compiled, _default), TORCH_ONCE, compiles=True),
    Provider("torch norm only", partial(_norm_only, "torch"), {"norm": 1}, clips=False),
    Provider("torch sum", _torch_sum, dict.fromkeys(CLIPS, 1), clips=False, least_bytes=SUMMED),
)
OUT_OF_PLACE = (
    Provider("tritonclip", _out_of_place(_functional), ONCE, eps=0.0),
    Provider("torch foreach", _out_of_place(_foreach), TWICE, baseline=True, eps=0.0),
    Provider("torch loop", _out_of_place(_loop), ONCE, baseline=True, eps=0.0),
)
