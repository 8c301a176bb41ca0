"""Plans under both kinds of guards, the lists that they were built for, and verbs to break."""

import pytest

from tritonclip.backends.torch import TorchBatch
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
def faulty_verbs(verbs):
    """Verbs whose faults the reference does not share: it is the torch backend itself."""
    if verbs is TorchBatch:
        pytest.skip("the reference has the faults of the torch backend")
    return verbs
