"""Providers that need more than torch: each in its idiom, on arrays of its, where installed.

Arrays are filled from torch's outside the clock. None of them holds torch's memory.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.accuracy import Gradients
from bench.providers import Entry, OutOfPlace, Provider

# Arrays to clipped arrays, and norms or None, having waited for them.
Clip = Callable[[list[Any]], tuple[list[Any], list[Any] | None]]


class ForeignEntry(OutOfPlace):
    """An entry on arrays of another framework.

    Args:
        gradients: the values of the arrays.
        fill: one array from a tensor.
        clip: all that is timed.
        keep: whether the next call goes on with the clipped arrays; else with the first ones,
            which then are never written.
        view: a tensor from an array.
    """

    def __init__(
        self,
        gradients: Gradients,
        fill: Callable[[Tensor], Any],
        clip: Clip,
        *,
        keep: bool,
        view: Callable[[Any], Tensor] = torch.utils.dlpack.from_dlpack,
    ) -> None:
        super().__init__(gradients, self._clip, graphable=False, on_torch_stream=False)
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

    def grads(self, output: Any) -> list[Tensor]:
        """Clipped arrays as tensors."""
        return [self._view(array) for array in output[0]]


def _tensorflow(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Eager, like torch: the functions return new tensors."""
    tf = importlib.import_module("tensorflow")
    tf.config.set_soft_device_placement(True)

    def fill(tensor: Tensor) -> Any:
        shared = tf.experimental.dlpack.from_dlpack(tensor.__dlpack__())
        return tf.raw_ops.DeepCopy(x=shared)

    def clip(arrays: list[Any]) -> tuple[list[Any], list[Any] | None]:
        if rule == "norm":
            clipped, norm = tf.clip_by_global_norm(arrays, limit)
            return clipped, [norm]
        if rule == "value":
            return [tf.clip_by_value(array, -limit, limit) for array in arrays], None
        return [tf.clip_by_norm(array, limit) for array in arrays], None

    def view(array: Any) -> Tensor:
        return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(array))

    return ForeignEntry(gradients, fill, clip, keep=False, view=view)


def _paddle(gradients: Gradients, rule: str, limit: float) -> Entry:
    """The classes that `paddle.optimizer` calls with its `grad_clip`."""
    paddle = importlib.import_module("paddle")
    if gradients.device.type == "cpu":
        paddle.set_device("cpu")
    makers = {
        "norm": paddle.nn.ClipGradByGlobalNorm,
        "value": paddle.nn.ClipGradByValue,
        "gradient": paddle.nn.ClipGradByNorm,
    }
    run = makers[rule](limit)
    # All that is read of a parameter.
    parameter = SimpleNamespace(need_clip=True, name="parameter", process_mesh=None)

    def fill(tensor: Tensor) -> Any:
        return paddle.utils.dlpack.from_dlpack(tensor).clone()

    def clip(arrays: list[Any]) -> tuple[list[Any], list[Any] | None]:
        clipped = run([(parameter, array) for array in arrays])
        if gradients.device.type == "cuda":
            paddle.device.synchronize()
        return [array for _, array in clipped], None

    return ForeignEntry(gradients, fill, clip, keep=True)


def _optax(donate: bool, gradients: Gradients, rule: str, limit: float) -> Entry:
    """Under jit, with its arguments donated, as in a training step, or out of place."""
    jax, library = importlib.import_module("jax"), importlib.import_module("optax")
    rules = {"norm": library.clip_by_global_norm, "value": library.clip}
    transform = rules[rule](limit)

    def update(arrays: list[Any]) -> tuple[list[Any], list[Any] | None]:
        clipped = transform.update(arrays, transform.init(arrays))[0]
        return clipped, [library.tree.norm(arrays)] if rule == "norm" else None

    compiled = jax.jit(update, donate_argnums=0 if donate else ())

    def fill(tensor: Tensor) -> Any:
        return jax.numpy.array(jax.dlpack.from_dlpack(tensor), copy=True)

    def clip(arrays: list[Any]) -> tuple[list[Any], list[Any] | None]:
        return jax.block_until_ready(compiled(arrays))  # type: ignore[no-any-return]

    return ForeignEntry(gradients, fill, clip, keep=donate)


def _apex(gradients: Gradients, rule: str, limit: float) -> Entry:
    """The function of `apex.contrib`, with the signature of torch's; reads a number back."""
    clip = importlib.import_module("apex.contrib.clip_grad").clip_grad_norm_
    return Entry(gradients, lambda: clip(gradients.parameters, limit), graphable=False)


def _transformer_engine(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Its multi-tensor kernels as Megatron-LM calls them, which reads the norm back."""
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
    flag = torch.zeros(1, dtype=torch.int, device=gradients.device)
    grads, apply = gradients.grads, optimizers.multi_tensor_applier

    def clip() -> list[float]:
        norm = float(apply(optimizers.multi_tensor_l2norm, flag, [grads], False)[0])
        coefficient = limit / (norm + 1e-6)
        if coefficient < 1:
            apply(optimizers.multi_tensor_scale, flag, [grads, grads], coefficient)
        return [norm]

    return Entry(gradients, clip, graphable=False)


def _is_installed(module: str) -> bool:
    """Whether a module is there, also one within a package; imports the package, not the module."""
    package, _, inner = module.partition(".")
    return find_spec(package) is not None and (not inner or find_spec(module) is not None)


def _needs(
    *modules: str,
    devices: tuple[str, ...] = ("cpu",),
    mixed: bool = True,
    half_on_cpu: bool = True,
) -> Callable[[Gradients], str | None]:
    def absent(gradients: Gradients) -> str | None:
        device, dtype = gradients.device, gradients.dtype
        missing = [name for name in modules if not _is_installed(name)]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if device.type not in devices:
            return f"compared on {' and '.join(devices)} only"
        if dtype == "mixed" and not mixed:
            return "takes one dtype only"
        if dtype != "float32" and device.type == "cpu" and not half_on_cpu:
            return "takes float32 only on a CPU"
        return None

    return absent


# TensorFlow and JAX take most of a GPU's memory when they start, unless told before their import.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

BOTH, CUDA = ("cpu", "cuda"), ("cuda",)
# Eager TensorFlow clamps in two operators.
TENSORFLOW = Provider(
    "tensorflow",
    _tensorflow,
    {"norm": 3, "value": 4, "gradient": 3},
    eps=0.0,
    absent=_needs("tensorflow", mixed=False),
)
OPTAX = Provider(
    "optax",
    partial(_optax, True),
    {"norm": 3, "value": 2},
    compiles=True,
    eps=0.0,
    absent=_needs("jax", "optax", devices=BOTH),
)
IN_PLACE = (
    TENSORFLOW,
    Provider(
        "paddle",
        _paddle,
        {"norm": 3, "value": 2, "gradient": 3},
        absent=_needs("paddle", devices=BOTH, half_on_cpu=False),
    ),
    OPTAX,
    Provider("apex", _apex, {"norm": 3}, absent=_needs("apex.contrib", devices=CUDA)),
    Provider(
        "transformer_engine",
        _transformer_engine,
        {"norm": None},
        absent=_needs("transformer_engine.pytorch", devices=CUDA, mixed=False),
    ),
)
OUT_OF_PLACE = (TENSORFLOW, replace(OPTAX, make=partial(_optax, False)))
