"""A wrapper with a recorder: every step in the file, with its norm, limit and verdict."""

from __future__ import annotations

import copy
import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import tritonclip
from helpers.cases import grad_of
from helpers.loss_scale import scaled_step
from helpers.training import (
    give_grads,
    new_params,
    sgd,
    step_on,
    unchanged,
    wrapped,
)
from tritonclip import ClipByNorm, ClipByQuantile, ClipByValue, ClippedOptimizer


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    return [float(row[column]) if row[column] else math.nan for row in rows]


def test_every_step_is_a_row(tmp_path, make):
    norms, limits, coefficients = [], [], []
    with tritonclip.record(tmp_path / "run.csv", every=4) as recorder:
        params, optimizer = wrapped(make, ClipByQuantile(0.5, 9), recorder=recorder)
        for step in range(10):
            step_on(params, optimizer, step, size=1.0 + step % 3)
            norms.append(float(optimizer.stats.last_norm))
            limits.append(float(optimizer.stats.last_limit))
            coefficients.append(float(optimizer.stats.last_coefficient))
    rows = rows_of(tmp_path / "run.csv")
    assert [int(row["step"]) for row in rows] == [*range(1, 11)]
    assert numbers(rows, "norm") == pytest.approx(norms, rel=1e-6)
    assert numbers(rows, "limit") == pytest.approx(limits, rel=1e-6)
    assert numbers(rows, "coefficient") == pytest.approx(coefficients, rel=1e-6)


def test_skipped_steps_are_rows(tmp_path, make):
    with tritonclip.record(tmp_path / "run.csv") as recorder:
        params, optimizer = wrapped(make, nonfinite="skip", skip_above=20.0, recorder=recorder)
        for bad, size in ((None, 1.0), (math.nan, 1.0), (None, 100.0), (None, 2.0)):
            step_on(params, optimizer, size=size, bad=bad)
    rows = rows_of(tmp_path / "run.csv")
    assert numbers(rows, "skipped") == [0, 1, 1, 0]
    norms = numbers(rows, "norm")
    assert math.isnan(norms[1])
    assert norms[2] == pytest.approx(100 * norms[0], rel=1e-5)


def test_overflows_of_a_scaler_are_skipped_rows(tmp_path, scaler_type, make):
    with tritonclip.record(tmp_path / "run.csv") as recorder:
        params, optimizer = wrapped(make, recorder=recorder)
        scale = scaler_type("cpu", init_scale=64.0)
        for bad in (None, math.inf, None):
            scaled_step(scale, optimizer, params, give_grads(params, bad=bad))
    # torch's scaler does not call a step that it leaves out, unless the optimizer looks itself.
    is_called = scaler_type is tritonclip.GradScaler or optimizer._step_supports_amp_scaling
    expected = [0, 1, 0] if is_called else [0, 0]
    assert numbers(rows_of(tmp_path / "run.csv"), "skipped") == expected


def test_norms_of_a_scaler_are_unscaled(tmp_path, scaler_type, make):
    with tritonclip.record(tmp_path / "run.csv", each=True) as recorder:
        params, optimizer = wrapped(make, recorder=recorder)
        grads = give_grads(params)
        scaled_step(scaler_type("cpu", init_scale=64.0), optimizer, params, grads)
    (row,) = rows_of(tmp_path / "run.csv")
    norm = float(tritonclip.get_total_norm(grads))
    assert float(row["norm"]) == pytest.approx(norm, rel=1e-6)
    name = "norm/param_groups[0]['params'][1]"
    assert float(row[name]) == pytest.approx(float(grads[1].norm()), rel=1e-6)


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


def test_groups_with_a_rule_have_columns(tmp_path):
    params = new_params()
    groups: list[dict[str, Any]] = [
        {"params": params[:1]},
        {"params": params[1:2], "clip": ClipByNorm(0.5)},
        {"params": params[2:], "clip": ClipByValue(0.5)},
    ]
    with tritonclip.record(tmp_path / "run.csv") as recorder:
        optimizer = ClippedOptimizer(SGD(groups, lr=0.1), 1.0, recorder=recorder)
        grads = step_on(params, optimizer)
        params[1].grad = None
        optimizer.step()
    rows = rows_of(tmp_path / "run.csv")
    assert float(rows[0]["norm"]) == pytest.approx(float(grads[0].norm()), rel=1e-6)
    assert numbers(rows, "norm/group1") == pytest.approx([float(grads[1].norm()), 0.0], rel=1e-6)
    assert "norm/group2" not in rows[0]


@pytest.mark.parametrize("rule", [ClipByValue(1e-3), ClipByNorm(1e-3)], ids=["value", "by-norm"])
def test_a_rule_without_a_norm_of_all_records_it(tmp_path, rule):
    with tritonclip.record(tmp_path / "run.csv") as recorder:
        params, optimizer = wrapped(sgd, rule, recorder=recorder)
        grads = step_on(params, optimizer)
    (row,) = rows_of(tmp_path / "run.csv")
    assert float(row["norm"]) == pytest.approx(float(tritonclip.get_total_norm(grads)), rel=1e-6)
    is_unknown = [row[name] == "" for name in ("coefficient", "limit")]
    assert is_unknown == [isinstance(rule, ClipByValue)] * 2


def test_a_resumed_run_counts_on(tmp_path):
    params, optimizer = wrapped(sgd)
    with tritonclip.record(tmp_path / "run.csv") as recorder:
        optimizer.recorder = recorder
        for _ in range(3):
            step_on(params, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
    params, other = wrapped(sgd)
    with tritonclip.record(tmp_path / "again.csv") as recorder:
        other.recorder = recorder
        other.load_state_dict(saved)
        step_on(params, other)
    assert rows_of(tmp_path / "again.csv")[0]["step"] == "4"


def test_a_copy_of_the_wrapper_records_nothing(tmp_path):
    with tritonclip.record(tmp_path / "run.csv") as recorder:
        _, optimizer = wrapped(sgd, recorder=recorder)
        assert copy.deepcopy(optimizer).recorder is None


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
