"""Refusals of one process: bad gradients, and what every process has to do then."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard

from helpers.spread import mesh_of, parameter, unchanged
from tritonclip.distributed import reduction


def is_first() -> bool:
    """Whether this is the process that refuses."""
    return dist.get_rank() == 0


def in_first(bad: Any, right: Any = None) -> Any:
    """An argument that is bad in the process that refuses."""
    return bad if is_first() else right


def overlap(one: Any) -> None:
    """Gives a parameter of 5 elements a gradient that cannot be written."""
    one.grad = torch.ones(1).expand(5)


def named_parameters() -> dict[str, Any]:
    """A sharded, a copied and a plain parameter with gradients."""
    mesh = mesh_of(-1)
    return {
        "sharded": parameter((8, 3), mesh, [Shard(0)], seed=1),
        "copied": parameter((4,), mesh, [Replicate()], seed=2),
        "plain": parameter((5,), None, seed=3),
    }


def check_raises(
    call: Callable[[], object], error: type[Exception], message: str, tensors: Sequence[Any]
) -> None:
    """A call raises in every process, names the first one, writes nothing and leaves nobody.

    An error that is none of the library's is a RuntimeError in the others.
    """
    if not is_first():
        error = error if error in (TypeError, ValueError) else RuntimeError
        message = f"rank 0 raised, so no gradient .*{message}"
    with unchanged(tensors), pytest.raises(error, match=message):
        call()
    dist.barrier()


@contextmanager
def as_on_accelerator() -> Iterator[None]:
    """Where reading a number would wait for the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "host_decides", lambda device: False)
        yield


def check_nobody_waits(
    step: Callable[[], object], error: type[Exception], message: str, nonfinite: str = "propagate"
) -> None:
    """On an accelerator a step raises in the first process, and leaves nobody waiting."""
    with as_on_accelerator():
        if is_first():
            with pytest.raises(error, match=message):
                step()
        elif nonfinite == "error":
            with pytest.raises(RuntimeError, match=r"non-finite|refuses"):
                step()
        else:
            step()
    dist.barrier()
