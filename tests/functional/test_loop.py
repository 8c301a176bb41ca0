"""A functional training loop equals the in-place one to rounding."""

import pytest
import torch
from torch.func import functional_call, grad
from torch.nn import Linear, Sequential, Tanh
from torch.nn.functional import mse_loss

import tritonclip
from tritonclip import ClipByGlobalNorm
from tritonclip.functional import clip_by_global_norm

STEPS, RATE, LIMIT = 40, 0.05, 4.5


def model_and_data():
    torch.manual_seed(0)
    model = Sequential(Linear(4, 16), Tanh(), Linear(16, 2))
    inputs = torch.randn(STEPS, 32, 4)
    return model, inputs, torch.stack([inputs[..., 0] * inputs[..., 1], inputs[..., 2]], dim=-1) * 4


def in_place():
    model, inputs, targets = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    norms = []
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        norms.append(tritonclip.clip_(model, ClipByGlobalNorm(LIMIT, eps=0.0)))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, torch.stack(norms)


def functional(transform=lambda step: step):
    model, inputs, targets = model_and_data()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x, y):
        return mse_loss(functional_call(model, parameters, (x,)), y)

    def step(parameters, x, y):
        gradients, norm = clip_by_global_norm(grad(loss)(parameters, x, y), LIMIT)
        return {name: p - RATE * gradients[name] for name, p in parameters.items()}, norm

    made, norms = transform(step), []
    for x, y in zip(inputs, targets, strict=True):
        parameters, norm = made(parameters, x, y)
        norms.append(norm)
    return parameters, torch.stack(norms)


def assert_equal_runs(ours, theirs):
    parameters, norms = ours
    expected, measured = theirs
    # Some steps are clipped and some are not.
    assert 0 < int((measured > LIMIT).sum()) < STEPS
    torch.testing.assert_close(norms, measured, rtol=1e-5, atol=0)
    torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)


def test_functional_loop_is_the_in_place_one():
    assert_equal_runs(functional(), in_place())


# torch's own deprecations while it traces are not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.plain_empty
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_functional_loop_is_the_in_place_one():
    run = functional(lambda step: torch.compile(step, fullgraph=True, backend="aot_eager"))
    assert_equal_runs(run, in_place())
