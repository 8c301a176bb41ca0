"""How often a step under a GradScaler reads and writes the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

import tritonclip
from helpers.loss_scale import SCALE, backward, grads_at, spoiled
from helpers.training import PLAIN_AND_FUSED, RULES, new_params, wrapped
from tritonclip import ClippedOptimizer
from tritonclip.backends.operators import TorchLayout

pytestmark = pytest.mark.usefixtures("operators")
# On a device nobody knows whether a kernel that was asked to write did.
DECIDED_ON_HOST = PLAIN_AND_FUSED[:2]


class Calls:
    """How often a backend's verbs ran: norms measured, writes asked for, gradients written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured = self.asked = self.written = self.torchs = 0
        # Within a verb, which may scale by the function that torch's scaler unscales with.
        self.in_verb = False
        check = torch._amp_foreach_non_finite_check_and_unscale_
        bind, multiply = TorchLayout.bind, torch._foreach_mul_

        def counting_bind(layout: Any, *args: Any) -> Any:
            return _Counting(bind(layout, *args), self)

        def check_and_unscale(*args: Any) -> None:
            self.written += self.in_verb
            self.torchs += not self.in_verb
            check(*args)

        def foreach_mul_(*args: Any) -> None:
            self.written += 1
            multiply(*args)

        monkeypatch.setattr(TorchLayout, "bind", counting_bind)
        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", check_and_unscale)
        monkeypatch.setattr(torch, "_foreach_mul_", foreach_mul_)


class _Counting:
    def __init__(self, batch: Any, calls: Calls) -> None:
        self._batch, self._calls = batch, calls

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._batch, name)
        if not callable(verb):
            return verb

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls.measured += name == "norm"
            self._calls.asked += name in ("clamp_", "scale_", "scale_each_")
            self._calls.in_verb = True
            try:
                return verb(*args, **kwargs)
            finally:
                self._calls.in_verb = False

        return counted


def counted_step(
    monkeypatch: pytest.MonkeyPatch, scaler: torch.amp.GradScaler, optimizer: Optimizer
) -> Calls:
    """Steps, and tells what ran in the step."""
    calls = Calls(monkeypatch)
    scaler.step(optimizer)
    return calls


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_scaler_reads_and_writes_gradients_once(monkeypatch, make, rule):
    """By our scaler: one measuring pass, one writing pass, no pass of torch's own."""
    params, optimizer = wrapped(make, rule)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(2))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.asked, calls.torchs) == (1, 1, 0)


@pytest.mark.parametrize("make", DECIDED_ON_HOST)
@pytest.mark.parametrize(
    ("scale", "size", "written"),
    [(SCALE, 1.0, 1), (SCALE, 1e-3, 1), (1.0, 1.0, 1), (1.0, 1e-3, 0)],
    ids=["scaled clipped", "scaled below", "unscaled clipped", "unscaled below"],
)
def test_scaler_writes_gradients_only_where_needed(monkeypatch, make, scale, size, written):
    params, optimizer = wrapped(make)
    scaler = tritonclip.GradScaler("cpu", init_scale=scale)
    backward(scaler, params, [size * grad for grad in grads_at(2)])
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.written, calls.torchs) == (1, written, 0)


def test_scaler_overflow_writes_no_gradient(monkeypatch):
    """With an inner optimizer that is told on the host."""
    params = new_params()
    optimizer = ClippedOptimizer(AdamW(params, foreach=False), 1.0)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, spoiled(grads_at(2)))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.asked, calls.torchs) == (1, 0, 0)


@pytest.mark.parametrize("make", DECIDED_ON_HOST)
def test_scaler_reads_once_after_unscale(monkeypatch, make):
    """torch's pass happened in unscale_; the step measures once more, and does not unscale."""
    params, optimizer = wrapped(make)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, [1e-3 * grad for grad in grads_at(2)])
    scaler.unscale_(optimizer)
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.written, calls.torchs) == (1, 0, 0)


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_scaler_of_torch_reads_in_a_pass_of_its_own(monkeypatch, make):
    """What ours saves: torch's scaler looks at the gradients before the wrapper measures them."""
    params, optimizer = wrapped(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(2))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls.measured, calls.torchs) == (1, 1)
