"""A wrapper with a recorder: every step in the file, with its norm, limit and verdict."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

import tritonclip
from helpers.cases import grad_of
from helpers.training import (
    sgd,
    step_on,
    unchanged,
    wrapped,
)
from tritonclip import ClippedOptimizer


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_each_records_norms_by_name(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with tritonclip.record(tmp_path / "run.csv", each=True) as recorder:
        inner = SGD(model.named_parameters(), lr=0.1)
        optimizer = ClippedOptimizer(inner, 1e-3, recorder=recorder)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            norms = [float(grad_of(p).norm()) for p in model.parameters()]
            optimizer.step()
    last = rows_of(tmp_path / "run.csv")[-1]
    found = [float(last["norm/weight"]), float(last["norm/bias"])]
    # Before clipping.
    assert found == pytest.approx(norms, rel=1e-6)


def test_recorder_must_be_one():
    with pytest.raises(TypeError, match=r"recorder must be a Recorder or None, got str.*record"):
        wrapped(sgd, recorder="run.csv")


def test_a_parameter_that_is_frozen_later_leaves_its_column_empty(tmp_path):
    with tritonclip.record(tmp_path / "run.csv", each=True) as recorder:
        params, optimizer = wrapped(sgd, recorder=recorder)
        step_on(params, optimizer)
        params[1].requires_grad_(False)
        params[1].grad = None
        optimizer.step()
    rows = rows_of(tmp_path / "run.csv")
    assert [row["norm/param_groups[0]['params'][1]"] == "" for row in rows] == [False, True]


def test_a_new_column_is_refused_before_the_step(tmp_path):
    with tritonclip.record(tmp_path / "run.csv") as recorder:
        params, optimizer = wrapped(sgd, recorder=recorder)
        step_on(params, optimizer)
        optimizer.param_groups[0]["clip"] = 1.0
        with pytest.raises(ValueError, match="same names"), unchanged(params, optimizer):
            optimizer.step()


def test_a_file_that_cannot_be_written_does_not_stop_training(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    recorder = tritonclip.record(folder / "run.csv", every=2)
    params, optimizer = wrapped(sgd, recorder=recorder)
    folder.rmdir()
    step_on(params, optimizer)
    with pytest.warns(RuntimeWarning, match="could not write"):
        optimizer.step()
    folder.mkdir()
    recorder.close()
    assert len(rows_of(folder / "run.csv")) == 2
