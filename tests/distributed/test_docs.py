"""The Python of docs/distributed.md runs as it stands, in four processes, and clips rightly."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Shard

from helpers import reference
from helpers.processes import in_processes
from helpers.spread import grads_of, mesh_of, parameter, values

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = (ROOT / "docs" / "distributed.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SETUP, *BLOCKS = BLOCK.findall(PAGE)


def _stages(names: dict[str, Any]) -> float:
    """Two stages, sharded over two processes each; the norm of both."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    stage = dist.get_rank() // 2
    part = torch.nn.ParameterList([parameter((4, 3), mesh["dp"], [Shard(0)], seed=stage)])
    names.update(model=part)
    return reference.total_norm([values((4, 3), 0), values((4, 3), 1)])


def _megatron(names: dict[str, Any]) -> float:
    """A split weight and a copied one on two processes, in each of two stages."""
    stage, rank = dist.get_rank() // 2, dist.get_rank()
    split, copied = parameter((4, 3), None, seed=rank), parameter((5,), None, seed=10 + stage)
    tied = parameter((2,), None, seed=20)
    split.tensor_model_parallel, tied.tensor_model_parallel = True, False
    tied.shared = stage == 1
    names.update(model=torch.nn.ParameterList([split, copied, tied]))
    wholes = [values((4, 3), rank) for rank in range(4)]
    wholes += [values((5,), 10), values((5,), 11), values((2,), 20)]
    return reference.total_norm(wholes)


def _nothing(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Its backward leaves the gradients that are there."""
    return torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
@in_processes(4)
def test_docs_code_runs(block: int) -> None:
    text, names = BLOCKS[block], dict[str, Any]()
    exec(SETUP, names)
    made = {"model_parts": _stages, "tensor_model_parallel": _megatron}
    for word, make in made.items():
        if word in text:
            expected = make(names)
            names["loss_of"] = _nothing
            break
    else:
        alone = copy.deepcopy(names["model"])
        names["loss_of"](alone, names["batch"]).backward()
        expected = reference.total_norm(grads_of(alone.parameters()))

    exec(text, names)

    norm = names["optimizer"].stats.last_norm if "optimizer" in names else names["norm"]
    # float64 sums of a batch over other processes and in other orders.
    torch.testing.assert_close(float(norm), expected, rtol=1e-6, atol=0)
