"""Plans under both kinds of guards, and the lists that they were built for."""

from __future__ import annotations

import pytest

from tritonclip.engine import gradients, plan, plan_cache
from tritonclip.engine.plan_cache import PlanCache


@pytest.fixture(params=["guards of torch", "guards in Python"])
def guards(request, monkeypatch):
    """Both ways to compare lists."""
    if request.param == "guards in Python":
        monkeypatch.setattr(plan_cache, "TensorGuards", None)


@pytest.fixture
def plans(guards):
    """A cache without plans."""
    return PlanCache()


@pytest.fixture
def built(monkeypatch):
    """The lists that a plan was built for."""
    seen = []
    make = plan.make_plan

    def counted(tensors, *arguments, **options):
        seen.append(tensors)
        return make(tensors, *arguments, **options)

    monkeypatch.setattr(gradients, "make_plan", counted)
    return seen
