"""Features beside other loops, and whole training steps: all results are right."""

import math

import pytest
import torch

from bench import models
from bench import test_training as training
from bench.comparison import Effort
from bench.test_features import FEATURES, difference


@pytest.mark.parametrize("feature", FEATURES)
def test_results_on_the_first_list_are_right(feature):
    calls, faults = FEATURES[feature].checked(next(iter(FEATURES[feature].cases)))
    assert "tritonclip" in calls
    assert faults == {}


def test_difference_is_relative_to_the_largest_element():
    truth = [torch.tensor([1.0, -2.0], dtype=torch.float64)]
    assert difference([torch.tensor([1.0, -2.1])], truth) == pytest.approx(0.05)
    assert difference(None, []) == 0.0
    nan = torch.tensor([math.nan, 1.0])
    assert math.isnan(difference([torch.ones(2), nan], [torch.ones(2).double()] * 2))


def test_a_step_has_its_time_and_that_of_its_clip():
    device = torch.device("cpu")
    made = training.steps_of("LeNet-5", 2, training.CLIPS, device)
    found = training.take_turns(made, Effort(2, 0.0), device)
    for name, step in made.items():
        assert len(step.clips) == len(found[name].walls) == 2
        assert 0 < step.clips[0] < found[name].walls[0]


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


def test_models_have_the_shapes_of_their_names():
    shapes = [tuple(one.shape) for one in models.MODELS["MLP 784-256-128-10"].make().parameters()]
    assert [shape for shape in shapes if len(shape) == 2] == [(256, 784), (128, 256), (10, 128)]
