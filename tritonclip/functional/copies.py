"""Short lists on a CPU: copied, and clipped in place by the engine.

An operator of PyTorch that multiplies into new memory takes 1.7 us a small tensor, a copy 0.8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter

import torch
from torch import Tensor

from tritonclip.engine import execute
from tritonclip.engine.gradients import Gradients
from tritonclip.functional.norms import is_readable, needs_grad
from tritonclip.rules import Rule
from tritonclip.tracing import n_dispatch_modes

# Most elements of a list that is copied first. Clipped by global norm, 64 float32 tensors of 2^18,
# 2^19 and 2^20 elements together take 134, 175 and 240 us so, and as products 221, 260 and 306; 8
# take 59, 87 and 136, and 77, 98 and 137. More leave the cache. (torch 2.13, EPYC, 2 threads.)
SHORT = 2**19

_get_is_cpu = attrgetter("is_cpu")
# Missing in old versions of PyTorch.
_clone_in_one_call = getattr(torch, "_foreach_clone", None)


def clip_copies(
    tensors: list[Tensor], rule_of: Callable[..., Rule], *numbers: float
) -> tuple[list[Tensor], Tensor] | None:
    """Clips copies of a short list; None for a long one, off the CPU, and with derivatives.

    Args:
        tensors: strided and floating-point or complex.
        rule_of: makes the rule, by norm and without eps, from its numbers.
        *numbers: of the rule, which are remembered with it: -0.0 stands for 0.0.

    Returns:
        New tensors, and the norm before clipping, or one for each, as `clip_` returns them.
    """
    if not is_readable(tensors) or needs_grad(tensors):
        return None
    is_short = bool(tensors) and sum(map(Tensor.numel, tensors)) <= SHORT
    if not is_short or False in map(_get_is_cpu, tensors):
        return None
    # Modes may see copies and writes in place otherwise than products. No copy may read memory that
    # was freed, whose address is 0.
    if n_dispatch_modes() or 0 in map(Tensor.data_ptr, tensors):
        return None
    if _clone_in_one_call is None:
        copies = list(map(torch.clone, tensors))
    else:
        copies = list(_clone_in_one_call(tensors))
    gradients = Gradients(copies, copies[0].device, "tensors[{}]".format)
    norm = execute.clip_(gradients, _rule(rule_of, *numbers))
    assert norm is not None
    return copies, norm


@lru_cache
def _rule(rule_of: Callable[..., Rule], *numbers: float) -> Rule:
    return rule_of(*numbers)
