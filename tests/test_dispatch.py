"""Which backend serves a call, how it is asked for, and what is said where it cannot serve."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings

import pytest
import torch
from cases import INTERPRETED, bits, normal, parameters

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, dispatch, torch_backend
from tritonclip import __main__ as self_test
from tritonclip.gradient_list import Group

RULES = [
    pytest.param(ClipByGlobalNorm(0.1), id="global"),
    pytest.param(ClipByNorm(0.1), id="by-norm"),
    pytest.param(ClipByValue(0.1), id="by-value"),
]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Nothing asked for, and everything said anew."""
    monkeypatch.delenv("TRITONCLIP_BACKEND", raising=False)
    monkeypatch.delenv("TRITONCLIP_VERIFY", raising=False)
    dispatch._warn_once.cache_clear()
    yield
    dispatch._warn_once.cache_clear()


def group(dtype=torch.float32, *, flat=True):
    return Group([torch.zeros(3, dtype=dtype)], [0], flat)


class CudaGroup(Group):
    """Gradients that say they are on a GPU, on a machine that has none."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def cuda_group(dtype=torch.float32, *, flat=True):
    return CudaGroup([torch.zeros(3, dtype=dtype)], [0], flat)


def python(*command, **environment):
    """Runs Python to its end, without what this process was asked for."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    return subprocess.run(
        [sys.executable, *command], env=kept | environment, capture_output=True, text=True
    )


def test_auto_is_torch_on_cpu_tensors():
    assert dispatch.asked_backend() == "auto"
    assert dispatch.backend_name(group()) == "torch"
    assert dispatch.backend_of(group()) is torch_backend


def test_auto_is_triton_on_cuda_tensors(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "triton_found", lambda: True)
    assert dispatch.backend_name(cuda_group()) == "triton"


def test_use_backend_nests_and_restores():
    with tritonclip.use_backend("torch"):
        assert dispatch.asked_backend() == "torch"
        with tritonclip.use_backend("triton"):
            assert dispatch.asked_backend() == "triton"
            with tritonclip.use_backend("auto"):
                assert dispatch.asked_backend() == "auto"
            assert dispatch.asked_backend() == "triton"
        assert dispatch.asked_backend() == "torch"
    assert dispatch.asked_backend() == "auto"


def test_use_backend_restores_after_an_error():
    with pytest.raises(KeyError), tritonclip.use_backend("torch"):
        raise KeyError
    assert dispatch.asked_backend() == "auto"


@pytest.mark.parametrize("name", ["cuda", "Torch", "", None])
def test_use_backend_lists_the_choices(name):
    with (
        pytest.raises(ValueError, match=r"use_backend: .*'auto', 'triton' or 'torch'"),
        tritonclip.use_backend(name),
    ):
        pass


@pytest.mark.parametrize("value", ["torch", "triton", "auto", "TORCH"])
def test_environment_asks_for_a_backend(monkeypatch, value):
    monkeypatch.setenv("TRITONCLIP_BACKEND", value)
    assert dispatch.asked_backend() == value.lower()


def test_use_backend_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("TRITONCLIP_BACKEND", "triton")
    with tritonclip.use_backend("torch"):
        assert dispatch.asked_backend() == "torch"
    assert dispatch.asked_backend() == "triton"


@pytest.mark.parametrize("rule", RULES)
def test_environment_with_another_name_is_refused_by_the_call(monkeypatch, rule):
    monkeypatch.setenv("TRITONCLIP_BACKEND", "gpu")
    grad = normal(9)
    before = bits(grad)
    with pytest.raises(
        ValueError, match=r"TRITONCLIP_BACKEND: .*'auto', 'triton' or 'torch'.*'gpu'"
    ):
        tritonclip.clip_(parameters([grad]), rule)
    assert torch.equal(bits(grad), before)


@pytest.mark.parametrize("rule", RULES)
def test_triton_refuses_cpu_tensors_before_anything_is_written(monkeypatch, rule):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "triton_found", lambda: True)
    grad = normal(9)
    before, version = bits(grad), grad._version
    with (
        tritonclip.use_backend("triton"),
        pytest.raises(
            RuntimeError, match=r"cpu tensors: use backend 'auto', or set TRITON_INTERPRET=1"
        ),
    ):
        tritonclip.clip_(parameters([grad]), rule)
    assert torch.equal(bits(grad), before)
    assert grad._version == version


def test_triton_that_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_found", lambda: False)
    with tritonclip.use_backend("triton"), pytest.raises(RuntimeError, match="pip install triton"):
        dispatch.backend_name(cuda_group())


def test_triton_that_is_not_installed_is_said_once(monkeypatch):
    """auto falls back to torch, at a price that is named with the remedy."""
    monkeypatch.setattr(dispatch, "triton_found", lambda: False)
    with pytest.warns(UserWarning, match=r"slower torch backend on cuda: .*pip install triton"):
        assert dispatch.backend_of(cuda_group()) is torch_backend
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert dispatch.backend_of(cuda_group()) is torch_backend
    assert not said


@pytest.mark.parametrize(
    ("other", "word"),
    [
        pytest.param(cuda_group(torch.float8_e5m2), "float8_e5m2", id="float8"),
        pytest.param(cuda_group(flat=False), r"grad\.contiguous\(\)", id="gaps"),
    ],
)
def test_what_kernels_do_not_read_is_said_once(monkeypatch, other, word):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "triton_found", lambda: True)
    with pytest.warns(UserWarning, match=word):
        assert dispatch.backend_name(other) == "torch"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert dispatch.backend_name(other) == "torch"
    assert not said


def test_torch_that_is_asked_for_says_nothing(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_found", lambda: False)
    with tritonclip.use_backend("torch"):
        assert dispatch.backend_name(cuda_group(torch.float8_e5m2, flat=False)) == "torch"


def test_import_error_in_the_kernels_is_not_swallowed(monkeypatch):
    """A broken installation is not a missing one: falling back would hide it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "triton_found", lambda: True)
    monkeypatch.setitem(sys.modules, "tritonclip.kernels.backend", None)
    with pytest.raises(ImportError, match=r"tritonclip\.kernels\.backend"):
        dispatch.backend_of(cuda_group())


def test_import_leaves_triton_alone():
    # torch first: what torch imports by itself is not ours.
    done = python(
        "-c",
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import tritonclip\n"
        "new = set(sys.modules) - before\n"
        "print(*[n for n in new if n.split('.')[0] == 'triton' or 'kernels' in n])\n",
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_every_public_name_is_there_and_listed():
    for name in tritonclip.__all__:
        assert getattr(tritonclip, name).__name__ == name
    assert set(tritonclip.__all__) <= set(dir(tritonclip))
    with pytest.raises(AttributeError, match="module 'tritonclip' has no attribute 'clip_grad'"):
        _ = tritonclip.clip_grad


def test_interpreter_serves_cpu_tensors(backend):
    """What the second pass of this suite rests on."""
    expected = (
        "tritonclip.kernels.backend" if backend.name == "triton" else "tritonclip.torch_backend"
    )
    grads = Group([normal(3, device=backend.device)], [0], flat=True)
    chosen = dispatch.backend_of(grads)
    assert chosen is importlib.import_module(expected)
    assert not INTERPRETED or backend.name == "triton"


def test_interpreter_leaves_cuda_tensors_alone(monkeypatch):
    """Its copies on the host hold addresses that mean nothing there."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "triton_found", lambda: True)
    with tritonclip.use_backend("triton"), pytest.raises(RuntimeError, match="unset it"):
        dispatch.backend_name(cuda_group())
    with pytest.warns(UserWarning, match="TRITON_INTERPRET=1"):
        assert dispatch.backend_name(cuda_group()) == "torch"


def test_self_test_prints_a_report():
    done = python("-m", "tritonclip", TRITONCLIP_BACKEND="torch")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["tritonclip"] == tritonclip.__version__
    assert lines["torch"] == torch.__version__
    assert lines["python"]
    assert lines["triton"]
    assert lines["backend"] == "torch"
    assert lines["verify"] == "off"
    assert lines["cpu"].endswith("torch backend, self-test ok")


def test_self_test_fails_with_a_reason_where_a_backend_is_wrong(monkeypatch, capsys):
    real = torch_backend.norm

    def wrong(tensors, norm_type, out, *, each=False):
        real(tensors, norm_type, out, each=each)
        out.mul_(1.001)

    monkeypatch.setattr(torch_backend, "norm", wrong)
    with tritonclip.use_backend("torch"):
        assert self_test.main() == 1
    assert "self-test failed: VerificationError: " in capsys.readouterr().out


def test_self_test_fails_with_a_reason_where_the_backend_cannot_serve():
    done = python("-m", "tritonclip", TRITONCLIP_BACKEND="triton")
    assert done.returncode == 1
    assert "self-test failed: RuntimeError: the triton backend was asked for, but" in done.stdout
    assert not done.stderr


def test_self_test_fails_with_a_reason_where_the_name_is_wrong():
    done = python("-m", "tritonclip", TRITONCLIP_BACKEND="gpu")
    assert done.returncode == 1
    assert "TRITONCLIP_BACKEND: expected 'auto', 'triton' or 'torch', got 'gpu'" in (
        done.stdout + done.stderr
    )
