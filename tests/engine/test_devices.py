"""Gradients on several devices: each of them knows the norms of all."""

from __future__ import annotations

import pytest
import torch

from tritonclip.engine.norms import _on_every_device

# No tensor lies on the second, but it is another device to whoever asks.
FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0)


@pytest.mark.parametrize("own_first", [False, True])
def test_every_device_gets_the_norms_of_all(own_first):
    own = {FIRST: torch.tensor([1.0, 2.0]), SECOND: torch.tensor([3.0])}
    everywhere = {
        device: norms.tolist()
        for device, norms in _on_every_device(own, own_first=own_first).items()
    }
    # In one order, unless a device looks its own up by their index.
    assert everywhere == {
        FIRST: [1.0, 2.0, 3.0],
        SECOND: [3.0, 1.0, 2.0] if own_first else [1.0, 2.0, 3.0],
    }
