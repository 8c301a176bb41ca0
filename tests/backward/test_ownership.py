"""``clip_backward`` overwrites a gradient only where nobody else holds it.

Each scenario runs with a clipping that always copies, as the truth: also whatever else it keeps has
to have the same values.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from helpers.cases import assert_bits, copies, grad_of, normal
from tritonclip import ClipByNorm, clip_backward
from tritonclip.backward import ownership

RULE = ClipByNorm(0.01)
Identity = Callable[[torch.Tensor], torch.Tensor]


class Copying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        # A gradient from outside, which is copied.
        twin = torch.zeros_like(grad, requires_grad=True)
        with torch.enable_grad():
            y = clip_backward(twin, RULE)
        return torch.autograd.grad(y, twin, grad.clone())


class Saved(torch.autograd.Function):
    """Hands on a tensor that its graph keeps."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


def expanded(identity: Identity, x: Any) -> list[Any]:
    identity(x).sum().backward()
    return [x.grad]


def from_the_user(identity: Identity, x: Any) -> list[Any]:
    root = torch.ones(4, 3)
    identity(x).backward(root)
    return [x.grad, root]


def view_from_the_user(identity: Identity, x: Any) -> list[Any]:
    root = torch.ones(12)
    identity(x).view(12).backward(root)
    return [x.grad, root]


def from_numpy(identity: Identity, x: Any) -> list[Any]:
    array = normal((4, 3)).numpy()
    identity(x).backward(torch.from_numpy(array))
    return [x.grad, torch.from_numpy(array)]


def of_two_branches(identity: Identity, x: Any) -> list[Any]:
    other = normal((4, 3)).requires_grad_()
    # Made first, and so waiting while the gradient of the other branch is clipped.
    waiting = other * 3
    ((identity(x * 2) + waiting) * 2).sum().backward()
    return [x.grad, other.grad]


def of_another_parameter(identity: Identity, x: Any) -> list[Any]:
    other = normal((4, 3)).requires_grad_()
    ((identity(x * 2) + other) * 2).sum().backward()
    return [x.grad, other.grad]


def of_one_memory(identity: Identity, x: Any) -> list[Any]:
    other = normal((4, 3)).requires_grad_()
    waiting = (other * 3).view(12)
    ((identity(x * 2).view(12) + waiting) * 2).sum().backward()
    return [x.grad, other.grad]


def retained(identity: Identity, x: Any) -> list[Any]:
    y = identity(x * 2)
    y.retain_grad()
    (y * 2).sum().backward()
    return [x.grad, y.grad]


def captured(identity: Identity, x: Any) -> list[Any]:
    y = identity(x * 2)
    return list(torch.autograd.grad((y * 2).sum(), [y, x]))


def saved_by_the_graph(identity: Identity, x: Any) -> list[Any]:
    kept = normal((4, 3))
    y = Saved.apply(identity(x), kept)
    y.sum().backward()
    return [x.grad, kept]


def kept_by(take: Callable[[torch.Tensor], Any], give: Callable[[Any], torch.Tensor]) -> Any:
    def scenario(identity: Identity, x: Any) -> list[Any]:
        kept: list[Any] = []
        y = identity(x * 2)
        y.register_hook(lambda grad: kept.append(take(grad)))
        (y * 2).sum().backward()
        return [x.grad, give(kept[0])]

    return scenario


def kept_after(identity: Identity, x: Any) -> list[Any]:
    kept: list[Any] = []
    y = identity(x * 2)
    y.grad_fn.register_hook(lambda _, grads: kept.extend(grads))  # type: ignore[union-attr]
    (y * 2).sum().backward()
    return [x.grad, kept[0]]


HELD = {
    "expanded": expanded,
    "from-the-user": from_the_user,
    "view-from-the-user": view_from_the_user,
    "from-numpy": from_numpy,
    "of-two-branches": of_two_branches,
    "of-another-parameter": of_another_parameter,
    "of-one-memory": of_one_memory,
    "retained": retained,
    "captured": captured,
    "saved-by-the-graph": saved_by_the_graph,
    "kept-by-a-hook": kept_by(lambda grad: grad, lambda kept: kept),
    "detached-by-a-hook": kept_by(torch.Tensor.detach, lambda kept: kept),
    "kept-as-array": kept_by(torch.Tensor.numpy, torch.from_numpy),
    "kept-by-dlpack": kept_by(torch.Tensor.__dlpack__, from_dlpack),
    "kept-as-storage": kept_by(
        torch.Tensor.untyped_storage, lambda kept: torch.tensor([], dtype=torch.float32).set_(kept)
    ),
    "kept-by-a-post-hook": kept_after,
}


@pytest.mark.parametrize("scenario", HELD.values(), ids=HELD)
def test_gradients_that_others_hold_are_left_alone(scenario):
    x, twin = (normal((4, 3), seed=1).requires_grad_() for _ in range(2))

    results = copies(scenario(lambda t: clip_backward(t, RULE), x))

    expected = scenario(Copying.apply, twin)
    assert_bits(results, expected)
    assert all(t.abs().max() > 0 for t in expected)


FREE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multiplied": lambda y: y * 2,
    "by-a-matrix": lambda y: y @ normal((3, 2)),
    "by-a-function": torch.tanh,
    "added-up": lambda y: y * 2 + y.exp(),
    "reshaped-later": lambda y: (y * 2).view(-1),
}


@pytest.mark.parametrize("after", FREE.values(), ids=FREE)
@pytest.mark.parametrize("retain_graph", [False, True], ids=["once", "retain-graph"])
def test_gradients_that_backward_made_are_overwritten(after, retain_graph):
    x, addresses = normal((4, 3)).requires_grad_(), []
    y = clip_backward(x, RULE)
    # A number keeps nothing alive.
    y.register_hook(lambda grad: addresses.append(grad.data_ptr()))

    after(y).sum().backward(retain_graph=retain_graph)

    assert x.grad is not None
    assert float(x.grad.norm()) == pytest.approx(RULE.max_norm, rel=1e-3)
    assert addresses == [x.grad.data_ptr()]


def test_gradients_are_copied_where_references_cannot_be_counted(monkeypatch):
    monkeypatch.setattr(ownership, "references_to_free", lambda: None)
    x, addresses = normal((4, 3)).requires_grad_(), []
    y = clip_backward(x, RULE)
    y.register_hook(lambda grad: addresses.append(grad.data_ptr()))

    (y * 2).sum().backward()

    assert x.grad is not None
    assert addresses != [x.grad.data_ptr()]


def test_gradients_are_copied_under_a_debugger():
    """A process that counts while functions are traced does not trust the count."""
    program = (
        "import sys, threading, torch\n"
        "from tritonclip.backward.ownership import references_to_free\n"
        "threading.settrace(lambda *_: None)\n"
        "print(references_to_free())"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.strip() == "None", done.stderr


def test_memory_of_numpy_is_not_overwritten():
    """No count sees its owner."""
    constant = np.full(3, 10.0, dtype=np.float32)

    class FromNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.from_numpy(constant)

    x = torch.zeros(3, requires_grad=True)
    FromNumpy.apply(clip_backward(x, ClipByNorm(1.0))).sum().backward()
    assert constant.tolist() == [10.0] * 3
    assert float(grad_of(x).norm()) == pytest.approx(1.0, rel=1e-6)
