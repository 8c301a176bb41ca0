"""Strides, gaps and alignment: views are clipped where they lie, and nothing beside them."""

from operator import itemgetter
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import (
    CHUNK,
    DOZENS,
    FLOATS,
    assert_bits,
    check_clip,
    each_rule,
    normal,
    parameter,
    parameters,
    unchanged,
    untouched,
)
from tritonclip import ClipByGlobalNorm

# From a flat buffer to a view of it that is not a plain run of memory from its start.
VIEWS: dict[str, Any] = {
    "transposed": lambda flat: flat[:4160].view(65, 64).t(),
    "permuted": lambda flat: flat[:4200].view(10, 20, 21).permute(2, 0, 1),
    "channels_last": lambda flat: flat[: 4 * 5 * 6 * 7].view(4, 6, 7, 5).permute(0, 3, 1, 2),
    "channels_last_3d": lambda flat: (
        flat[: 2 * 5 * 3 * 6 * 7].view(2, 3, 6, 7, 5).permute(0, 4, 1, 2, 3)
    ),
    "gaps-in-rows": lambda flat: flat[:4160].view(65, 64)[:, 3:60],
    "rows-skipped": lambda flat: flat[:4160].view(65, 64)[::2],
    "every-third": lambda flat: flat[1:4100:3],
    "gaps-transposed": lambda flat: flat[:4160].view(65, 64)[:, :7].t(),
    "unit-dimensions": lambda flat: flat[5:4101].as_strided((1, 4096, 1), (0, 1, 777)),
    "diagonal": lambda flat: flat[:4096].view(64, 64).diagonal(),
    "windows": lambda flat: flat[:4160].unfold(0, 64, 16),
    "interleaved": lambda flat: flat[:4160].as_strided((2, 1000), (3, 2)),
    "gaps-over-chunks": lambda flat: flat.view(2, -1)[:, 1:],
}
# At an odd offset, no 16-byte boundary is under the first element.
for offset in (1, 2, 3, 5, 8):
    VIEWS[f"offset-{offset}"] = itemgetter(slice(offset, offset + CHUNK + 21))
RULES = each_rule(0.5, 0.1)
OTHER_ORDERS = [
    pytest.param(ClipByGlobalNorm(0.5, order), id=f"order-{order}") for order in (1.0, 3.0)
]
LENGTH = 2 * CHUNK + 6


def check_view(buffer, view, rule):
    """A call clips a view of a buffer, and nothing beside it."""
    expected, grad = buffer.cpu().clone(), view(buffer)
    check_clip([grad], rule)
    view(expected).copy_(grad)
    assert_bits([buffer], [expected])


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_writes_a_view_and_nothing_beside_it(device, view, rule, dtype):
    check_view(normal(LENGTH, dtype, device), VIEWS[view], rule)


@pytest.mark.covering(2)
@pytest.mark.parametrize("view", ["transposed", "permuted", "channels_last", "gaps-in-rows"])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("rule", [*RULES, *OTHER_ORDERS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_clip_of_a_known_list_of_views(device, view, scale, rule, dtype):
    """The first call makes a plan; the second finds gradients of other values by addresses."""
    grads = [VIEWS[view](normal(LENGTH, dtype, device)), normal((9, 40), dtype, device).t()]
    known = parameters(grads)
    tritonclip.clip_(known, rule, grad_scale=scale)
    for seed, grad in enumerate(grads):
        grad.copy_(normal(grad.shape, dtype, device, seed=seed + 7))
    check_clip(grads, rule, known, grad_scale=scale)


STAGED = {
    "gaps": lambda n: normal(2 * n)[::2],
    "negated": lambda n: torch._neg_view(normal(n)),
}


@pytest.mark.parametrize("rule", each_rule(100.0, 100.0))
@pytest.mark.parametrize("kind", STAGED)
def test_a_gradient_read_from_a_copy_is_left_alone_within_limits(kind, rule):
    grad = STAGED[kind](40)
    with (unchanged if rule.clamps else untouched)([grad]):
        tritonclip.clip_([parameter(grad)], rule)


@pytest.mark.parametrize("n", [3, DOZENS])
@pytest.mark.parametrize("rule", RULES)
def test_clip_of_a_known_list_of_dense_gradients_makes_no_views(backend, rule, n, monkeypatch):
    if backend.name == "torch":
        pytest.skip("operators want contiguous tensors")
    grads = [normal((5, 4), device=backend.device).t() for _ in range(n)]
    known = [parameter(grad) for grad in grads]
    tritonclip.clip_(known, rule)
    monkeypatch.setattr(torch.Tensor, "as_strided", lambda *_: pytest.fail("a view was made"))
    tritonclip.clip_(known, rule)
