"""Of several processes, one writes the history of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import distributed as dist

import tritonclip
from helpers.processes import in_processes
from tritonclip.monitor.history import read


@in_processes(2)
def test_record_writes_in_the_process_of_rank_0() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(str(folder[0]), "run.csv")
    with tritonclip.record(path) as recorder:
        dist.barrier()
        recorder.add_(torch.tensor(float(dist.get_rank())))
        assert recorder.writes == (dist.get_rank() == 0)
        assert recorder.steps == 1
    dist.barrier()
    assert read(path).norms.tolist() == [0.0]


@in_processes(2)
def test_record_writes_in_the_process_that_is_told_to() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(str(folder[0]), "run.csv")
    with tritonclip.record(path, write=dist.get_rank() == 1) as recorder:
        recorder.add_(torch.tensor(float(dist.get_rank())))
    dist.barrier()
    assert read(path).norms.tolist() == [1.0]
