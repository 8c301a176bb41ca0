"""Warnings point to the user's line, through however many of our frames and torch's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import parameters
from helpers.serving import forget_plans
from tritonclip.backends import choose

CALLS: dict[str, Callable[[list[Tensor]], Any]] = {
    "clip_": lambda params: tritonclip.clip_(params, 1.0),
    "clip_grad_norm_": lambda params: tritonclip.clip_grad_norm_(params, 1.0),
    "norms_by_name": tritonclip.norms_by_name,
    "step": lambda params: tritonclip.ClippedOptimizer(torch.optim.SGD(params), 1.0).step(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_warning_names_the_line_that_called(call, monkeypatch):
    monkeypatch.setattr(choose, "loops", None)
    monkeypatch.setattr(choose, "fault", "it was not built")
    choose._warn_once.cache_clear()
    forget_plans()
    with tritonclip.use_backend("auto"), pytest.warns(UserWarning, match="slower") as caught:
        call(parameters([torch.ones(4)]))
    choose._warn_once.cache_clear()
    forget_plans()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("package", [torch, tritonclip])
def test_a_package_of_a_longer_name_is_the_users(package):
    file = f"{Path(package.__file__).parent}vision/train.py"
    call = compile("clip_((p for p in []), 1.0)", file, "exec")
    with pytest.warns(UserWarning, match="empty generator") as caught:
        exec(call, {"clip_": tritonclip.clip_})
    assert [warning.filename for warning in caught] == [file]
