"""A cache without plans, under both kinds of guards, and the lists that plans were built for."""

from __future__ import annotations

import pytest

from tritonclip.engine import building, planner
from tritonclip.engine.planner import PlanCache


@pytest.fixture(params=["guards of torch", "guards in Python"])
def guards(request, monkeypatch):
    """Both ways to compare lists."""
    if request.param == "guards in Python":
        monkeypatch.setattr(planner, "TensorGuards", None)


@pytest.fixture
def plans(guards):
    """A cache without plans."""
    return PlanCache()


@pytest.fixture
def built(monkeypatch):
    """The lists that a plan was built for."""
    seen = []
    build = building.build_

    def counted(gradients, *arguments, **options):
        seen.append(gradients)
        return build(gradients, *arguments, **options)

    monkeypatch.setattr(planner, "build_", counted)
    return seen
