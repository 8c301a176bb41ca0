"""Plans made anew for each test."""

from __future__ import annotations

import pytest

from tritonclip.backward.on_arrival import plans


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    """The backends of tests differ in more than their names, by which plans are kept."""
    plans.clear()
