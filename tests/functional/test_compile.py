"""A limit that changes from call to call of a compiled function: few graphs serve all limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.graphs import COMPILING
from tritonclip import functional

pytestmark = COMPILING
# A constant, the same as an input, and one more for a value that torch does not trace.
GRAPHS = 3
OUT_OF_PLACE: dict[str, Callable[[Any, float], Any]] = {
    "global norm": lambda x, limit: functional.clip_by_global_norm([x], limit)[0][0],
    "norm": lambda x, limit: functional.clip_by_norm(x, limit),
    "value": lambda x, limit: functional.clip_by_value(x, -2.0, limit),
}
VALUES = [1 + 0.1 * i for i in range(12)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_compiled_call_out_of_place_with_a_number_that_changes_has_few_graphs(device, name):
    if "value" in name and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 makes a graph for each number by which torch.clamp bounds")
    call = OUT_OF_PLACE[name]
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(call, fullgraph=True, backend=counter)
    for value in VALUES:
        x = torch.tensor([3.0, -4.0, 1.05], device=device, requires_grad=True)
        results = [call(x, value), traced(x, value)]
        torch.testing.assert_close(*results, rtol=1e-6, atol=0)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in results]
        # Differences of terms up to 8: one unit in the last place is 5e-7.
        torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)
    assert 0 < counter.frame_count <= GRAPHS
