"""Fixtures of the tests of backends."""

from __future__ import annotations

import pytest

from tritonclip.backends.native import loops


@pytest.fixture(params=[False, True], ids=["fastest", "portable"])
def both_forms(request):
    """Both forms of the loops in C."""
    loops.set_portable(request.param)
    yield
    loops.set_portable(False)
