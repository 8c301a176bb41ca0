"""Groups of gradients: only one is clipped directly, and all of several have every norm."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import CHUNK, assert_bits, copies, each_rule, grad_of, of_sizes, parameters
from tritonclip.engine import execute
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import _join

RULES = [*each_rule(0.5, 0.1), pytest.param(tritonclip.ClipByNorm(0.5, norm_type=3.0), id="p=3")]


@pytest.fixture
def only_directly(monkeypatch):
    """Refuses to measure first and write then, as for other lists."""

    def refused(*_, **__):
        raise AssertionError("measured before it was written")

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "measure", refused)
        patch.setattr(execute, "write_", refused)
        yield patch


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_direct_clipping_gives_the_bits_of_measuring_first(
    device, dtype, scale, rule, only_directly
):
    grads = of_sizes((5, 40, 1, CHUNK + 1), dtype, device)
    direct, measured = parameters(grads), parameters([grad.clone() for grad in grads])
    norm = tritonclip.clip_(direct, rule, grad_scale=scale)
    only_directly.undo()
    same = tritonclip.clip_(measured, rule, nonfinite="error", grad_scale=scale)
    assert_bits(map(grad_of, direct), map(grad_of, measured))
    if norm is None or same is None:
        assert norm is same
    else:
        assert_bits([norm], [same])


@pytest.mark.parametrize("rule", RULES)
def test_calls_that_are_verified_measure_first(device, rule, monkeypatch):
    params = parameters(of_sizes((5, 40), torch.float32, device))
    written, write_ = [], execute.write_

    def noted(gradients, *args, **kwargs):
        written.append(gradients.tensors[0])
        return write_(gradients, *args, **kwargs)

    monkeypatch.setattr(execute, "write_", noted)
    with tritonclip.verify():
        tritonclip.clip_(params, rule)
    # The check itself clips copies.
    assert sum(grad is params[0].grad for grad in written) == 1


def test_lists_of_two_groups_are_measured_first(device, only_directly):
    grads = [
        *of_sizes((5,), torch.float32, device),
        *of_sizes((5,), torch.float64, device),
    ]
    with pytest.raises(AssertionError, match="measured before"):
        tritonclip.clip_(parameters(grads), 0.5)


def test_rules_that_clamp_one_list_in_turn_each_have_their_bounds(device):
    """Also rules that are equal, as those with -0.0 and 0.0 are."""
    grads = of_sizes((5, 40), torch.float32, device)
    held = parameters(grads)
    bounds = [(-0.5, 0.5), (-0.1, 0.2), (-0.0, 0.3), (0.0, 0.3), (-0.1, 0.2)]
    rules = [tritonclip.ClipByValue(*pair) for pair in bounds]
    for rule, (low, high) in [*zip(rules, bounds, strict=True)] * 2:
        fresh = copies(grads)
        for parameter, grad in zip(held, fresh, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(grad)
        tritonclip.clip_(held, rule)
        assert_bits(map(grad_of, held), [reference.clamped(grad, low, high) for grad in fresh])


# No tensor lies on the second, but it is another device to whoever asks.
FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0)


def test_every_group_gets_the_norms_of_all_in_one_order():
    partials = [torch.tensor([1.0, 2.0]), [4.0], torch.tensor([3.0])]
    joined = _join(partials, [FIRST, FIRST, SECOND])
    assert [norms.tolist() for norms in joined] == [[1.0, 2.0, 4.0, 3.0]] * 3


def test_norms_of_the_host_stay_numbers():
    assert _join([[1.0], [2.0, 3.0]], [FIRST, FIRST]) == [[1.0, 2.0, 3.0]] * 2
