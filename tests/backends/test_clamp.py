"""Clamping on a CPU: small 1-d gradients are looked at together, and others clamped as they are."""

from __future__ import annotations

import pytest
import reference
import torch
from cases import FLOATS, assert_bits, grad_of, normal, parameters
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tritonclip
from tritonclip import ClipByValue
from tritonclip.backends.batching import BATCH
from tritonclip.backends.cpu_clamp import ONE_PASS, PATIENCE, SEARCHED, Clamping

pytestmark = pytest.mark.usefixtures("operators")

# Numbers of elements, 2-d where they are negative.
LISTS = {
    "one fewer than are looked at": [5] * (SEARCHED - 1),
    "as many": [5] * SEARCHED,
    "some empty": [0, 7, 0] * SEARCHED,
    "beside 2-d and large ones": [9, -12, ONE_PASS, 9, 9] * SEARCHED,
    "batches too short to be looked at": [ONE_PASS - 1] * 48,
    "two batches": [100] * (BATCH // 100 + SEARCHED),
    "a last batch too short to be looked at": [BATCH // SEARCHED] * (SEARCHED + 5),
}


def gradients(sizes, dtype):
    return [
        (0.01 * normal(abs(n), torch.float32, seed=i)).to(dtype).view((-1,) if n >= 0 else (-1, 3))
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("every", [1, 7, 10**9])
def test_each_gradient_is_clamped_wherever_it_is_looked_at(sizes, dtype, every):
    grads = gradients(sizes, dtype)
    for i, grad in enumerate(grads):
        if grad.numel() and i % every == every - 1:
            grad.view(-1)[-1] = 2.0
    expected = [reference.clamped(grad, -1.0, 0.5) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(-1.0, 0.5))
    assert_bits(grads, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_many_float8_gradients_are_clamped_without_a_look(dtype):
    """torch finds no least element of theirs."""
    grads = gradients([4] * (2 * SEARCHED), dtype)
    grads[3][0] = 2.0
    expected = [grad.float().clamp(-1.0, 0.5) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(-1.0, 0.5))
    for grad, truth in zip(grads, expected, strict=True):
        assert torch.equal(grad.float(), truth)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_many_gradients_are_clamped_under_autocast(dtype, autocast):
    grads = gradients([4] * (2 * SEARCHED), dtype)
    grads[3][0] = 2.0
    with torch.autocast("cpu", dtype=autocast):
        tritonclip.clip_(parameters(grads), ClipByValue(-1.0, 0.5))
    assert grads[3][0] == 0.5


def test_after_a_look_in_vain_some_calls_clamp_without_one():
    """Where a few are outside, only these are clamped."""
    n = SEARCHED
    clamping = Clamping([torch.zeros(4)] * n, [4] * n, frozenset(), flat=True)

    def written(value: float) -> int:
        """Of gradients one of which, or each, has an element of a value."""
        grads = gradients([4] * n, torch.float32)
        for grad in grads if value < 0 else grads[:1]:
            grad[0] = value
        versions = [grad._version for grad in grads]
        clamping.clamp_(grads, -1.0, 1.0)
        assert all(grad.abs().max() <= 1 for grad in grads)
        return sum(grad._version > old for grad, old in zip(grads, versions, strict=True))

    assert written(0.0) == 0
    assert written(5.0) == 1
    assert written(-5.0) == n
    assert [written(0.0) for _ in range(PATIENCE)] == [n] * PATIENCE
    assert written(0.0) == 0
    assert written(5.0) == 1


def test_a_batch_that_waits_does_not_keep_another_from_a_look():
    """The second batch waits for fewer calls than the first."""
    size = BATCH // SEARCHED
    n = BATCH // size
    grads = [torch.zeros(size) for _ in range(2 * n)]
    clamping = Clamping(grads, [size] * len(grads), frozenset(), flat=True)

    def written(*outside: int) -> set[int]:
        """The batches whose gradients are written, where each gradient of some has an outlier."""
        for batch in outside:
            for grad in grads[batch * n : (batch + 1) * n]:
                grad[0] = 5.0
        versions = [grad._version for grad in grads]
        clamping.clamp_(grads, -1.0, 1.0)
        assert all(grad.abs().max() <= 1 for grad in grads)
        return {i // n for i, grad in enumerate(grads) if grad._version > versions[i]}

    assert written(0) == {0}
    assert written(0, 1) == {0, 1}
    for _ in range(PATIENCE - 1):
        assert written() == {0, 1}
    assert written() == {1}
    assert written(0) == {0}
    assert written() == {0}


@pytest.mark.parametrize(("n", "is_one_by_one"), [(1, True), (2, True), (3, False)])
def test_very_few_gradients_are_clamped_one_by_one(n, is_one_by_one, monkeypatch):
    def refuse(*_):
        raise AssertionError

    if is_one_by_one:
        monkeypatch.setattr(torch, "_foreach_clamp_min_", refuse)
    else:
        monkeypatch.setattr(torch.Tensor, "clamp_", refuse)
    grads = [torch.full((4,), 5.0) for _ in range(n)]
    tritonclip.clip_(parameters(grads), ClipByValue(0.5))
    assert all((grad == 0.5).all() for grad in grads)


OUTLIERS = {
    "none": (),
    "few": (0, 5, 1700, 2999),
    "from the third batch on": range(1800, 3000),
    "all": range(3000),
}


@pytest.mark.parametrize("value", [5.0, torch.nan, -torch.inf], ids=str)
@pytest.mark.parametrize("outliers", OUTLIERS.values(), ids=OUTLIERS)
def test_clip_by_value_finds_outliers_among_many_small_gradients(outliers, value):
    grads = [1e-3 * normal(1 + i % 60, seed=i) for i in range(3000)]
    for place in outliers:
        grads[place][-1] = value
    expected = [reference.clamped(grad, -0.5, 0.25) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(-0.5, 0.25))
    assert_bits(grads, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1000, 4095])
def test_clip_by_value_of_gradients_gathered_by_the_dozen(dtype, size):
    grads = [normal(size, dtype, seed=i).clamp_(-1, 1) for i in range(80)]
    grads[50][7] = 3.0
    expected = [reference.clamped(grad, -1.5, 2.0) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(-1.5, 2.0))
    assert_bits(grads, expected)


class Written(TorchDispatchMode):
    """Remembers whose memory operators wrote to."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors = value if isinstance(value, list) else [value]
                self.addresses.update(t.data_ptr() for t in tensors)
        return func(*args, **(kwargs or {}))


def test_small_gradients_within_bounds_are_not_written():
    grads = [normal(40, seed=i).clamp_(-1, 1) for i in range(3000)]
    grads[7][0] = 9.0
    with Written() as written, tritonclip.use_backend("torch"):
        tritonclip.clip_(parameters(grads), ClipByValue(2.0))
    assert grads[7].data_ptr() in written.addresses
    assert written.addresses.isdisjoint(g.data_ptr() for i, g in enumerate(grads) if i != 7)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("n_small", [1, 300])
def test_clip_by_value_of_dual_gradients_clamps_values_and_tangents(n_small):
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (5000, *[5] * n_small)]
    with forward_ad.dual_level():
        params[0].grad = torch.ones(5000)
        for param in params[1:]:
            param.grad = forward_ad.make_dual(torch.ones(5), torch.ones(5))
        tritonclip.clip_(params, ClipByValue(0.5))
        assert all((grad_of(param) == 0.5).all() for param in params)
        for param in params[1:]:
            tangent = forward_ad.unpack_dual(grad_of(param)).tangent
            assert tangent is not None
            assert not tangent.any()
