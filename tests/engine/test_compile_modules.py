"""``torch.compile`` traces the clip of a module, and refuses marks on modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tritonclip
from helpers.graphs import COMPILING, compiled

pytestmark = COMPILING


@pytest.fixture
def model() -> Any:
    """A module inside another one, with gradients."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_compiled_calls_take_modules(model):
    compiled(lambda: tritonclip.clip_(model, 0.0))()

    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_compiled_calls_refuse_marks(model):
    model[1].need_clip = False

    with pytest.raises(Exception, match="need_clip = False"):
        torch.compile(lambda: tritonclip.clip_(model, 0.0), backend="aot_eager")()
