"""A wrapper under a GradScaler, torch's and ours: unscaled once, clipped unscaled, steps judged.

The truth is a loop without any scaler: gradients as they are without a loss scale, clipped by hand
in float64, the bare optimizer stepped where they are finite, the scale kept by hand.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import tritonclip
from helpers.cases import assert_bits, assert_norm, copies
from helpers.loss_scale import (
    SCALE,
    UNSCALED_BEFORE,
    assert_same_run,
    backward,
    grads_at,
    hand_step,
    scaled_step,
    spoiled,
    weight_under,
)
from helpers.training import PLAIN_AND_FUSED, new_params, wrapped
from tritonclip import ClipByGlobalNorm, ClipByValue, ClippedOptimizer
from tritonclip.backends.operators import TorchBatch


def test_scaler_run_is_right_for_momentum_that_starts_late(scaler):
    """A group whose first gradients come, and overflow, after the first step of the others."""
    params, twins = new_params(), new_params()

    def sgd(given: list[Tensor]) -> Optimizer:
        groups = [{"params": given[:2]}, {"params": given[2:]}]
        return SGD(groups, lr=0.1, momentum=0.9, fused=True)

    optimizer, bare = ClippedOptimizer(sgd(params), 1.0), sgd(twins)
    for step in range(4):
        grads = grads_at(step)
        some = slice(0, 2) if step == 0 else slice(None)
        given = spoiled(grads) if step == 1 else grads
        scaled_step(scaler, optimizer, params[some], given[some])
        if step != 1:
            hand_step(bare, twins[some], grads[some], ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)


def test_scaler_serves_a_bare_optimizer_beside_a_wrapper(scaler):
    params, twins = new_params(), new_params()
    bare = AdamW(params, lr=0.1)
    for step in range(3):
        scaled_step(scaler, bare, params, spoiled(grads_at(1)) if step == 1 else grads_at(step))
    expected = AdamW(twins, lr=0.1)
    for step in (0, 2):
        hand_step(expected, twins, grads_at(step), ClipByValue(1e9))
    assert_bits(params, copies(twins))


def test_scaler_that_is_disabled_leaves_clipping_as_it_is(scaler_type):
    params, twins = new_params(), new_params()
    optimizer = ClippedOptimizer(AdamW(params, lr=0.1), 1.0)
    scaler = scaler_type("cpu", enabled=False)
    bare = AdamW(twins, lr=0.1)
    for step in range(3):
        scaled_step(scaler, optimizer, params, grads_at(step), unscale=True)
        hand_step(bare, twins, grads_at(step), ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)
    assert int(optimizer.stats.steps) == 3


@UNSCALED_BEFORE
def test_scaler_unscales_and_clips_sparse_gradients(scaler, unscale):
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = ClippedOptimizer(SGD(embedding.parameters(), lr=1.0), 1.0)
    before = embedding.weight.detach().clone()
    # Row 1 is met twice, so its gradient is 2 in both columns: the norm is (2*2*2 + 2)**0.5.
    scaler.scale(embedding(torch.tensor([1, 1, 4])).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    expected = before.clone()
    expected[1] -= 2 / 10**0.5
    expected[4] -= 1 / 10**0.5
    # Coefficients add the eps of 1e-6 to a norm of 3.2, and float32 rounds.
    torch.testing.assert_close(embedding.weight.detach(), expected, rtol=0, atol=1e-6)
    assert_norm(optimizer.stats.last_norm, 10**0.5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weight, _: setattr(weight, "grad", weight.grad * 0.1), [-0.3, -0.4]),
        (lambda weight, _: weight.grad.mul_(0.1), [-0.3, -0.4]),
        (
            lambda _, optimizer: setattr(optimizer, "clip", ClipByGlobalNorm(2.0, eps=0.0)),
            [-1.2, -1.6],
        ),
    ],
    ids=["replaced", "in-place", "rule"],
)
def test_scaler_heeds_what_a_step_hook_changes(scaler_type, change, expected):
    weight, optimizer, scaler = weight_under(scaler_type)

    def hook(*_: object) -> None:
        change(weight, optimizer)

    optimizer.register_step_pre_hook(hook)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))


def test_step_takes_scale_and_overflow_of_a_scaler_in_other_code():
    """As of a package with a scaler of its own, which sets both and deletes both."""
    weight, optimizer, _ = weight_under(torch.amp.GradScaler, fused=True)
    for overflow, expected in ((1.0, [0.0, 0.0]), (0.0, [-0.6, -0.8])):
        weight.grad = torch.tensor([3072.0, 4096.0])
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(overflow)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        torch.testing.assert_close(weight.detach(), torch.tensor(expected))


# On a device nobody knows whether a kernel that was asked to write did.
DECIDED_ON_HOST = PLAIN_AND_FUSED[:2]
WRITES = ("clamp_", "scale_", "scale_each_")


def counted_step(
    monkeypatch: pytest.MonkeyPatch, scaler: torch.amp.GradScaler, optimizer: Optimizer
) -> Counter[str]:
    """How often a step measured norms, asked for a write, wrote, and ran torch's own pass."""
    calls: Counter[str] = Counter()
    # Verbs that run, which may scale by the function that torch's scaler unscales with.
    running: list[str] = []

    def count_verb(name: str) -> None:
        verb = getattr(TorchBatch, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls["measured" if name == "norm" else "asked"] += 1
            running.append(name)
            try:
                return verb(*args, **kwargs)
            finally:
                running.pop()

        monkeypatch.setattr(TorchBatch, name, counted)

    def count_pass(name: str, *, is_torchs: bool) -> None:
        operator = getattr(torch, name)

        def counted(*args: Any) -> None:
            calls["torchs" if is_torchs and not running else "written"] += 1
            operator(*args)

        monkeypatch.setattr(torch, name, counted)

    for name in ("norm", *WRITES):
        count_verb(name)
    count_pass("_amp_foreach_non_finite_check_and_unscale_", is_torchs=True)
    count_pass("_foreach_mul_", is_torchs=False)
    scaler.step(optimizer)
    return calls


@pytest.mark.usefixtures("operators")
def test_scaler_reads_and_writes_gradients_once(monkeypatch, make, rule):
    """By our scaler: one measuring pass, one writing pass, no pass of torch's own."""
    params, optimizer = wrapped(make, rule)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(2))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls["measured"], calls["asked"], calls["torchs"]) == (1, 1, 0)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("make", DECIDED_ON_HOST)
@pytest.mark.parametrize(
    ("scale", "size", "unscale", "written"),
    [
        pytest.param(SCALE, 1.0, False, 1, id="scaled clipped"),
        pytest.param(SCALE, 1e-3, False, 1, id="scaled below"),
        pytest.param(1.0, 1.0, False, 1, id="unscaled clipped"),
        pytest.param(1.0, 1e-3, False, 0, id="unscaled below"),
        # torch's pass happened in unscale_; the step measures once more, and does not unscale.
        pytest.param(SCALE, 1e-3, True, 0, id="after unscale_"),
    ],
)
def test_scaler_writes_gradients_only_where_needed(
    monkeypatch, make, scale, size, unscale, written
):
    params, optimizer = wrapped(make)
    scaler = tritonclip.GradScaler("cpu", init_scale=scale)
    backward(scaler, params, [size * grad for grad in grads_at(2)])
    if unscale:
        scaler.unscale_(optimizer)
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls["measured"], calls["written"], calls["torchs"]) == (1, written, 0)


@pytest.mark.usefixtures("operators")
def test_scaler_overflow_writes_no_gradient(monkeypatch):
    """With an inner optimizer that is told on the host."""
    params, optimizer = wrapped(lambda p: AdamW(p, foreach=False))
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, spoiled(grads_at(2)))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls["measured"], calls["asked"], calls["torchs"]) == (1, 0, 0)


@pytest.mark.usefixtures("operators")
def test_scaler_of_torch_reads_in_a_pass_of_its_own(monkeypatch, make):
    """What ours saves: torch's scaler looks at the gradients before the wrapper measures them."""
    params, optimizer = wrapped(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(2))
    calls = counted_step(monkeypatch, scaler, optimizer)
    assert (calls["measured"], calls["torchs"]) == (1, 1)
