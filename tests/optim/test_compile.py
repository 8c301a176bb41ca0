"""The wrapper inside torch.compile: clipping runs as it is, the wrapped optimizer is compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx import GraphModule

import tritonclip
from helpers.training import POLICIES

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]


def _train(
    compiled: Callable[[Callable[[Tensor], None]], Callable[[Tensor], None]],
    nonfinite: Any,
    clip: tritonclip.rules.Rule,
    n_steps: int = 4,
) -> tuple[list[Tensor], dict[str, float | int]]:
    """Steps of a small model; its parameters and statistics."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = tritonclip.ClippedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), clip, nonfinite=nonfinite
    )
    optimizer.skip_above = tritonclip.Outlier(2.0, 4)

    def step(batch: Tensor) -> None:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = compiled(step)
    for _ in range(n_steps):
        run(torch.randn(5, 4))
    return [p.detach() for p in model.parameters()], optimizer.stats.summary()


@pytest.mark.covering(1)
@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize(
    "clip",
    [
        tritonclip.ClipByGlobalNorm(0.5),
        tritonclip.ClipByNorm(0.5),
        tritonclip.ClipByValue(0.1),
        tritonclip.ClipByQuantile(0.5, 3),
        tritonclip.ClipByOwnHistory(warmup=2),
    ],
    ids=["global-norm", "norm", "value", "quantile", "own-history"],
)
def test_step_compiled_equals_eager(nonfinite: Any, clip: tritonclip.rules.Rule) -> None:
    parameters, stats = _train(lambda step: torch.compile(step, backend="eager"), nonfinite, clip)
    expected, expected_stats = _train(lambda step: step, nonfinite, clip)

    # Equal bits with torch 2.13; torch 2.8 rounds a traced update elsewhere, once a step.
    torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(stats, expected_stats, rtol=1e-6, atol=0, equal_nan=True)


def test_step_compiled_traces_update_and_not_clipping() -> None:
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    rule = tritonclip.ClipByGlobalNorm(0.5)
    _train(lambda step: torch.compile(step, backend=keep), "propagate", rule)
    code = "\n".join(graph.code for graph in graphs)
    assert "linear" in code
    assert "add_" in code
    assert "float64" not in code
    assert "linalg" not in code


def test_step_compiled_is_not_compiled_again() -> None:
    counter = CompileCounter()
    counts: list[int] = []

    def counted(step: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        compiled = torch.compile(step, backend=counter)

        def run(batch: Tensor) -> None:
            compiled(batch)
            counts.append(counter.frame_count)

        return run

    _train(counted, "propagate", tritonclip.ClipByGlobalNorm(0.5), 5)
    assert counts[0] > 0
    assert counts[2:] == counts[1:2] * 3
