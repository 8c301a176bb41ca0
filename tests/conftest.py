"""Fixtures of the whole suite: the backends a test runs on, and empty memory full of NaN.

Two passes cover everything that needs no GPU: a plain one (the native and the torch backend on CPU
tensors, and torch and triton on CUDA tensors where there is a GPU), and one under
``TRITON_INTERPRET=1``, which runs the real kernels on CPU tensors and only those tests that take
the ``backend`` fixture.
"""

import gc
import importlib
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import tritonclip
from helpers.cases import INTERPRETED
from helpers.covering import covering
from helpers.processes import Worlds
from helpers.serving import decided_on_device
from tritonclip.backends.native import NativeBatch, loops
from tritonclip.backends.torch import TorchBatch

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
# Of `nox -s soak`: other examples in each run.
hypothesis.settings.register_profile(
    "soak", hypothesis.settings.get_profile("tritonclip"), derandomize=False
)
hypothesis.settings.load_profile("tritonclip")


@dataclass(frozen=True)
class Backend:
    """What ``use_backend`` is told, where the tensors of the test lie, and who serves them."""

    name: str
    device: torch.device
    module: str
    deferred: bool = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This backend serves calls."""
        deferral = decided_on_device() if self.deferred else nullcontext()
        with deferral, tritonclip.use_backend(self.name):
            yield

    @property
    def host_decides(self) -> bool:
        """Whether coefficients are numbers of the host, which waits for no device."""
        return self.device.type == "cpu" and self.module != "triton" and not self.deferred


_HAS_GPU = torch.cuda.is_available()
_NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not _HAS_GPU, reason="no GPU: torch.cuda.is_available() is false"),
)


def _backend(name: str, device: str, module: str, *, deferred: bool = False) -> Any:
    # With the index that a device of tensors has.
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return pytest.param(
        Backend(name, where, module, deferred),
        id=f"{name}-deferred" if deferred and name == "torch" else f"{name}-{device}",
        marks=_NEEDS_GPU if device == "cuda" else (),
    )


_CUDA_BACKENDS = [_backend("torch", "cuda", "torch"), _backend("triton", "cuda", "triton")]
# The code that serves other devices than a CPU, on CPU tensors.
_DEFERRED = _backend("torch", "cpu", "torch", deferred=True)
# The interpreter copies what it is given to the host, so pointer tables need CPU tensors there.
_BACKENDS = (
    [_backend("triton", "cpu", "triton", deferred=True)]
    if INTERPRETED
    else [
        _backend("native", "cpu", "native"),
        _backend("torch", "cpu", "torch"),
        _DEFERRED,
        # Without a GPU they would be thousands of items that are all skipped.
        *(_CUDA_BACKENDS if _HAS_GPU else ()),
    ]
)


def pytest_configure() -> None:
    # Several workers with several threads each wait for one another, at the sizes of these tests.
    torch.set_num_threads(1)


@cache
def _asks_for_a_backend(path: Path) -> bool:
    """Whether a function of a file takes the backend, or what only a backend has."""
    return bool(re.search(r"\bdef \w+\([^)]*\b(backend|device|verbs)\b", path.read_text()))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under the interpreter, spare the import of files of which no test is kept."""
    name = collection_path.name
    is_test = name.startswith("test_") and name.endswith(".py")
    return True if INTERPRETED and is_test and not _asks_for_a_backend(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under the interpreter, keep only what goes through the kernels; thin products of cases.

    Groups that one worker runs come first: the last one would keep the others waiting.
    """
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    lost = {item.path for item in items if "backend" in getattr(item, "fixturenames", ())}
    lost = set(itertools.filterfalse(_asks_for_a_backend, lost))
    if lost:
        raise pytest.UsageError(f"no function takes the backend that its tests need: {lost}")
    if INTERPRETED:
        sorted_out: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            sorted_out["backend" in getattr(item, "fixturenames", ())].append(item)
        config.hook.pytest_deselected(items=sorted_out[False])
        items[:] = sorted_out[True]
    products: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and hasattr(item, "callspec"):
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        (strength,) = cases[0].get_closest_marker("covering").args
        # A value of the parameters is one object in all cases.
        values = [[*map(id, case.callspec.params.values())] for case in cases]
        for i in set(range(len(cases))).difference(covering(values, strength)):
            cases[i].add_marker("exhaustive")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare what collection made from the garbage collector, which tests call often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend that can run here, entered for the length of the test."""
    with request.param.entered():
        yield request.param


@pytest.fixture
def operators() -> Iterator[None]:
    """The torch backend, for tests of its own code that go through public functions."""
    with tritonclip.use_backend("torch"):
        yield


@pytest.fixture
def device(backend: Backend) -> torch.device:
    """Where the tensors of a test lie that runs on every backend."""
    return backend.device


@pytest.fixture
def verbs(backend: Backend) -> type[Any]:
    """The class whose verbs serve the test, to break or to count them."""
    if backend.name == "triton":
        batch: type[Any] = importlib.import_module("tritonclip.backends.triton").TritonBatch
        return batch
    return NativeBatch if backend.name == "native" else TorchBatch


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


@pytest.fixture(params=[False, True], ids=["fastest", "portable"])
def both_forms(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both forms of the loops in C."""
    loops.use_plain_loops(request.param)
    yield
    loops.use_plain_loops(False)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets the threads of torch for the length of a test."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a recorder's file, which is not there yet."""
    return tmp_path / "run.csv"


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate without the state that it keeps in the process and in the environment."""
    state = pytest.importorskip("accelerate.state", reason="needs tritonclip[integrations]")
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        # Set first, so that what the test sets is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Process groups that live until the end of the session, one for each size asked for."""
    worlds = Worlds()
    yield worlds
    worlds.end()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without the graphs of other tests."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
