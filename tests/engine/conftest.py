"""Plans under both kinds of guards, the lists that they were built for, and verbs to be broken."""

from __future__ import annotations

import importlib

import pytest

from tritonclip.backends.cpu_backend import CpuBatch
from tritonclip.backends.native_backend import NativeBatch
from tritonclip.backends.torch_backend import TorchBatch
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


@pytest.fixture
def verbs(backend):
    """The class whose verbs serve the test, to break them."""
    if backend.name == "triton":
        return importlib.import_module("tritonclip.backends.triton_backend").TritonBatch
    if backend.name == "native":
        return NativeBatch
    return TorchBatch if backend.module == "torch_backend" else CpuBatch
