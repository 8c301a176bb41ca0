"""Which backend serves a call, how it is asked for, and what is said where it cannot serve."""

import os
import re
import sys
import warnings
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tritonclip
from helpers.cases import INTERPRETED, each_rule, normal, parameters, untouched
from helpers.workers import python
from tritonclip import settings
from tritonclip.backends import choose, native
from tritonclip.backends.native import NativeLayout
from tritonclip.backends.operators import has_dense_units
from tritonclip.engine.plan_cache import plans

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

RULES = each_rule(0.1, 0.1)
NOT_INSTALLED = 'triton is not installed: run pip install "tritonclip[triton]"'


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Nothing asked for, and everything said anew."""
    for name in ("TRITONCLIP_BACKEND", "TRITONCLIP_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    choose._warn_once.cache_clear()
    plans.clear()
    yield
    choose._warn_once.cache_clear()
    plans.clear()


@pytest.fixture
def kernels(monkeypatch):
    """Triton is there, and not its interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(choose, "triton_fault", lambda: None)


def asked_for(name, message, *, on=CUDA):
    """The backend is asked for, and refused."""
    with tritonclip.use_backend(name), pytest.raises(RuntimeError, match=message):
        choose.backend_name(on)


@contextmanager
def nothing_said():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert not said


# A gradient that says it is on a GPU, on a machine that has none.
ON_CUDA: Any = SimpleNamespace(device=CUDA, dtype=torch.float32, numel=lambda: 3)


def test_auto_is_native_on_cpu_tensors_and_triton_on_cuda_tensors(kernels):
    assert settings.current().backend == "auto"
    assert choose.backend_name(CUDA) == "triton"
    assert choose.backend_name(CPU) == "native"
    assert type(choose.layout_of([normal(3)])) is NativeLayout


def test_an_installation_without_the_extension_is_said_once(monkeypatch):
    monkeypatch.setattr(choose, "loops", None)
    monkeypatch.setattr(choose, "fault", "it was not built: install a C compiler")
    with pytest.warns(UserWarning, match=r"slower torch backend on cpu.*install a C compiler"):
        tritonclip.clip_(parameters([normal(3)]), 1.0)
    plans.clear()
    tritonclip.clip_(parameters([normal(3)]), 1.0)
    with tritonclip.use_backend("torch"):
        tritonclip.clip_(parameters([normal(3)]), 1.0)


def test_native_that_was_not_built_is_refused(monkeypatch):
    monkeypatch.setattr(choose, "loops", None)
    monkeypatch.setattr(choose, "fault", "it was not built: install a C compiler")
    asked_for("native", r"native backend was asked for.*install a C compiler", on=CPU)


@pytest.mark.parametrize("outside", ["auto", "native"])
def test_use_backend_nests_and_restores(monkeypatch, outside):
    """It comes before the environment; an error restores, too."""
    monkeypatch.setenv("TRITONCLIP_BACKEND", outside)
    with tritonclip.use_backend("torch"):
        with suppress(KeyError), tritonclip.use_backend("triton"):
            with tritonclip.use_backend("auto"):
                assert settings.current().backend == "auto"
            assert settings.current().backend == "triton"
            raise KeyError
        assert settings.current().backend == "torch"
    assert settings.current().backend == outside


def _generator():
    yield 1


async def _coroutine():
    return 1


@pytest.mark.parametrize("function", [_generator, _coroutine])
def test_use_backend_refuses_functions_that_run_after_their_call(function):
    with pytest.raises(TypeError, match="generator or a coroutine"):
        tritonclip.use_backend("torch")(function)


def test_use_backend_decorates_a_function():
    @tritonclip.use_backend("torch")
    def nested(depth: int) -> list[str]:
        return [settings.current().backend, *(nested(depth - 1) if depth else [])]

    assert nested(2) == ["torch"] * 3
    assert settings.current().backend == "auto"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            partial(tritonclip.use_backend, "torch"),
            r"use_backend\('torch'\).*TRITONCLIP_BACKEND=torch",
        ),
        (tritonclip.verify, r"verify\(\).*TRITONCLIP_VERIFY=1"),
    ],
    ids=["use_backend", "verify"],
)
def test_a_setting_that_no_block_enters_is_said(call, text):
    with pytest.warns(UserWarning, match=f"without a block.*with tritonclip.{text}") as caught:
        call()
    assert caught[0].filename == __file__
    assert settings.current().backend == "auto"
    assert not settings.current().verifying


@pytest.mark.parametrize("name", ["cuda", "Torch", "", None])
def test_use_backend_lists_the_choices(name):
    message = r"use_backend: .*'auto', 'triton', 'native' or 'torch'"
    with pytest.raises(ValueError, match=message), tritonclip.use_backend(name):
        pass


@pytest.mark.parametrize("value", ["torch", "triton", "native", "auto", "TORCH"])
def test_environment_asks_for_a_backend(monkeypatch, value):
    monkeypatch.setenv("TRITONCLIP_BACKEND", value)
    assert settings.current().backend == value.lower()


@pytest.mark.parametrize("rule", RULES)
def test_environment_with_another_name_is_refused_by_the_call(monkeypatch, rule):
    monkeypatch.setenv("TRITONCLIP_BACKEND", "gpu")
    grad, message = normal(9), r"TRITONCLIP_BACKEND: .*'auto', 'triton', 'native' or 'torch'.*'gpu'"
    with untouched([grad]), pytest.raises(ValueError, match=message):
        tritonclip.clip_(parameters([grad]), rule)


@pytest.mark.parametrize("rule", RULES)
def test_triton_refuses_cpu_tensors_before_anything_is_written(kernels, rule):
    grad, message = normal(9), "cpu tensors: use backend 'auto', or set TRITON_INTERPRET=1"
    refused = pytest.raises(RuntimeError, match=message)
    with tritonclip.use_backend("triton"), untouched([grad]), refused:
        tritonclip.clip_(parameters([grad]), rule)


CANNOT = "is installed but cannot be imported"
# What stands in place of triton, and what is said of it.
SOURCES = {
    "ImportError": (
        "raise ImportError('libtriton.so: undefined symbol')",
        f"{CANNOT} (ImportError: libtriton.so: undefined symbol)",
    ),
    "module-missing": (
        "import no_such_library",
        f"{CANNOT} (ModuleNotFoundError: No module named 'no_such_library')",
    ),
    "OSError": (
        "raise OSError('libcuda.so: cannot open')",
        f"{CANNOT} (OSError: libcuda.so: cannot open)",
    ),
    "numpy-missing": (
        "raise ModuleNotFoundError('No module named numpy', name='numpy')",
        "is installed, and its interpreter needs numpy: pip install numpy",
    ),
    "not-installed": (
        "raise ModuleNotFoundError('No module named triton', name='triton')",
        # Of the version that this torch asks for, if it asks for one.
        'is not installed: run pip install "triton',
    ),
}


@pytest.mark.parametrize(("source", "reason"), SOURCES.values(), ids=SOURCES)
def test_triton_that_cannot_be_imported_is_said_once(tmp_path, monkeypatch, source, reason):
    """auto falls back to torch, triton is refused, and both say why."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "triton.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    # Asked anew in each call.
    monkeypatch.setattr(choose, "triton_fault", choose.triton_fault.__wrapped__)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [choose.backend_name(CUDA) for _ in range(2)] == ["torch"] * 2
    (warning,) = (str(one.message) for one in said)
    assert warning.startswith(f"tritonclip uses its slower torch backend on cuda: triton {reason}")
    with tritonclip.use_backend("triton"), pytest.raises(RuntimeError) as caught:
        choose.backend_name(CUDA)
    refusal = f"the triton backend was asked for, but triton {reason}"
    assert str(caught.value).startswith(refusal)


def test_triton_that_cannot_be_imported_is_met_at_no_import(tmp_path):
    """Beside one, a new process imports torch and tritonclip."""
    (tmp_path / "triton.py").write_text(SOURCES["OSError"][0])
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = python("-c", "import tritonclip", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("platform", "needed", "remedy"),
    [
        ("linux", ['triton==3.7.1; platform_system == "Linux"'], 'run pip install "triton==3.7.1"'),
        ("linux", ["jinja2", "pytorch-triton-rocm==3.4.0"], "pytorch-triton-rocm==3.4.0"),
        ("linux", ["jinja2"], "tritonclip[triton]"),
        ("win32", ["jinja2"], "PyPI has it for Linux only: on Windows, run Python in WSL"),
    ],
    ids=["cuda", "rocm", "cpu", "windows"],
)
def test_remedy_names_the_triton_that_fits_torch(monkeypatch, platform, needed, remedy):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(choose, "requires", {"torch": needed}.get)
    assert remedy in (choose.triton_fault.__wrapped__() or "")


def test_kernels_that_modes_cannot_see_are_not_used_and_said_once(kernels):
    with TorchDispatchMode():
        with pytest.warns(UserWarning, match="cannot read tensors inside torch.func"):
            assert choose.backend_name(CUDA) == "torch"
        with nothing_said():
            assert choose.backend_name(CUDA) == "torch"
            assert choose.backend_name(CPU) == "torch"
    assert choose.backend_name(CUDA) == "triton"


def test_torch_that_is_asked_for_says_nothing(monkeypatch):
    monkeypatch.setattr(choose, "triton_fault", lambda: NOT_INSTALLED)
    with tritonclip.use_backend("torch"):
        assert choose.backend_name(CUDA) == "torch"


def test_import_error_in_the_kernels_is_not_swallowed(kernels, monkeypatch):
    """A broken installation is not a missing one: falling back would hide it."""
    monkeypatch.delitem(sys.modules, "tritonclip.backends.triton", raising=False)
    monkeypatch.setitem(sys.modules, "tritonclip.kernels", None)
    with pytest.raises(ImportError, match=r"tritonclip\.kernels"):
        choose.layout_of([ON_CUDA])


def test_every_public_name_is_there_and_listed():
    for name in tritonclip.__all__:
        # The name of a module is its path.
        assert getattr(tritonclip, name).__name__.rpartition(".")[2] == name
    assert set(tritonclip.__all__) <= set(dir(tritonclip))
    with pytest.raises(AttributeError, match="module 'tritonclip' has no attribute 'clip_grad'"):
        _ = tritonclip.clip_grad


def test_interpreter_serves_cpu_tensors(backend):
    """What the second pass of this suite rests on."""
    chosen = choose.layout_of([normal(3, device=backend.device)])
    assert type(chosen).__module__ == f"tritonclip.backends.{backend.module}"
    assert not INTERPRETED or backend.name == "triton"


def test_interpreter_leaves_cuda_tensors_alone(kernels, monkeypatch):
    """Its copies on the host hold addresses that mean nothing there."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked_for("triton", "unset it")
    with pytest.warns(UserWarning, match="TRITON_INTERPRET=1"):
        assert choose.backend_name(CUDA) == "torch"


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        pytest.param(normal((3, 4)), True, id="contiguous"),
        pytest.param(normal((2, 3, 4)).transpose(1, 2), True, id="transposed-units"),
        pytest.param(normal((4, 2, 3))[::2].transpose(1, 2)[:1], True, id="one-unit"),
        pytest.param(normal((4, 5))[:, :3], False, id="gaps-between-units"),
        pytest.param(normal((2, 2, 2))[:, :, 0].t(), False, id="gaps-in-units"),
        pytest.param(normal(6)[::2], False, id="gaps"),
    ],
)
def test_kernels_get_units_that_are_dense(tensor, dense):
    assert has_dense_units(tensor) == dense


@pytest.mark.parametrize(
    ("spec", "module", "reason"),
    [
        (None, None, r"imported from its sources in .*gcc or clang.*pip install -e \."),
        (True, ImportError("too short"), r"cannot be loaded \(too short\): install a C compiler"),
        (True, SimpleNamespace(), r"built from another version: install a C compiler"),
    ],
    ids=["sources", "broken", "older"],
)
def test_an_extension_that_cannot_serve_says_why(monkeypatch, spec, module, reason):
    def import_module(name):
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(native, "find_spec", lambda name: spec)
    monkeypatch.setattr("tritonclip.backends.native.importlib.import_module", import_module)
    loops, fault = native.load()
    assert loops is None
    assert re.search(reason, fault)


def test_an_installation_without_the_extension_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    reason = "tritonclip was installed without its C extension: install a C compiler"
    assert native.load()[1].startswith(reason)
    monkeypatch.setattr("sys.platform", "win32")
    assert native.load()[1].endswith("which need GCC or Clang: run Python in WSL")
