"""The behaviour of Keras's clipnorm, clipvalue, global_clipnorm and MaxNorm."""

from __future__ import annotations

import torch

from tritonclip.functional import clip_by_global_norm, clip_by_norm, clip_by_value


def test_clipnorm_clips_each_gradient_by_its_own_norm():
    gradients = [torch.tensor([100.0, 100.0]), torch.tensor([0.3, 0.4])]
    first, second = clip_by_norm(gradients, 1.0)
    torch.testing.assert_close(first, torch.full((2,), 0.5**0.5))
    assert torch.equal(second, gradients[1])


def test_clipvalue_clamps_every_gradient():
    first, second = clip_by_value([torch.tensor([100.0, -100.0]), torch.tensor([0.5])], -1.0, 1.0)
    assert first.tolist() == [1.0, -1.0]
    assert second.tolist() == [0.5]


def test_global_clipnorm_clips_all_gradients_by_one_norm():
    gradients = [torch.tensor([30.0, 0.0]), None, torch.tensor([40.0])]
    clipped, _ = clip_by_global_norm(gradients, 1.0)
    torch.testing.assert_close(clipped[0], torch.tensor([0.6, 0.0]))
    assert clipped[1] is None
    torch.testing.assert_close(clipped[2], torch.tensor([0.8]))


def test_one_gradient_is_clipped_alike_by_clipnorm_and_global_clipnorm():
    x = torch.tensor([100.0, 100.0])
    assert torch.equal(clip_by_norm(x, 1.0), clip_by_global_norm([x], 1.0)[0][0])


def test_max_norm_limits_the_incoming_weights_of_each_unit():
    """Keras's MaxNorm(2.0, axis=0), over a kernel whose units are its columns."""
    weight = torch.tensor([[0.0, 1.0, 3.0, 3.0], [0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 3.0]])
    limited = clip_by_norm(weight, 2.0, dim=0)
    side = 2.0 / 3**0.5
    expected = torch.tensor([[0.0, 1.0, 2.0, side], [0.0, 0.0, 0.0, side], [0.0, 0.0, 0.0, side]])
    torch.testing.assert_close(limited, expected)


def test_max_norm_limits_convolution_filters_over_three_axes():
    """A filter of torch is one of the first dimension, of Keras of the last."""
    weight = torch.ones(4, 3, 2, 2)
    norms = torch.linalg.vector_norm(clip_by_norm(weight, 1.5, dim=(1, 2, 3)), dim=(1, 2, 3))
    torch.testing.assert_close(norms, torch.full((4,), 1.5))
