"""Whether operators run, or are only recorded or simulated."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter

# The classes of a whole gradient, traced or simulated ones too.
WHOLE = (Tensor, Parameter, FakeTensor, FunctionalTensor)
# How many modes see every operator: calls of a few microseconds ask no more where none does. No
# public part of PyTorch: where it is missing, no mode is known.
n_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_get_mode = getattr(torch._C, "_get_dispatch_mode", lambda kind: None)
_kinds: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
# Of make_fx, of FakeTensorMode, and of the functional graphs that torch.export and others make.
_TRACERS = [getattr(_kinds, name, None) for name in ("PROXY", "FAKE", "FUNCTIONAL")]
# make_fx(pre_dispatch=True) counts as no mode.
_is_included = getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", lambda key: False)
is_pre_dispatch = partial(_is_included, torch._C.DispatchKey.PreDispatch)


def is_traced() -> bool:
    """Whether no value of a tensor may be read: by torch.compile, make_fx or FakeTensorMode.

    A decision of the host by such a value would become a constant of the graph.
    """
    return torch.compiler.is_compiling() or _has_tracer()


def refuse_tracer() -> None:
    """Refuses a call that reads values, where operators are recorded or simulated.

    Raises:
        RuntimeError: under make_fx or FakeTensorMode.
    """
    if _has_tracer():
        raise RuntimeError(
            "this call would read gradients that are traced (make_fx) or simulated "
            "(FakeTensorMode); expected clip_ or one of torch's functions, with a limit that is a "
            "number, no state and gradients of one process, and other calls outside"
        )


def _has_tracer() -> bool:
    if n_dispatch_modes() and any(k is not None and _get_mode(k) is not None for k in _TRACERS):
        return True
    return bool(is_pre_dispatch())
