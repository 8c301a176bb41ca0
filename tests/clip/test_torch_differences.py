"""Every deliberate difference from torch.nn.utils: what torch does, what we do, and why.

Each test first shows torch's behaviour where it can, so that a torch that changes is noticed.
"""

import pytest
import torch
from torch.nn import utils

import tritonclip
from helpers import reference
from helpers.cases import assert_norm, grad_of, normal, parameter, parameters, untouched


def pair(values, device, dtype=torch.float32):
    """The same gradient for us and for torch."""
    return [parameter(torch.tensor(values, dtype=dtype, device=device)) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_norm_of_half_gradients_is_float32(device, dtype):
    """torch rounds every norm to the dtype of its gradient, and is off by up to 4e-3."""
    grads = [normal(999, dtype, device, seed) for seed in range(3)]
    assert utils.get_total_norm(grads).dtype == dtype
    norm = tritonclip.get_total_norm(grads)
    assert norm.dtype == torch.float32
    assert_norm(norm, reference.total_norm(grads))


@pytest.mark.parametrize(
    ("values", "limit"),
    # The norm is inf, and so the coefficient 0; and a coefficient of 1e-4 / 6e4 is 0.
    [([6e4, 6e4], 1.0), ([6e4, 0.0], 1e-4)],
    ids=["norm", "coefficient"],
)
def test_norm_and_coefficient_of_float16_gradients_are_float32(device, values, limit):
    """torch has both in float16, and the step is lost without a word."""
    ours, theirs = pair(values, device, torch.float16)
    utils.clip_grad_norm_(theirs, limit)
    assert theirs.grad.tolist() == [0.0, 0.0]
    expected = reference.norm(ours.grad)
    clipped = [value / expected * limit for value in values]
    assert_norm(tritonclip.clip_grad_norm_(ours, limit), expected)
    assert ours.grad.tolist() == pytest.approx(clipped, rel=1e-3)


@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_norm_of_extreme_values_is_right(device, magnitude):
    """torch squares in float32: inf for 1e30, and 0 for 1e-30."""
    ours, theirs = pair([3 * magnitude, 4 * magnitude], device)
    assert utils.clip_grad_norm_(theirs, 1.0).item() in (torch.inf, 0.0)
    expected = reference.norm(ours.grad)
    assert_norm(tritonclip.clip_grad_norm_(ours, torch.inf), expected)


def test_parameter_listed_twice_counts_once(device):
    """torch counts it twice, and on a CPU scales it twice."""
    ours, theirs = pair([3.0, 4.0], device)
    assert utils.clip_grad_norm_([theirs, theirs], 1.0).item() > 7.0
    # 0.14; 0.71 on a GPU, which scales both at once.
    assert reference.norm(theirs.grad) < 0.8
    assert tritonclip.clip_grad_norm_([ours, ours], 1.0).item() == 5.0
    assert reference.norm(ours.grad) == pytest.approx(1.0, rel=1e-6)


def test_sparse_gradients_are_clipped(device):
    """torch raises NotImplementedError since 2.0."""
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 0]]), torch.tensor([1.0, 4.0, 2.0]), (4,), check_invariants=True
    ).to(device)
    one = parameter(sparse)
    assert tritonclip.clip_grad_norm_(one, 1.0).item() == 5.0
    torch.testing.assert_close(grad_of(one).to_dense().cpu(), torch.tensor([0.6, 0.0, 0.8, 0.0]))
    tritonclip.clip_grad_value_(one, 0.7)
    torch.testing.assert_close(grad_of(one).to_dense().cpu(), torch.tensor([0.6, 0.0, 0.7, 0.0]))
    assert_norm(tritonclip.get_total_norm(grad_of(one)), reference.norm(grad_of(one)))


NEGATIVE = [
    *(("clip_grad_norm_", given) for given in ((-1.0,), (torch.nan,), (1.0, torch.nan))),
    *(("clip_grad_value_", (limit,)) for limit in (-1.0, torch.nan)),
    *(("clip_grads_with_norm_", (limit, torch.tensor(9.0))) for limit in (-1.0, torch.nan)),
]


@pytest.mark.parametrize(("name", "arguments"), NEGATIVE, ids=str)
def test_negative_and_nan_limits_are_refused(device, name, arguments):
    """torch turns the signs, sets every element to one value or makes them all NaN, in silence."""
    ours, theirs = pair([3.0, -4.0], device)
    getattr(utils, name)([theirs], *arguments)
    refused = pytest.raises(ValueError, match=r"max_norm|clip_value|norm_type|bound")
    with untouched([ours.grad]), refused:
        getattr(tritonclip, name)([ours], *arguments)


def test_negative_norm_is_refused(device):
    """torch turns the signs. Reading a norm on a GPU would wait for it."""
    ours, theirs = pair([3.0, -4.0], device)
    utils.clip_grads_with_norm_([theirs], 1.0, torch.tensor(-5.0))
    assert theirs.grad.tolist() == pytest.approx([-0.6, 0.8])
    refused = pytest.raises(ValueError, match="total_norm must be 0 or more")
    with untouched([ours.grad]), refused:
        tritonclip.clip_grads_with_norm_([ours], 1.0, torch.tensor(-5.0))


def test_none_among_tensors_has_no_norm(device):
    """torch asks it for its device."""
    tensors = [None, torch.tensor([3.0, 4.0], device=device)]
    with pytest.raises(AttributeError):
        utils.get_total_norm(tensors)  # type: ignore[arg-type]
    assert tritonclip.get_total_norm(tensors).item() == 5.0


def test_gradients_that_share_a_part_are_refused(device):
    """torch counts the part twice, and on a CPU scales it twice."""
    theirs, ours = (torch.full((5,), 2.0, device=device) for _ in range(2))
    utils.clip_grad_norm_(parameters([theirs[:3], theirs[2:]]), 1.0)
    # 0.82; 0.91 on a GPU, which scales both at once.
    assert reference.norm(theirs) < 0.95
    with untouched([ours]), pytest.raises(ValueError, match="overlap in memory"):
        tritonclip.clip_grad_norm_(parameters([ours[:3], ours[2:]]), 1.0)


def test_clip_grad_value_of_nothing_does_nothing(backend):
    """torch raises an error about nested tensor lists."""
    with pytest.raises(RuntimeError):
        utils.clip_grad_value_([], 1.0)
    tritonclip.clip_grad_value_([], 1.0)
    tritonclip.clip_grad_value_([parameter(None, backend.device)], 1.0)


def test_infinite_limit_keeps_infinite_gradients(device):
    """torch computes inf / inf and makes every gradient NaN; no limit means no change."""
    ours, theirs = pair([3.0, torch.inf], device)
    utils.clip_grad_norm_(theirs, torch.inf)
    assert theirs.grad.isnan().all()
    assert tritonclip.clip_grad_norm_(ours, torch.inf).item() == torch.inf
    assert ours.grad.tolist() == [3.0, torch.inf]
