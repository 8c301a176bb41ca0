"""Plans keep nothing of dispatch modes, and are not misled inside a custom operator."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritonclip
from helpers.cases import normal, parameter
from helpers.plan_lists import SIZES, contiguous, planned
from helpers.serving import forget_plans


class Passing(torch.utils._python_dispatch.TorchDispatchMode):
    """Sees every operator, and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_no_plan_is_kept_of_a_list_met_under_a_dispatch_mode(plans):
    """Such a mode may hand out other tensors than asked for, as scratch too."""
    grads = contiguous()
    with Passing():
        planned(grads, plans)
    assert not len(plans)
    planned(grads, plans)
    assert len(plans) == 1


def test_a_kept_plan_is_not_filled_under_a_dispatch_mode(device):
    """Scratch of such a mode would serve every later call."""
    forget_plans()
    params = [parameter(normal(n, device=device)) for n in SIZES]
    tritonclip.clip_(params, tritonclip.ClipByValue(100.0))
    with contextlib.suppress(RuntimeError), FakeTensorMode(allow_non_fake_inputs=True):
        tritonclip.clip_(params, 1e9)
    expected = tritonclip.get_total_norm([normal(n, device=device) for n in SIZES])
    assert tritonclip.clip_(params, 1e9) == expected


@torch.library.custom_op("inside::clip", mutates_args={"a", "b"})
def clip_inside(a: Tensor, b: Tensor) -> Tensor:
    return tritonclip.clip_([parameter(a), parameter(b)], 1.0)


def test_a_list_met_inside_a_custom_operator_says_nothing_of_inference_mode(guards):
    """Inside, a normal tensor has the dispatch keys of one made in inference mode."""
    forget_plans()
    for _ in range(2):
        clip_inside(torch.ones(5), torch.ones(5))
    with torch.inference_mode():
        grads = [torch.full((5,), 2.0) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="made in inference mode"):
            tritonclip.clip_([parameter(grad) for grad in grads], 1.0)
    assert all((grad == 2).all() for grad in grads)
    clip_inside(torch.ones(5), torch.ones(5))
