"""Plans made anew for each test, and the process groups of the tests in several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.processes import Worlds
from tritonclip.backward.activations import plans


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    """The backends of tests differ in more than their names, by which plans are kept."""
    plans.clear()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Process groups that live until the end of the session, one for each size asked for."""
    worlds = Worlds()
    yield worlds
    worlds.end()
