"""Modes of PyTorch: tracers, transforms, CUDA graph capture, autograd, and inference mode."""

# Annotations stay text, because torch.compile traces `without_grad` and guards the annotations of
# its inner function by identity, but `P.args` is a new object each time.
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn import Parameter

# Types that the library can read; subclasses may hold anything.
PLAIN = frozenset({Tensor, Parameter})
# The classes of gradients that are no shards, including those that are traced or simulated.
WHOLE = (Tensor, Parameter, FakeTensor, FunctionalTensor)
# These count the modes that see every operator. Without modes, a call of a few microseconds asks
# nothing else. The functions are not public in PyTorch; if they are missing, no mode is detected.
n_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
n_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_get_mode = getattr(torch._C, "_get_dispatch_mode", lambda key: None)
_kinds: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
# The modes of make_fx, of FakeTensorMode, and of functional graphs, as torch.export makes them.
_TRACERS = [getattr(_kinds, name, None) for name in ("PROXY", "FAKE", "FUNCTIONAL")]
# The transforms of torch.func.
_has_transform = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_functorch: Any = getattr(torch._C, "_functorch", None)
_is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
_is_batched = getattr(_functorch, "is_batchedtensor", lambda tensor: False)
_unwrapped = getattr(_functorch, "get_unwrapped", lambda tensor: tensor)
# PyTorch counts neither make_fx(pre_dispatch=True) nor torch.jit.trace as a mode.
_is_included = getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", lambda key: False)
is_pre_dispatch = partial(_is_included, torch._C.DispatchKey.PreDispatch)
is_jit_traced = getattr(torch._C, "_is_tracing", lambda: False)


def is_observed() -> bool:
    """Whether dual numbers, a transform, a mode or a tracer has to see every operator."""
    is_seen: bool = (
        forward_ad._current_level >= 0
        or n_dispatch_modes() > 0
        or _has_transform()
        or is_jit_traced()
        # This tracer is no dispatch mode, but it comes with function modes, cheaper to count.
        or (n_function_modes() > 0 and is_pre_dispatch())
    )
    return is_seen


def is_traced() -> bool:
    """Whether torch.compile, make_fx or FakeTensorMode traces, so that no value may be read.

    A decision of the host about a value would become a constant of the graph.
    """
    return torch.compiler.is_compiling() or _has_tracer()


def refuse_tracer() -> None:
    """Raises RuntimeError under make_fx or FakeTensorMode, for a call that reads values."""
    if _has_tracer():
        raise RuntimeError(
            "this call would read gradients that are traced (make_fx) or simulated "
            "(FakeTensorMode); expected clip_, clip_grad_norm_ or clip_grad_value_ by global norm "
            "or by value, with limits that are numbers and without other options, and other calls "
            "outside"
        )


def refuse_batches(tensors: Iterable[Tensor]) -> None:
    """Raises RuntimeError for tensors under torch.func.vmap, which no call can read or write."""
    for tensor in tensors:
        while _is_wrapped(tensor):
            if _is_batched(tensor):
                raise RuntimeError(
                    "the gradients are batched by torch.func.vmap, and this call reads or writes "
                    "them in place; expected the functions of tritonclip.functional there, such "
                    "as clip_by_global_norm(gradients, 1.0), clip_by_norm and clip_by_value, which "
                    "return new tensors, or global_norm; or this call outside of vmap"
                )
            tensor = _unwrapped(tensor)


def _has_tracer() -> bool:
    if n_dispatch_modes() and any(k is not None and _get_mode(k) is not None for k in _TRACERS):
        return True
    return bool(is_pre_dispatch())


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph captures the current stream of a device."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    # PyTorch tells this only of the current device.
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def follow_stream(last: Any, tensors: Iterable[Tensor], device: torch.device) -> Any:
    """Returns a device's current CUDA stream after it waits for `last`, which used `tensors`."""
    stream = torch.cuda.current_stream(device)
    if last is not None and stream != last:
        stream.wait_stream(last)
        for tensor in tensors:
            # The allocator then does not reuse freed memory that this stream still reads.
            tensor.record_stream(stream)
    return stream


P = ParamSpec("P")
R = TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Like the decorator `torch.no_grad()`, but an interrupt cannot leave its mode behind.

    An interrupt that comes while Python code of `torch.no_grad` enters or leaves its block leaves
    autograd turned off for the rest of the program. From Python 3.11 on, interrupts come only where
    a call begins or has returned; here, no call lies between the mode and the block.
    """
    switch, is_on = torch._C._set_grad_enabled, torch.is_grad_enabled

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = is_on()
        try:
            switch(False)
            return function(*args, **kwargs)
        finally:
            switch(before)

    return run


def outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """Like the decorator `torch.inference_mode(False)`, but as safe as `without_grad`.

    It wraps functions that make tensors for later calls to write to, which PyTorch refuses for
    inference tensors.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = torch._C._InferenceMode(False)
        try:
            mode.__enter__()
            return function(*args, **kwargs)
        finally:
            mode.__exit__(None, None, None)

    return run
