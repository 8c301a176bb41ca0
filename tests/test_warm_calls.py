"""A warm call enters few functions of the library, from few modules: it derives nothing again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import grad_of

import tritonclip
import tritonclip.kernels

FOLDERS = (*tritonclip.__path__, *tritonclip.kernels.__path__)
# Part of the function around them, as in Python 3.12.
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def entered(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """File and name of each function of the library that a call enters once it is warm."""
    found = []

    def note(frame: Any, event: str, argument: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and name not in INLINED and file.startswith(FOLDERS):
            found.append((file, name))

    for _ in range(3):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def ten() -> list[torch.Tensor]:
    """Parameters whose gradients no limit below clips."""
    made = [torch.zeros(8, requires_grad=True) for _ in range(10)]
    for parameter in made:
        parameter.grad = torch.full((8,), 1e-3)
    return made


def clip(rule: Any) -> Callable[[], Any]:
    parameters = ten()
    return lambda: tritonclip.clip_(parameters, rule)


def clip_flat() -> Callable[[], Any]:
    parameters = ten()
    flat = tritonclip.FlatGradients(parameters)
    # The list is kept: flat holds no parameter alive.
    return lambda: tritonclip.clip_(flat, 1.0) if parameters else None


def step() -> Any:
    return tritonclip.ClippedOptimizer(torch.optim.SGD(ten(), lr=0.1), 1.0).step


def test_entered_counts_functions_of_the_library_only():
    parameters = ten()
    found = entered(lambda: [torch.nn.utils.get_total_norm([grad_of(parameters[0])])])
    assert found == []
    assert entered(lambda: tritonclip.clip_(parameters, 1.0))[0][1] == "clip_"


# Today's counts. A step should enter 34 functions in 14 modules.
@pytest.mark.parametrize(
    ("make", "functions", "modules"),
    [
        pytest.param(lambda: clip(1.0), 13, 9, id="global-norm"),
        pytest.param(lambda: clip(tritonclip.ClipByNorm(1.0)), 17, 10, id="each-norm"),
        pytest.param(lambda: clip(tritonclip.ClipByValue(0.5)), 14, 10, id="value"),
        pytest.param(clip_flat, 13, 7, id="flat"),
        pytest.param(step, 40, 19, id="step"),
    ],
)
def test_warm_call_enters_few_functions(make, functions, modules):
    with tritonclip.use_backend("native"):
        found = entered(make())
    assert len(found) <= functions, [name for _, name in found]
    assert len({file for file, _ in found}) <= modules
