"""Shards of FullyShardedDataParallel, the first version: plain tensors that only look whole."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

# The attribute of parameters that FullyShardedDataParallel manages.
FSDP_MARK = "_fsdp_flattened"
FSDP_MARKS = repeat(FSDP_MARK)


def refuse_fsdp_shards(parameters: Sequence[Tensor]) -> None:
    """Refuses norms of parameters that FullyShardedDataParallel has split over processes."""
    if are_fsdp_shards(parameters):
        raise TypeError(
            "the parameters are shards of FullyShardedDataParallel, and their gradients have the "
            "norm of one process only; expected process_group=: that of the "
            "FullyShardedDataParallel module, its attribute process_group"
        )


def are_fsdp_shards(parameters: Sequence[Tensor]) -> bool:
    """Whether FullyShardedDataParallel manages a parameter that is not whole in this process."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    flattened = [parameter for parameter in parameters if hasattr(parameter, FSDP_MARK)]
    distributed = torch.distributed
    if not (flattened and distributed.is_initialized() and distributed.get_world_size() > 1):
        return False
    buffers: dict[int, list[Tensor]] = {}
    for parameter in flattened:
        if getattr(parameter, "_is_flat_param", False):
            # Memory for the whole: only where it is split.
            if hasattr(parameter, "_full_param_padded"):
                return True
        else:
            buffers.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
    # With use_orig_params=True, parameters are views of one buffer: of their shapes where it is
    # whole, else 1-d. A buffer of 1-d parameters only counts as a shard.
    return any(all(p.dim() == 1 for p in views) for views in buffers.values())
