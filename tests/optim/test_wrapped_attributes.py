"""Methods and attributes that only the wrapped optimizer has, reached through the wrapper."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.optim import SGD

from helpers.cases import normal
from tritonclip import ClipByGlobalNorm, ClippedOptimizer

RULE = ClipByGlobalNorm(1.0, eps=0.0)


class ScheduleFree(SGD):
    """Switched before every evaluation, as schedule-free optimizers are."""

    n_switches = 0
    training = False

    def train(self):
        self.training = True
        self.n_switches += 1

    def eval(self):
        self.training = False
        self.n_switches += 1

    def step(self, closure=None):
        assert self.training
        return super().step(closure)

    @property
    def lacking(self):
        raise AttributeError("of the property")


class SAM(SGD):
    """Sharpness-aware minimization: the gradient at the top of a hill moves the weights below."""

    def __init__(self, params, base=SGD, **options):
        super().__init__(params, **options)
        self.base = base(self.param_groups, **options)
        self.n_steps = 0

    @torch.no_grad()
    def first_step(self):
        self.hills = [
            (p, p.grad / p.grad.norm()) for group in self.param_groups for p in group["params"]
        ]
        for parameter, hill in self.hills:
            parameter += hill

    @torch.no_grad()
    def second_step(self):
        for parameter, hill in self.hills:
            parameter -= hill
        self.base.step()
        self.n_steps += 1

    def set_closure(self, closure):
        """As that of GSAM: the step calls it."""
        self.closure = closure

    def get_step(self):
        return self.n_steps

    def step(self, closure: Any = None):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def wrapped(kind=ScheduleFree, **options) -> tuple[torch.nn.Parameter, Any]:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    return weight, ClippedOptimizer(kind([weight], lr=1.0, **options), RULE)


def test_methods_of_the_wrapped_optimizer_are_called():
    weight, optimizer = wrapped()

    optimizer.train()
    optimizer.step()
    optimizer.eval()

    torch.testing.assert_close(weight.data, torch.tensor([-0.6, -0.8]))
    assert optimizer.n_switches == 2


def test_attributes_of_the_wrapper_come_first():
    _, optimizer = wrapped()
    # An interrupted step may leave the latter two.
    vars(optimizer.optimizer).update(max_norm=7.0, grad_scale=5.0, found_inf=torch.ones(()))

    assert optimizer.step.__self__ is optimizer
    with pytest.raises(AttributeError, match="max_norm"):
        _ = optimizer.max_norm
    with pytest.raises(AttributeError, match="no loss scale is set"):
        _ = optimizer.grad_scale
    assert optimizer.found_inf is None


def test_attribute_that_is_set_stays_on_the_wrapper():
    _, optimizer = wrapped()

    optimizer.training = 3

    assert (optimizer.training, optimizer.optimizer.training) == (3, False)


@pytest.mark.parametrize("name", ["trian", "_private", "lacking"])
def test_other_names_raise(name):
    _, optimizer = wrapped()

    with pytest.raises(AttributeError, match=f"'ClippedOptimizer' object has no attribute '{name}"):
        getattr(optimizer, name)
    assert not hasattr(optimizer, name)


def test_property_of_a_subclass_says_why_it_raises():
    class Subclass(ClippedOptimizer):
        @property
        def n_switches(self):
            raise AttributeError("counts nothing")

    weight, _ = wrapped()
    with pytest.raises(AttributeError, match="counts nothing"):
        _ = Subclass(ScheduleFree([weight]), 1.0).n_switches


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_reaches_its_own_optimizer(copied):
    _, optimizer = wrapped()

    twin = copied(optimizer)
    twin.train()

    assert (twin.training, optimizer.training) == (True, False)


@pytest.mark.parametrize("name", ["first_step", "second_step", "set_closure"])
def test_methods_that_step_past_the_clipping_are_refused(name):
    _, optimizer = wrapped(SAM)

    message = rf"{name}\(\) of SAM would lead to an update .*; expected step\(closure\)"
    with pytest.raises(AttributeError, match=message):
        getattr(optimizer, name)
    assert not hasattr(optimizer, name)
    assert callable(getattr(optimizer.optimizer, name))


def test_methods_and_numbers_about_steps_are_no_steps():
    _, optimizer = wrapped(SAM)

    assert (optimizer.get_step(), optimizer.n_steps) == (0, 0)


def norm_of_update(weight, step):
    before = weight.detach().clone()
    step()
    return float((weight.detach() - before).norm())


def test_sharpness_aware_step_is_clipped_around_it():
    weight, optimizer = wrapped(SAM)

    def closure():
        optimizer.zero_grad()
        loss = (weight * normal(2, seed=1) * 100).sum()
        loss.backward()
        return loss

    assert norm_of_update(weight, lambda: optimizer.step(closure)) == pytest.approx(1.0)


def test_sharpness_aware_steps_by_hand_are_clipped_inside_it():
    """The remedy of the message."""
    weight = torch.nn.Parameter(torch.zeros(2))
    sam = SAM([weight], lambda groups, **options: ClippedOptimizer(SGD(groups, **options), RULE))

    def turn():
        weight.grad = torch.tensor([3.0, 4.0])
        sam.first_step()
        weight.grad = torch.tensor([30.0, 40.0])
        sam.second_step()

    sam.param_groups[0]["lr"] = 1.0
    assert norm_of_update(weight, turn) == pytest.approx(1.0)
