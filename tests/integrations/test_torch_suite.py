"""torch's own tests of clipping, by behaviour, under `patch_torch`; see test/test_nn.py of PyTorch.

torch.testing does not ship them: each test here covers the behaviour of the test that it names.
The functions were imported before the patch. Left out is
test_clip_grad_norm_multi_device, which needs two GPUs. Those of FSDP2 are in
tests/distributed/test_torch_suite.py.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import tritonclip
from helpers.cases import grad_of, parameters, unchanged
from tritonclip.integrations.patching import TorchPatch, original_of

ORDERS = pytest.mark.parametrize("order", [0.5, 1, 1.5, 2, 4, "inf"], ids=str)
FOREACH = pytest.mark.parametrize("foreach", [False, True], ids="foreach={}".format)


@pytest.fixture(scope="module")
def patched() -> Iterator[TorchPatch]:
    with tritonclip.patch_torch() as patch:
        yield patch


@pytest.fixture(autouse=True)
def patch(patched: TorchPatch) -> TorchPatch:
    """The patch, by which torch has served no call yet."""
    patched.served_by_torch.clear()
    return patched


def with_gradients(*grads: Tensor | None) -> nn.Linear:
    layer = nn.Linear(10, 10)
    for parameter, grad in zip(layer.parameters(), grads, strict=True):
        parameter.grad = None if grad is None else grad.clone()
    return layer


def parameters_of(grads: Sequence[Sequence[float]]) -> list[Tensor]:
    return parameters(map(torch.tensor, grads))


def norm_of(layer: nn.Linear, order: float | str) -> float:
    p = float(order)
    elements = torch.cat([grad_of(q).abs().flatten().double() for q in layer.parameters()])
    return elements.max().item() if p == math.inf else elements.pow(p).sum().pow(1 / p).item()


LARGE = torch.arange(1.0, 101).view(10, 10), torch.ones(10).div(1000)


@ORDERS
@FOREACH
@pytest.mark.parametrize("in_two", [False, True], ids=["one call", "two calls"])
def test_clip_grad_norm(patch, order, foreach, in_two):
    """Large gradients get the norm 2, all by one factor; the norm before is returned."""
    layer = with_gradients(*LARGE)
    before = norm_of(layer, order)
    if in_two:
        norm = get_total_norm([grad_of(p) for p in layer.parameters()], order, foreach=foreach)
        clip_grads_with_norm_(layer.parameters(), 2, norm, foreach=foreach)
    else:
        norm = clip_grad_norm_(layer.parameters(), 2, norm_type=order, foreach=foreach)
    assert norm.item() == pytest.approx(before, rel=1e-5)
    assert norm_of(layer, order) == pytest.approx(2, rel=1e-5)
    scales = torch.cat([
        grad_of(p).div(g).flatten() for p, g in zip(layer.parameters(), LARGE, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(scales, scales[:1].expand(110), rtol=1e-6, atol=0)
    assert not patch.served_by_torch


@ORDERS
@FOREACH
def test_clip_grad_norm_of_small_gradients(patch, order, foreach):
    """They stay as they are."""
    small = torch.rand(10, 10, generator=torch.Generator().manual_seed(0)) / 1e4, LARGE[1] * 2
    layer = with_gradients(*small)
    norm = clip_grad_norm_(layer.parameters(), 2000, norm_type=order, foreach=foreach)
    assert norm.item() == pytest.approx(norm_of(layer, order), rel=1e-5)
    for parameter, grad in zip(layer.parameters(), small, strict=True):
        assert torch.equal(grad_of(parameter), grad)
    assert not patch.served_by_torch


@ORDERS
@FOREACH
def test_clip_grad_norm_of_a_single_tensor(order, foreach):
    one, other = (nn.Parameter(torch.zeros(10, 10)) for _ in range(2))
    one.grad, other.grad = LARGE[0].clone(), LARGE[0].clone()
    clip_grad_norm_(one, 2, norm_type=order, foreach=foreach)
    clip_grad_norm_([other], 2, norm_type=order, foreach=foreach)
    assert torch.equal(one.grad, other.grad)


@FOREACH
def test_clip_grad_norm_of_an_exhausted_generator(foreach):
    """One warning, of torch's text."""
    params = nn.Linear(10, 10).parameters()
    assert len([*params]) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip_grad_norm_(params, 2, foreach=foreach)
    text = "`parameters` is an empty generator, no gradient clipping will occur."
    assert [str(warning.message) for warning in caught] == [text]


@FOREACH
@pytest.mark.parametrize("has_bias", [True, False])
def test_clip_grad_value(patch, foreach, has_bias):
    wide = torch.arange(-50.0, 50).view(10, 10) / 5
    layer = with_gradients(wide, torch.full((10,), 2.0) if has_bias else None)
    clip_grad_value_(layer.parameters(), 2.5, foreach=foreach)
    assert torch.equal(grad_of(layer.weight), wide.clamp(-2.5, 2.5))
    assert (layer.bias.grad is not None) == has_bias
    single = nn.Parameter(torch.zeros(10, 10))
    single.grad = wide.clone()
    clip_grad_value_(single, 2.5, foreach=foreach)
    assert torch.equal(grad_of(single), grad_of(layer.weight))
    assert not patch.served_by_torch


POSITIVE = (0.1, 1, 2, 3.5, math.inf)
# Gradients, and the orders by which their norm is not finite.
NONFINITE = {
    "inf": ([[math.inf]], POSITIVE),
    "-inf": ([[-math.inf]], POSITIVE),
    "nan": ([[math.nan]], (*POSITIVE, *(-p for p in POSITIVE))),
    "two": ([[math.inf, 1.0], [1.0]], POSITIVE),
    "in the second": ([[1.0, 2.0], [math.nan, 1.0]], (*POSITIVE, -1)),
    "norm overflows": ([[torch.finfo(torch.float32).max] * 3], (1, 3.5)),
}
CASES = [
    pytest.param(grads, p, id=f"{name}, {p}")
    for name, (grads, orders) in NONFINITE.items()
    for p in orders
]


@pytest.mark.filterwarnings("ignore:torch's own function serves this call")
@pytest.mark.parametrize(("grads", "p"), CASES)
def test_clip_grad_norm_error_if_nonfinite(grads, p):
    """torch's error, and nothing changes; without the option no error, and torch's result."""
    params, expected = parameters_of(grads), parameters_of(grads)
    refused = pytest.raises(RuntimeError, match=f"The total norm of order {float(p)} for gradients")
    with unchanged(map(grad_of, params)), refused:
        clip_grad_norm_(params, 1.0, norm_type=p, error_if_nonfinite=True)
    norm = clip_grad_norm_(params, 1.0, norm_type=p, error_if_nonfinite=False)
    theirs = original_of(clip_grad_norm_)(expected, 1.0, norm_type=p)
    found, truth = [norm, *map(grad_of, params)], [theirs, *map(grad_of, expected)]
    torch.testing.assert_close(found, truth, equal_nan=True, rtol=1e-5, atol=0)


FINITE = [
    pytest.param(grads, p, id=f"{grads}, {p}")
    for grads in ([[1e-3, 0.5], [100.0]], [[0.0] * 3])
    for p in chain(POSITIVE, (-0.1, -1, -2, -3.5, -math.inf))
    if p > 0 or grads[0][0]
]


@pytest.mark.parametrize(("grads", "p"), FINITE)
def test_error_if_nonfinite_does_not_raise_for_finite_norms(patch, grads, p):
    norm = clip_grad_norm_(parameters_of(grads), 1.0, norm_type=p, error_if_nonfinite=True)
    expected = original_of(clip_grad_norm_)(parameters_of(grads), 1.0, norm_type=p)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert not patch.served_by_torch
