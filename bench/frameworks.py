"""Providers that need more than torch: each in its idiom, on arrays of its, where installed.

Arrays are filled from torch's outside the clock. None of them holds torch's memory.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.accuracy import Gradients
from bench.providers import ONCE, TWICE, Entry, Provider
from bench.workloads import DTYPES

# TensorFlow and JAX take most of a GPU's memory when they start, unless told before their import.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Clipped arrays, and norms or None, having waited for them.
Clipped = tuple[list[Any], list[Any] | None]


class ForeignEntry(Entry):
    """An entry on arrays of another framework, of which only `clip` is timed.

    `fill` makes an array from a tensor, `view` a tensor from an array. With `keep` the next call
    goes on with the clipped arrays, else with the first ones, which then are never written.
    """

    def __init__(self, gradients, fill, clip, *, keep, view=torch.utils.dlpack.from_dlpack):
        super().__init__(gradients, self._clip, False, out_of_place=True, on_torch_stream=False)
        self._fill, self._run, self._keep, self._view = fill, clip, keep, view
        self._arrays = [fill(fresh) for fresh in gradients.fresh]

    def _clip(self) -> Any:
        output = self._run(self._arrays)
        if self._keep:
            self._arrays = output[0]
        return output

    def refill(self) -> None:
        """Fills arrays anew where the last call wrote to them."""
        if self._keep:
            self._arrays = []
            self._arrays = [self._fill(fresh) for fresh in self.gradients.fresh]

    def result(self, output: Any) -> tuple[list[Tensor], list[float]]:
        """Clipped arrays as tensors, and norms."""
        return super().result(([self._view(array) for array in output[0]], output[1]))


def _tensorflow(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Eager, like torch: the functions return new tensors."""
    tf = import_module("tensorflow")
    tf.config.set_soft_device_placement(True)
    dlpack = tf.experimental.dlpack

    def clip(arrays: list[Any]) -> Clipped:
        if rule == "norm":
            clipped, norm = tf.clip_by_global_norm(arrays, limit)
            return clipped, [norm]
        if rule == "value":
            return [tf.clip_by_value(array, -limit, limit) for array in arrays], None
        return [tf.clip_by_norm(array, limit) for array in arrays], None

    return ForeignEntry(
        gradients,
        lambda tensor: tf.raw_ops.DeepCopy(x=dlpack.from_dlpack(tensor.__dlpack__())),
        clip,
        keep=False,
        view=lambda array: torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(array)),
    )


def _paddle(gradients: Gradients, rule: str, limit: float) -> Entry:
    """The classes that `paddle.optimizer` calls with its `grad_clip`."""
    paddle = import_module("paddle")
    if gradients.device.type == "cpu":
        paddle.set_device("cpu")
    by = {"norm": "GlobalNorm", "value": "Value", "gradient": "Norm"}
    run = getattr(paddle.nn, f"ClipGradBy{by[rule]}")(limit)
    # All that is read of a parameter.
    parameter = SimpleNamespace(need_clip=True, name="parameter", process_mesh=None)

    def clip(arrays: list[Any]) -> Clipped:
        clipped = run([(parameter, array) for array in arrays])
        if gradients.device.type == "cuda":
            paddle.device.synchronize()
        return [array for _, array in clipped], None

    fill = paddle.utils.dlpack.from_dlpack
    return ForeignEntry(gradients, lambda tensor: fill(tensor).clone(), clip, keep=True)


def _optax(donate: bool, gradients: Gradients, rule: str, limit: float) -> Entry:
    """Under jit, with its arguments donated, as in a training step, or out of place."""
    jax, optax = import_module("jax"), import_module("optax")
    transform = {"norm": optax.clip_by_global_norm, "value": optax.clip}[rule](limit)

    def update(arrays: list[Any]) -> Clipped:
        clipped = transform.update(arrays, transform.init(arrays))[0]
        return clipped, [optax.tree.norm(arrays)] if rule == "norm" else None

    compiled = jax.jit(update, donate_argnums=0 if donate else ())
    return ForeignEntry(
        gradients,
        lambda tensor: jax.numpy.array(jax.dlpack.from_dlpack(tensor), copy=True),
        lambda arrays: jax.block_until_ready(compiled(arrays)),
        keep=donate,
    )


def _apex(gradients: Gradients, rule: str, limit: float) -> Entry:
    """The function of `apex.contrib`, with the signature of torch's; reads a number back."""
    clip = import_module("apex.contrib.clip_grad").clip_grad_norm_
    return Entry(gradients, partial(clip, gradients.parameters, limit), graphable=False)


def _transformer_engine(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Its multi-tensor kernels as Megatron-LM calls them, which reads the norm back."""
    optimizers = import_module("transformer_engine.pytorch.optimizers")
    flag = torch.zeros(1, dtype=torch.int, device=gradients.device)
    grads, apply = gradients.grads, optimizers.multi_tensor_applier

    def clip() -> list[float]:
        norm = float(apply(optimizers.multi_tensor_l2norm, flag, [grads], False)[0])
        coefficient = limit / (norm + 1e-6)
        if coefficient < 1:
            apply(optimizers.multi_tensor_scale, flag, [grads, grads], coefficient)
        return [norm]

    return Entry(gradients, clip, graphable=False)


# Of one dtype in a list.
ONE = DTYPES[:3]
ON_GPU = {"cuda": DTYPES[:4]}
# Eager TensorFlow clamps in two operators.
TENSORFLOW = Provider(
    "tensorflow", _tensorflow, TWICE, eps=0.0, modules=("tensorflow",), dtypes={"cpu": ONE}
)
PADDLE = Provider("paddle", _paddle, ONCE, modules=("paddle",), dtypes=ON_GPU | {"cpu": ONE[:1]})
BY_TWO = {"norm": 3, "value": 2}
OPTAX = Provider(
    "optax", partial(_optax, True), BY_TWO, compiles=True, eps=0.0, modules=("jax", "optax")
)
APEX = Provider("apex", _apex, {"norm": 3}, modules=("apex.contrib",), dtypes=ON_GPU)
ENGINE = ("transformer_engine.pytorch",)
TRANSFORMER_ENGINE = Provider(
    "transformer_engine", _transformer_engine, {"norm": None}, modules=ENGINE, dtypes={"cuda": ONE}
)
IN_PLACE = (TENSORFLOW, PADDLE, OPTAX, APEX, TRANSFORMER_ENGINE)
OUT_OF_PLACE = (TENSORFLOW, OPTAX._replace(make=partial(_optax, False)))
