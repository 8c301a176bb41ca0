"""Providers that are compared: tritonclip, and the functions that users have instead.

A provider makes an `Entry` for given gradients, rule and limit; only its `call` is timed. Providers
of IN_PLACE change the gradients. Providers of OUT_OF_PLACE return new ones; their baselines are
idioms of PyTorch's users, because nothing of torch.nn.utils clips out of place.

Other frameworks are compared on a CPU, each in its idiom and on its own arrays. These are filled
from torch's tensors outside the clock, and share no memory with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import tritonclip
from bench.accuracy import EPS, OURS, Gradients
from bench.workloads import CLIPS, DTYPES, RULES, TWO, Workload
from tritonclip import functional

# Norms of others may be off by this much; those of torch are off by up to 1% on a CPU.
LENIENT = 0.05


class Entry(NamedTuple):
    """One provider, ready to clip given gradients."""

    call: Callable[[], Any]  # All that is timed.
    refill: Callable[[], Any]  # Restores the first values of gradients that calls write.
    result: Callable[[Any], tuple[Sequence[Tensor], Any]]  # Gradients, and norms or None.


# Makes an entry from gradients, a rule and a limit.
Make = Callable[[Gradients, str, float], Entry]


class Provider(NamedTuple):
    """Something that clips."""

    name: str
    make: Make
    rules: Sequence[str] = CLIPS
    baseline: bool = False  # One of torch's ways; ratios are those of the fastest way.
    jits: bool = False  # Compiles an unrolled list: left out if that takes minutes.
    eps: float = EPS  # Added to a norm before the limit is divided by it.
    modules: Sequence[str] = ()  # The packages that it needs beside torch.
    dtypes: Sequence[str] = DTYPES

    @property
    def tolerance(self) -> float:
        """The largest relative error of norms and gradients that is accepted."""
        return OURS if self.name == "tritonclip" else LENIENT

    def why_absent(self, workload: Workload, dtype: str, device: str) -> str | None:
        """Why the provider is not compared on a list of gradients; None if it is."""
        n = len(workload.shapes)
        missing = [module for module in self.modules if not find_spec(module)]
        reasons = {
            f"{', '.join(missing)} not installed": missing,
            f"not compared in {dtype}": dtype not in self.dtypes,
            "compared on a CPU only": self.modules and device != "cpu",
            f"compiling a list of {n} takes minutes": self.jits and n > 1000,
        }
        return next((f"{self.name}: {why}" for why, holds in reasons.items() if holds), None)


def sgd_of(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """SGD on parameters that are set to zero."""
    with torch.no_grad():
        torch._foreach_zero_(parameters)
    return torch.optim.SGD(parameters, lr=1e-3, foreach=True)


def in_place(gradients: Gradients, clip: Callable[[], Any], rule: str = "norm") -> Entry:
    """An entry whose call clips, takes a step if the rule is "step", and returns norms or None."""
    call = clip
    if rule == "step":
        sgd = sgd_of(gradients.parameters)

        def call() -> Any:
            norm = clip()
            sgd.step()
            return norm

    return Entry(call, gradients.refill, lambda norms: (gradients.grads, norms))


BY_NORM: Any = tritonclip.ClipByGlobalNorm
# A smaller norm of a unit's weights counts as this one.
LEAST = 1e-12
OUR_RULES = {"norm": BY_NORM, "step": BY_NORM, "largest": partial(BY_NORM, norm_type=math.inf)}
OUR_RULES |= {"value": tritonclip.ClipByValue, "gradient": tritonclip.ClipByNorm}
OUR_RULES["unit"] = partial(tritonclip.ClipByUnitNorm, eps=LEAST)


def _ours(gradients: Gradients, rule: str, limit: float) -> Entry:
    parameters, clip = gradients.parameters, OUR_RULES[rule](limit)
    return in_place(gradients, lambda: tritonclip.clip_(parameters, clip), rule)


def _norm_of_units(x: Tensor) -> Any:
    return torch.linalg.vector_norm(x, dim=list(range(x.dim() > 1, x.dim())), keepdim=True)


def _units(gradients: Gradients, limit: float) -> Entry:
    """Clips like timm's `adaptive_clip_grad` (timm/utils/agc.py), with another least norm."""
    parameters = gradients.parameters

    @torch.no_grad()
    def clip() -> None:
        for parameter in parameters:
            grad = parameter.grad
            assert grad is not None
            most = _norm_of_units(parameter).clamp_(min=LEAST).mul_(limit)
            norm = _norm_of_units(grad)
            clipped = grad * (most / norm.clamp(min=LEAST))
            grad.copy_(torch.where(norm < most, grad, clipped))

    return in_place(gradients, clip)


def _torch(foreach: bool | None, gradients: Gradients, rule: str, limit: float) -> Entry:
    """Torch's functions; by each norm, a call for each gradient or torch's foreach functions."""
    if rule == "unit":
        return _units(gradients, limit)
    parameters, order = gradients.parameters, math.inf if rule == "largest" else 2.0

    def clip() -> Any:
        if rule == "value":
            return clip_grad_value_(parameters, limit, foreach=foreach)
        if rule != "gradient":
            return clip_grad_norm_(parameters, limit, order, foreach=foreach)
        if not foreach:
            return [clip_grad_norm_(p, limit, foreach=foreach) for p in parameters]
        # The gradients are read from the parameters, as all providers do.
        grads = [p.grad for p in parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads))
        torch._foreach_mul_(grads, list((limit / (norms + EPS)).clamp_(max=1.0).unbind()))
        return norms

    return in_place(gradients, clip, rule)


def _out_of_place(clip: Callable[[list[Tensor], str, float], Any]) -> Make:
    """Makes entries of a function that returns new gradients, and norms or None."""

    def make(gradients: Gradients, rule: str, limit: float) -> Entry:
        call = partial(clip, gradients.grads, rule, limit)
        return Entry(call, lambda: None, lambda output: output)

    return make


def _functional(grads: list[Tensor], rule: str, limit: float) -> Any:
    if rule == "norm":
        return functional.clip_by_global_norm(grads, limit)
    if rule == "value":
        return functional.clip_by_value(grads, -limit, limit), None
    return functional.clip_by_norm(grads, limit), None


def _foreach(grads: list[Tensor], rule: str, limit: float) -> Any:
    """Clips as a user who knows torch's foreach functions would."""
    if rule == "value":
        return torch._foreach_clamp_max(torch._foreach_clamp_min(grads, -limit), limit), None
    norms = torch.stack(torch._foreach_norm(grads))
    if rule == "gradient":
        return torch._foreach_mul(grads, list((limit / norms).clamp_(max=1.0).unbind())), norms
    norm = torch.linalg.vector_norm(norms)
    return torch._foreach_mul(grads, (limit / norm).clamp(max=1.0)), norm


def _loop(grads: list[Tensor], rule: str, limit: float) -> Any:
    """Clips as most users would at first, with an expression for each gradient."""
    if rule == "value":
        return [grad.clamp(-limit, limit) for grad in grads], None
    if rule == "gradient":
        return [grad * (limit / grad.norm()).clamp(max=1.0) for grad in grads], None
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    coefficient = (limit / norm).clamp(max=1.0)
    return [grad * coefficient for grad in grads], norm


def _foreign(gradients, fill, clip, *, keep, view=torch.utils.dlpack.from_dlpack) -> Entry:
    """An entry on arrays of another framework: `clip` returns them, and norms or None, finished.

    `fill` makes an array from a tensor, `view` a tensor from an array. With `keep` the next call
    goes on with the clipped arrays, otherwise with the first ones, which are then never written.
    """
    arrays: list[Any] = []

    def refill() -> None:
        if keep or not arrays:
            arrays.clear()
            arrays.extend(map(fill, gradients.fresh))

    def call() -> Any:
        output = clip(arrays)
        if keep:
            arrays[:] = output[0]
        return output

    refill()
    return Entry(call, refill, lambda output: (list(map(view, output[0])), output[1]))


def _tensorflow(gradients: Gradients, rule: str, limit: float) -> Entry:
    """TensorFlow's eager functions, which return new tensors."""
    tf = import_module("tensorflow")
    tf.config.set_soft_device_placement(True)
    dlpack = tf.experimental.dlpack

    def clip(arrays: list[Any]) -> Any:
        if rule == "norm":
            clipped, norm = tf.clip_by_global_norm(arrays, limit)
            return clipped, [norm]
        if rule == "value":
            return [tf.clip_by_value(array, -limit, limit) for array in arrays], None
        return [tf.clip_by_norm(array, limit) for array in arrays], None

    return _foreign(
        gradients,
        lambda tensor: tf.raw_ops.DeepCopy(x=dlpack.from_dlpack(tensor.__dlpack__())),
        clip,
        keep=False,
        view=lambda array: torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(array)),
    )


def _paddle(gradients: Gradients, rule: str, limit: float) -> Entry:
    """The classes that `paddle.optimizer` calls with its `grad_clip`."""
    paddle = import_module("paddle")
    paddle.set_device("cpu")
    by = {"norm": "GlobalNorm", "value": "Value", "gradient": "Norm"}
    run = getattr(paddle.nn, f"ClipGradBy{by[rule]}")(limit)
    # The classes read only these attributes of a parameter.
    parameter = SimpleNamespace(need_clip=True, name="parameter", process_mesh=None)

    def clip(arrays: list[Any]) -> Any:
        clipped = run([(parameter, array) for array in arrays])
        return [array for _, array in clipped], None

    fill = paddle.utils.dlpack.from_dlpack
    return _foreign(gradients, lambda tensor: fill(tensor).clone(), clip, keep=True)


def _optax(donate: bool, gradients: Gradients, rule: str, limit: float) -> Entry:
    """Optax under jit, with donated arguments as in a training step, or out of place."""
    jax, optax = import_module("jax"), import_module("optax")
    transform = {"norm": optax.clip_by_global_norm, "value": optax.clip}[rule](limit)

    def update(arrays: list[Any]) -> Any:
        clipped = transform.update(arrays, transform.init(arrays))[0]
        return clipped, [optax.tree.norm(arrays)] if rule == "norm" else None

    compiled = jax.jit(update, donate_argnums=0 if donate else ())
    return _foreign(
        gradients,
        lambda tensor: jax.numpy.array(jax.dlpack.from_dlpack(tensor), copy=True),
        lambda arrays: jax.block_until_ready(compiled(arrays)),
        keep=donate,
    )


TORCH = (*CLIPS, "step", "largest")
IN_PLACE = (
    Provider("tritonclip", _ours, RULES),
    Provider("torch", partial(_torch, None), RULES, baseline=True),
    Provider("torch foreach", partial(_torch, True), TORCH, baseline=True),
    Provider("torch no foreach", partial(_torch, False), TORCH, baseline=True),
)
OPTAX = Provider(
    "optax", partial(_optax, True), TWO, jits=True, modules=("jax", "optax"), dtypes=DTYPES[:2]
)
FRAMEWORKS = (
    Provider("tensorflow", _tensorflow, modules=("tensorflow",), dtypes=("float32",)),
    Provider("paddle", _paddle, modules=("paddle",), dtypes=("float32",)),
    OPTAX,
)
OUT_OF_PLACE = (
    Provider("tritonclip", _out_of_place(_functional), eps=0.0),
    Provider("torch foreach", _out_of_place(_foreach), baseline=True),
    Provider("torch loop", _out_of_place(_loop), baseline=True),
    OPTAX._replace(make=partial(_optax, False)),
)
NAMED = {provider.name: provider for provider in (*FRAMEWORKS, *IN_PLACE)}
BASELINES = [one.name for one in (*IN_PLACE, *OUT_OF_PLACE) if one.baseline]
