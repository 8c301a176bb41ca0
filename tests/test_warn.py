"""Warnings point to the user's line, through however many of our frames and torch's."""

from pathlib import Path

import pytest
import torch

import tritonclip
from helpers.cases import parameters
from helpers.serving import forget_plans
from tritonclip import ClippedOptimizer
from tritonclip.backends import choose


def wrapped() -> ClippedOptimizer:
    (param,) = parameters([torch.ones(3)])
    return ClippedOptimizer(torch.optim.SGD([param], lr=0.1), 1.0)


def step_of_the_inner_optimizer() -> None:
    # A variable, because the wrapper has to live.
    wrapper = wrapped()
    wrapper.optimizer.step()


CALLS = {
    "clip_": lambda: tritonclip.clip_([torch.zeros(3)], 1.0),
    "clip_grad_norm_": lambda: tritonclip.clip_grad_norm_([torch.zeros(3)], 1.0),
    "norms_by_name": lambda: tritonclip.norms_by_name([("w", torch.zeros(3))]),
    "step of the inner optimizer": step_of_the_inner_optimizer,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_warning_names_the_line_that_called(call):
    with pytest.warns(UserWarning, match="expected") as caught:
        call()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("clip_", [tritonclip.clip_, tritonclip.clip_grad_norm_])
def test_warning_of_a_slower_backend_names_the_line_that_called(clip_, monkeypatch):
    monkeypatch.setattr(choose, "loops", None)
    monkeypatch.setattr(choose, "fault", "it was not built")
    choose._warn_once.cache_clear()
    forget_plans()
    with tritonclip.use_backend("auto"), pytest.warns(UserWarning, match="slower") as caught:
        clip_(parameters([torch.ones(4)]), 1.0)
    choose._warn_once.cache_clear()
    forget_plans()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("package", [torch, tritonclip])
def test_a_package_of_a_longer_name_is_the_users(package):
    file = f"{Path(package.__file__).parent}vision/train.py"
    call = compile("clip_([zeros(3)], 1.0)", file, "exec")
    with pytest.warns(UserWarning, match="expected") as caught:
        exec(call, {"clip_": tritonclip.clip_, "zeros": torch.zeros})
    assert [warning.filename for warning in caught] == [file]
