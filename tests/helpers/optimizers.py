"""Every optimizer of torch.optim, and its training by a wrapper or with clip_ by hand."""

import io
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

import tritonclip
from helpers.cases import assert_bits, normal
from tritonclip import ClipByGlobalNorm, ClippedOptimizer

LIMIT = 1.0
# The gradients of `loss_of` have norms of 30 or so: all but the first step are clipped.
FACTORS = (1e-3, 5.0, 1.0)

CLASSES: dict[str, Any] = {
    name: one
    for name, one in vars(torch.optim).items()
    if isinstance(one, type) and issubclass(one, Optimizer) and one is not Optimizer
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "foreach": True}, {"fused": True}],
    "Adam": [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}],
    "AdamW": [{}, {"fused": True}],
    "Adagrad": [{}, {"fused": True}],
    "LBFGS": [{"max_iter": 4}, {"max_iter": 4, "line_search_fn": "strong_wolfe"}],
}


def _id(name, options):
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])


# Some options of those that have several implementations, and each of torch.optim at least once.
EVERY = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=_id(name, options))
        for name in CLASSES
        for options in OPTIONS.get(name, [{}])
    ],
)
ONE_OF_EACH = pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, OPTIONS.get(name, [{}])[0], id=name) for name in CLASSES],
)


def torch_saved(saved, *, weights_only=False):
    """What torch.load makes of the file of torch.save."""
    file = io.BytesIO()
    torch.save(saved, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=weights_only)


COPIED = pytest.mark.parametrize(
    "copied",
    [deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), torch_saved],
    ids=["deepcopy", "pickle", "torch.save"],
)


def made(name):
    """Parameters that an optimizer takes: Muon wants matrices."""
    shapes = ((4, 3), (2, 4)) if name in ("Muon", "SparseAdam") else ((4, 3), (2, 4), (3,), ())
    return [torch.nn.Parameter(normal(shape, seed=i)) for i, shape in enumerate(shapes)]


def build(name, params, options):
    return CLASSES[name](params, lr=0.05, **options)


def loss_of(name, params):
    if name == "SparseAdam":
        rows = torch.tensor([1, 0, 1])
        params = [torch.nn.functional.embedding(rows, p, sparse=True) for p in params]
    return sum(((p**4).sum() + (p**2).sum() for p in params), torch.zeros(()))


def train(name, optimizer, params, factors=FACTORS, *, with_closure=False):
    """Trains; by hand, with clip_ after each backward, where the optimizer does not clip."""
    by_hand = not isinstance(optimizer, ClippedOptimizer)
    losses = []
    for factor in factors:

        def closure(factor=factor):
            optimizer.zero_grad()
            loss = factor * loss_of(name, params)
            loss.backward()
            if by_hand:
                tritonclip.clip_(params, LIMIT)
            losses.append(loss.detach())
            return loss

        if with_closure or name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return losses


def assert_same_state(ours, theirs):
    """Same checkpoints, apart from statistics and what stands for rules."""
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    groups = [
        [
            {k: v for k, v in group.items() if k not in ("clip", "tritonclip")}
            for group in one["param_groups"]
        ]
        for one in (ours, theirs)
    ]
    assert groups[0] == groups[1]


def assert_same(ours, our_params, theirs, their_params):
    """Same parameters and same optimizer state."""
    assert_bits(our_params, their_params)
    assert_same_state(ours.state_dict(), theirs.state_dict())


def one_weight(**options):
    """A weight, its gradient with a norm of 5, and a wrapped SGD with a limit of 2.5."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    rule = ClipByGlobalNorm(2.5, eps=0.0)
    return weight, ClippedOptimizer(SGD([weight], lr=1.0, **options), rule)


def assert_shared(wrapper):
    assert wrapper.param_groups is wrapper.optimizer.param_groups
    assert wrapper.state is wrapper.optimizer.state
    assert wrapper.defaults is wrapper.optimizer.defaults
