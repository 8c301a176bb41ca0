"""What only a GPU can show of clipping by unit: no sync, graphs, offsets over 2**31."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers.cases import CHUNK, assert_bits, assert_norm, grad_of, no_sync, normal
from helpers.graphs import captured
from helpers.units import make
from tritonclip import ClipByUnitNorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false"
    ),
]
SHAPES = [(3, 4), (70, 9), (4, 1000), (2, CHUNK + 5), (5000,), ()]


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
def test_clip_by_unit_does_not_sync(cuda_backend, policy, scaled):
    """Not on a first call, not when gradients moved, not when the list changed."""
    scale = torch.full((), 1024.0, device="cuda") if scaled else None
    lists = [make(shapes, device="cuda") for shapes in (SHAPES, SHAPES, SHAPES[1:4])]
    rule = ClipByUnitNorm(exclude=[parameters[0] for parameters in lists])
    with no_sync():
        for parameters in lists:
            tritonclip.clip_(parameters, rule, nonfinite=policy, grad_scale=scale)


def test_graph_of_clip_by_unit_replays_on_new_values(cuda_backend):
    parameters, rule = make(SHAPES, device="cuda"), ClipByUnitNorm()
    graph, measured = captured(lambda: tritonclip.clip_(parameters, rule))
    others = make(SHAPES, device="cuda")
    for step, factor in enumerate((1.0, 1e-5, 30.0)):
        for one, other in zip(parameters, others, strict=True):
            value = normal(one.shape, one.dtype, "cuda", 50 + step) * factor
            grad_of(one).copy_(value)
            grad_of(other).copy_(value)
        graph.replay()
        assert torch.equal(measured, tritonclip.clip_(others, rule))
        assert_bits(map(grad_of, parameters), map(grad_of, others))


def test_clip_by_unit_of_over_two_to_the_31_elements(cuda_backend):
    """bfloat16, 4 GiB; the rows beyond the offsets of an int32 are measured and clipped."""
    rows, length = 2**17 + 1, 2**14 + 16
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    weight = torch.nn.Parameter(torch.ones(rows, length, dtype=torch.bfloat16, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    weight.grad[0, :4] = 1.0
    weight.grad[-1, -4:] = 3.0
    assert_norm(tritonclip.clip_([weight], ClipByUnitNorm(1.0 / 128)), [40**0.5])
    # Rows of norm 2 and 6, for a limit of sqrt(16400) / 128 = 1.0005.
    torch.testing.assert_close(
        weight.grad[-1, -4:].float().cpu(), torch.full((4,), 0.5), rtol=0.01, atol=0
    )
    torch.testing.assert_close(
        weight.grad[0, :4].float().cpu(), torch.full((4,), 0.5), rtol=0.01, atol=0
    )


def test_backends_agree_on_clip_by_unit():
    results = []
    for name in ("triton", "torch"):
        parameters = make(SHAPES, device="cuda")
        with tritonclip.use_backend(name):
            norms = tritonclip.clip_(parameters, ClipByUnitNorm())
        results.append([norms, *map(grad_of, parameters)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
