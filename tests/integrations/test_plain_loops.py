"""Accumulation in a plain loop: one clipped step on the whole batch, not one a micro-batch."""

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits

pytest.importorskip("sklearn", reason="the data are scikit-learn's: pip install scikit-learn")

from helpers.digits import BATCHES, MAX_NORM, loader, loss_of, network, sgd, train_by_hand
from helpers.training import SCALERS, train


def scaler_of(kind):
    if kind is None:
        return torch.amp.GradScaler("cpu", enabled=False)
    return kind("cpu", init_scale=1024.0, growth_interval=3)


def losses(model, batches):
    return (loss_of(model, batch) for batch in batches)


@pytest.mark.parametrize("kind", [pytest.param(None, id="no-scaler"), *SCALERS])
def test_accumulation_equals_one_large_batch(kind):
    small, large = network(), network()
    optimizer = tritonclip.ClippedOptimizer(sgd(small), MAX_NORM)

    train(optimizer, losses(small, loader()), scaler_of(kind), accumulate=4)

    reference = sgd(large)
    for batch in loader(batch_size=4 * 32):
        reference.zero_grad()
        loss_of(large, batch).backward()
        torch.nn.utils.clip_grad_norm_(large.parameters(), MAX_NORM)
        reference.step()
    assert optimizer.stats.steps == BATCHES // 4
    assert optimizer.stats.clipped_steps > 0
    # A mean of four means adds the same 128 numbers in another order: 128 * 2**-24 = 8e-6 of a
    # gradient of length 1 at most, and what little three steps make of it.
    for ours, truth in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param(None, id="no-scaler"), *SCALERS])
@pytest.mark.parametrize("accumulate", [1, 4], ids=["each", "accumulate-4"])
def test_loop_equals_clipping_by_hand(kind, accumulate):
    model, by_hand = network(), network()
    optimizer = tritonclip.ClippedOptimizer(sgd(model), MAX_NORM)

    norms = train(optimizer, losses(model, loader()), scaler_of(kind), accumulate)

    expected = train_by_hand(by_hand, loader(), accumulate)
    # Loss scales are powers of two, which round nothing.
    assert norms == expected
    assert_bits(model.parameters(), by_hand.parameters())


@pytest.mark.parametrize("kind", SCALERS)
def test_overflowing_steps_are_left_out(kind):
    model, by_hand = network(), network()
    optimizer = tritonclip.ClippedOptimizer(sgd(model), MAX_NORM)
    batches = [*loader()]
    batches[2][0].fill_(torch.inf)

    train(optimizer, losses(model, batches), scaler_of(kind), accumulate=2)

    norms = train_by_hand(by_hand, batches, 2, scaler=scaler_of(torch.amp.GradScaler))
    assert len(norms) == BATCHES // 2 - 1
    assert optimizer.stats.steps == len(norms)
    assert optimizer.stats.skipped_steps == 0
    assert_bits(model.parameters(), by_hand.parameters())
