"""Fixtures of the whole suite: the backends a test runs on, and empty memory full of NaN.

Two passes cover everything that needs no GPU: a plain one (the torch backend on CPU tensors, and
both backends on CUDA tensors where there is a GPU), and one under ``TRITON_INTERPRET=1``, which
runs the real kernels on CPU tensors and only those tests that take the ``backend`` fixture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from cases import INTERPRETED

import tritonclip

hypothesis.settings.register_profile(
    "tritonclip",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=6 if INTERPRETED else 60,
    # use_backend is the same for every example, so one fixture may serve them all.
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
hypothesis.settings.load_profile("tritonclip")


@dataclass(frozen=True)
class Backend:
    """What ``use_backend`` is told, and where the tensors of the test lie."""

    name: str
    device: torch.device


_NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false"
    ),
)


def _backend(name: str, device: str) -> Any:
    return pytest.param(
        Backend(name, torch.device(device)),
        id=f"{name}-{device}",
        marks=_NEEDS_GPU if device == "cuda" else (),
    )


_CUDA_BACKENDS = [_backend("torch", "cuda"), _backend("triton", "cuda")]
# The interpreter copies what it is given to the host, so pointer tables need CPU tensors there.
_BACKENDS = (
    [_backend("triton", "cpu")] if INTERPRETED else [_backend("torch", "cpu"), *_CUDA_BACKENDS]
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA or ROCm device")
    config.addinivalue_line("markers", "plain_empty: torch.empty is left as it is")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under the interpreter, keep only what goes through the kernels."""
    if not INTERPRETED:
        return
    kept = [item for item in items if "backend" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend that can run here, entered for the length of the test."""
    with tritonclip.use_backend(request.param.name):
        yield request.param


@pytest.fixture
def device(backend: Backend) -> torch.device:
    """Where the tensors of a test lie that runs on every backend."""
    return backend.device


@pytest.fixture(params=_CUDA_BACKENDS)
def cuda_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Both backends on CUDA tensors, for what only a GPU can show."""
    with tritonclip.use_backend(request.param.name):
        yield request.param


def _poisoned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = create(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] == "tritonclip" and (made.is_floating_point() or made.is_complex()):
            made.fill_(torch.nan)
        return made

    return empty


@pytest.fixture(autouse=True)
def poisoned_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the library gets from ``empty`` with NaN, so that an unwritten output shows up."""
    if request.node.get_closest_marker("plain_empty"):
        return
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
