"""Optimizers, rules and GradScalers that most tests of this folder run with."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from helpers.loss_scale import SCALE
from helpers.serving import decided_on_device
from helpers.training import PLAIN_AND_FUSED, RULES, SCALERS


@pytest.fixture(params=PLAIN_AND_FUSED)
def make(request: pytest.FixtureRequest) -> Any:
    """A function from parameters to an optimizer."""
    return request.param


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Any:
    """By the norm of all, by the norm of each, and by value."""
    return request.param


@pytest.fixture(params=SCALERS)
def scaler_type(request: pytest.FixtureRequest) -> Any:
    """The class of a GradScaler, torch's or ours."""
    return request.param


@pytest.fixture
def scaler(scaler_type: Any) -> torch.amp.GradScaler:
    """A GradScaler, torch's or ours."""
    made: torch.amp.GradScaler = scaler_type("cpu", init_scale=SCALE)
    return made


@pytest.fixture(autouse=True)
def deferred_where_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    """The host decides nothing in a test whose `make` is on a device."""
    callspec = getattr(request.node, "callspec", None)
    make = None if callspec is None else callspec.params.get("make")
    with decided_on_device() if getattr(make, "on_device", False) else nullcontext():
        yield
