"""The Python of docs/distributed.md runs as it stands, in four processes, and clips rightly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Shard

import tritonclip
from helpers import reference
from helpers.processes import in_processes
from helpers.spread import grads_of, mesh_of, parameter, values
from helpers.transformer import Transformer, loss_of, tokens

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = ROOT / "docs" / "distributed.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _sections() -> dict[str, str]:
    """The Python of each section that has any."""
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    found = {part.partition("\n")[0]: BLOCK.findall(part) for part in parts}
    return {title: blocks[0] for title, blocks in found.items() if len(blocks) == 1}


def _stages(names: dict[str, Any]) -> float:
    """Two stages, sharded over two processes each; the norm of both."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    stage = dist.get_rank() // 2
    part = torch.nn.ParameterList([parameter((4, 3), mesh["dp"], [Shard(0)], seed=stage)])
    names.update(pp_mesh=mesh["pp"], model_parts=[part])
    return reference.total_norm([values((4, 3), 0), values((4, 3), 1)])


def _experts(names: dict[str, Any]) -> float:
    """Experts on both dimensions of a mesh, a dense weight on all processes."""
    both, every = mesh_of(2, 2, names=("ep_fsdp", "ep")), mesh_of(4)
    experts = parameter((4, 6, 3), both, [Shard(1), Shard(0)], seed=0)
    dense = parameter((8, 3), every, [Shard(0)], seed=1)
    names.update(model=torch.nn.ParameterList([experts, dense]))
    return reference.total_norm([values((4, 6, 3), 0), values((8, 3), 1)])


def _megatron(names: dict[str, Any]) -> float:
    """A split weight and a copied one on two processes, in each of two stages."""
    stage, rank = dist.get_rank() // 2, dist.get_rank()
    split, copied = parameter((4, 3), None, seed=rank), parameter((5,), None, seed=10 + stage)
    tied = parameter((2,), None, seed=20)
    split.tensor_model_parallel, tied.tensor_model_parallel = True, False
    tied.shared = stage == 1
    names.update(parameters=[split, copied, tied], tp_size=2, model_parallel_group=dist.group.WORLD)
    wholes = [values((4, 3), rank) for rank in range(4)]
    wholes += [values((5,), 10), values((5,), 11), values((2,), 20)]
    return reference.total_norm(wholes)


@pytest.mark.parametrize("section", _sections())
@in_processes(4)
def test_docs_code_runs(section: str) -> None:
    model = Transformer()
    batch = tokens(0)
    names = dict[str, Any](torch=torch, tritonclip=tritonclip, model=model, loss_of=loss_of)
    names.update(batch=batch, device="cpu")
    made = {"Pipeline stages": _stages, "Experts": _experts, "Plain shards": _megatron}
    if section in made:
        expected = made[section](names)
    else:
        alone = Transformer()
        loss_of(alone, batch).backward()
        expected = reference.total_norm(grads_of(alone.parameters()))

    exec(_sections()[section], names)

    norm = names["optimizer"].stats.last_norm if "optimizer" in names else names["norm"]
    # float64 sums of a batch over other processes and in other orders.
    torch.testing.assert_close(float(norm), expected, rtol=1e-6, atol=0)


def test_every_section_has_at_most_one_block() -> None:
    assert len(_sections()) == PAGE.read_text().count("```python") == 13
