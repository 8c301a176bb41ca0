"""Whole training steps: rows of each clip, of steps that train."""

from __future__ import annotations

import pytest
import torch

from bench import training
from bench.workloads import WORKLOADS


def test_rows_have_the_part_of_a_step_that_its_clip_takes(monkeypatch):
    monkeypatch.setattr(training, "LEAST", 3)
    torchs, ours = training.rows_of("LeNet-5", seconds=0.0)
    assert [row.get("provider") for row in (torchs, ours)] == ["torch", "tritonclip"]
    for row in (torchs, ours):
        assert row.get("tensors") == 10
        assert row.get("repetitions") == 3
        assert 0 < row.get("clip_us") < row.get("step_us")
        assert 0 < row.get("step_share") < 1


def test_a_step_clips_between_backward_and_update():
    model = torch.nn.Linear(3, 2)
    seen: list[tuple[bool, torch.Tensor]] = []
    before = model.weight.detach().clone()

    def clip(parameters, limit):
        seen.extend((one.grad is not None, one.detach().clone()) for one in parameters)

    training.Step(model, torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), clip)()
    assert [has_grad for has_grad, _ in seen] == [True, True]
    assert torch.equal(seen[0][1], before)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("model", "workload"), [("LeNet-5", "lenet5"), ("MLP 784-256-128-10", None)]
)
def test_models_have_the_shapes_of_their_names(model, workload):
    shapes = [tuple(one.shape) for one in training.MODELS[model][0]().parameters()]
    if workload:
        assert shapes == list(WORKLOADS[workload].shapes)
    else:
        assert [shape for shape in shapes if len(shape) == 2] == [(256, 784), (128, 256), (10, 128)]
