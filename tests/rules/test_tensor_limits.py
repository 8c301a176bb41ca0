"""A rule's limit may be a tensor: on any device, for all gradients or one for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers import reference
from helpers.cases import CHUNK, assert_bits, assert_norm, copies, normal, of_sizes, parameters
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClippedOptimizer
from tritonclip.rules import Measured, Rule

SIZES = (5, 0, 3 * CHUNK + 7, 40, 1)
FEW = (5, 40, 3)


@dataclass(frozen=True)
class Following(Rule):
    """The limit is a share of the norm, computed on the device."""

    share: float
    norm_type: float = 2.0
    eps: float = 0.0

    def limit(self, measured: Measured) -> Tensor:
        return measured.norm() * self.share


class FollowingEach(Following):
    """As above, with a norm and a limit for each gradient."""

    per_gradient: ClassVar[bool] = True


@dataclass(frozen=True)
class Given(Rule):
    """A limit that stands in a tensor."""

    max_norm: Tensor
    norm_type: float = 2.0
    eps: float = 1e-6

    def limit(self, measured: Measured) -> Tensor:
        return self.max_norm


class GivenEach(Given):
    per_gradient: ClassVar[bool] = True


def clipped(grads: list[Tensor], rule: Rule) -> Tensor:
    """The norm before clipping."""
    norm = tritonclip.clip_(parameters(grads), rule)
    assert norm is not None
    return norm


def mixed(device: torch.device) -> list[Tensor]:
    """Gradients of three groups, in turn."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return [normal(7 + i, dtypes[i % 3], device, seed=i) for i in range(7)]


LISTS = [
    pytest.param(lambda device: of_sizes(SIZES, torch.float32, device), id="one-group"),
    pytest.param(mixed, id="three-groups"),
]


def assert_same(make: Any, device: torch.device, rule: Rule, other: Rule) -> None:
    """Two rules measure and clip alike."""
    ours, theirs = make(device), make(device)
    assert_bits([clipped(ours, rule), *ours], [clipped(theirs, other), *theirs])


@pytest.mark.parametrize("make", LISTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_limit_in_a_tensor_clips_as_its_number(device, make, dtype, shape):
    limit = torch.full(shape, 0.625, dtype=dtype, device=device)
    assert_same(make, device, Given(limit), ClipByGlobalNorm(0.625))


@pytest.mark.parametrize("make", LISTS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_limit_in_a_tensor_serves_each_gradient(device, make, shape):
    limit = torch.full(shape, 0.625, device=device)
    assert_same(make, device, GivenEach(limit), ClipByNorm(0.625))


@pytest.mark.parametrize("make", LISTS)
def test_each_gradient_has_the_limit_of_its_place(device, make):
    grads = make(device)
    before = copies(grads)
    limits = torch.tensor([2.0**-i for i in range(len(grads))], device=device)
    norms = clipped(grads, GivenEach(limits))
    # Results of a mixed list are float64, but a norm is right to its gradient's dtype.
    for norm, grad in zip(norms, before, strict=True):
        assert float(norm) == pytest.approx(reference.total_norm([grad]), rel=1e-6)
    for i, grad in enumerate(before):
        twin = grad.clone().to(device)
        clipped([twin], ClipByNorm(float(limits[i])))
        torch.testing.assert_close(grads[i], twin)


@pytest.mark.parametrize(
    ("rule", "sizes", "expected"),
    [(Following(0.25), SIZES, reference.total_norm), (FollowingEach(0.25), FEW, reference.norms)],
    ids=["call", "each gradient"],
)
def test_a_limit_follows_the_norm(device, rule, sizes, expected):
    grads = of_sizes(sizes, torch.float32, device)
    before = copies(grads)
    assert_norm(clipped(grads, rule), expected(before))
    assert_bits(grads, [grad * 0.25 for grad in before])


def test_a_limit_follows_the_norm_after_division_by_the_loss_scale(device):
    grads = of_sizes(FEW, torch.float32, device)
    before = copies(grads)
    tritonclip.clip_(parameters(grads), Following(0.25), grad_scale=8.0)
    assert_bits(grads, [grad * (0.25 / 8) for grad in before])


@pytest.mark.parametrize("rule", [Following(0.25), FollowingEach(0.25)], ids=["all", "each"])
def test_verify_passes_a_limit_that_follows(device, rule):
    with tritonclip.verify():
        tritonclip.clip_(parameters(of_sizes(FEW, torch.float32, device)), rule)


def test_the_wrapper_takes_a_new_rule(device):
    weight = torch.nn.Parameter(torch.zeros(2, device=device))
    weight.grad = torch.tensor([3.0, 4.0], device=device)
    optimizer = ClippedOptimizer(torch.optim.SGD([weight], lr=1.0), Following(0.5))
    optimizer.step()
    assert torch.equal(weight.detach().cpu(), torch.tensor([-1.5, -2.0]))
    assert float(optimizer.stats.last_coefficient) == 0.5


@pytest.mark.parametrize("make", LISTS)
def test_limits_may_have_gaps(device, make):
    spread = (torch.arange(1.0, 2 * len(make("cpu")) + 1, device=device) / 8)[::2]
    assert_same(make, device, GivenEach(spread), GivenEach(spread.contiguous()))


@pytest.mark.parametrize(
    ("rule", "said"),
    [(GivenEach, "one for each of 3 gradients"), (Given, "set per_gradient = True")],
    ids=["each", "global"],
)
def test_limits_of_another_number_are_refused(device, rule, said):
    grads = of_sizes(FEW, torch.float32, device)
    before = copies(grads)
    with pytest.raises(ValueError, match=said):
        clipped(grads, rule(torch.ones(2, device=device)))
    assert_bits(grads, before)
