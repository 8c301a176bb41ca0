"""A warm call enters few functions of the library, from few modules: it derives nothing again.

They are counted in a new process, because they depend on what of torch is imported.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritonclip
from helpers.entered import entered
from helpers.workers import python


def ten() -> list[torch.Tensor]:
    """Parameters whose gradients no limit below clips."""
    made = [torch.zeros(8, requires_grad=True) for _ in range(10)]
    for parameter in made:
        parameter.grad = torch.full((8,), 1e-3)
    return made


def counted() -> dict[str, list[tuple[str, str]]]:
    """What each call on ten tensors enters on the native backend."""
    known = ten()
    by_norm, by_value = tritonclip.ClipByNorm(1.0), tritonclip.ClipByValue(0.5)
    optimizer = tritonclip.ClippedOptimizer(torch.optim.SGD(ten(), lr=0.1), 1.0)
    calls: dict[str, Callable[[], Any]] = {
        "torch": lambda: [torch.nn.utils.get_total_norm(known) for _ in range(2)],
        "global norm": lambda: tritonclip.clip_(known, 1.0),
        "each norm": lambda: tritonclip.clip_(known, by_norm),
        "value": lambda: tritonclip.clip_(known, by_value),
        "step": lambda: optimizer.step(),
    }
    with tritonclip.use_backend("native"):
        return {name: entered(call) for name, call in calls.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[str, str]]]:
    done = python(__file__)
    assert done.returncode == 0, done.stderr
    counts: dict[str, list[tuple[str, str]]] = json.loads(done.stdout)
    return counts


def test_entered_finds_functions_of_the_library_only(found):
    assert found["torch"] == []
    assert found["global norm"][0][1] == "clip_"


# Today's counts.
@pytest.mark.parametrize(
    ("call", "functions", "modules"),
    [
        ("global norm", 12, 7),
        ("each norm", 15, 8),
        ("value", 12, 7),
        ("step", 26, 11),
    ],
)
def test_warm_call_enters_few_functions(found, call, functions, modules):
    names = [name for _, name in found[call]]
    assert len(names) <= functions, names
    assert len({file for file, _ in found[call]}) <= modules


if __name__ == "__main__":
    print(json.dumps(counted()))
