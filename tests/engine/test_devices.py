"""Gradients on several devices: each of them knows the norms of all."""

from __future__ import annotations

import torch

from tritonclip.engine.norms import _join

# No tensor lies on the second, but it is another device to whoever asks.
FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0)


def test_every_group_gets_the_norms_of_all_in_one_order():
    partials = [torch.tensor([1.0, 2.0]), [4.0], torch.tensor([3.0])]
    joined = _join(partials, [FIRST, FIRST, SECOND])
    assert [norms.tolist() for norms in joined] == [[1.0, 2.0, 4.0, 3.0]] * 3


def test_norms_of_the_host_stay_numbers():
    assert _join([[1.0], [2.0, 3.0]], [FIRST, FIRST]) == [[1.0, 2.0, 3.0]] * 2
