"""Optimizers that decide on the device, as on an accelerator, whether a step is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from helpers.serving import decided_on_device


@pytest.fixture(autouse=True)
def deferred_where_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    """The host decides nothing in a test whose `make` is on a device."""
    callspec = getattr(request.node, "callspec", None)
    make = None if callspec is None else callspec.params.get("make")
    with decided_on_device() if getattr(make, "on_device", False) else nullcontext():
        yield
