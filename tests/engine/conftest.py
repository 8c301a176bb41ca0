"""Plans under both kinds of guards, the lists that they were built for, and verbs to be broken."""

from __future__ import annotations

import importlib

import pytest

from tritonclip.backends.native import NativeBatch
from tritonclip.backends.operators import TorchBatch
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


@pytest.fixture
def verbs(backend):
    """The class whose verbs serve the test, to break them."""
    if backend.name == "triton":
        return importlib.import_module("tritonclip.backends.triton").TritonBatch
    if backend.name == "native":
        return NativeBatch
    return TorchBatch
