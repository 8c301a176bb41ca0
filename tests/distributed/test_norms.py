"""Norms by name, of gradients that lie over several processes."""

from __future__ import annotations

import reference
import torch
from processes import in_processes
from spread import assert_same_everywhere, collectives_of, mesh_of, whole
from torch import distributed as dist
from transformer import Transformer, loss_of, shard, tokens

import tritonclip


@in_processes(2, 4)
def test_norms_by_name_are_of_whole_gradients() -> None:
    model = shard(Transformer(), mesh_of(-1))
    loss_of(model, tokens(dist.get_rank())).backward()
    wholes = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: reference.norms([grad], 2.0)[0] for name, grad in wholes.items()}

    norms, count = collectives_of(lambda: tritonclip.norms_by_name(model))

    assert list(norms) == list(expected)
    assert count == 1
    found = torch.stack(list(norms.values()))
    assert_same_everywhere(found)
    torch.testing.assert_close(
        found.double(), torch.tensor([*expected.values()], dtype=torch.float64), rtol=1e-6, atol=0
    )
