"""The process groups of the tests in several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.processes import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Process groups that live until the end of the session, one for each size asked for."""
    worlds = Worlds()
    yield worlds
    worlds.end()
