"""``python -m tritonclip`` reports what is installed and whether it computes right."""

import sys

import pytest
import torch

import tritonclip
from helpers.broken_verbs import break_norm
from helpers.workers import python
from tritonclip.backends import choose
from tritonclip.backends.torch import TorchBatch
from tritonclip.commands.cli import main


def test_self_test_prints_a_report_without_any_extra(tmp_path):
    """And without NumPy, of which torch alone warns."""
    for name in ("click", "matplotlib", "numpy", "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    done = python("-m", "tritonclip", TRITONCLIP_BACKEND="torch", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("Warning") == done.stderr.count("Failed to initialize NumPy")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["tritonclip"] == tritonclip.__version__
    assert lines["torch"] == torch.__version__
    assert lines["python"]
    assert lines["triton"]
    assert lines["backend"] == "torch"
    assert lines["verify"] == "off"
    assert lines["cpu"].endswith("torch backend, self-test ok")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a GPU")
@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("torch", "; the torch backend would serve one"),
        ("native", "; one would not be served: the native backend was asked for, but it runs on"),
    ],
    ids=["torch", "native"],
)
def test_self_test_says_that_there_is_no_gpu_and_its_backend(monkeypatch, capsys, backend, said):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with tritonclip.use_backend(backend):
        main(["doctor"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"gpu         no GPU was found{said}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a GPU")
@pytest.mark.parametrize("installed", [True, False], ids=["triton", "no triton"])
@pytest.mark.parametrize("cuda", ["13.0", None], ids=["cuda", "cpu"])
def test_self_test_says_why_a_gpu_would_be_slow(cuda, installed, monkeypatch, capsys):
    """A torch without CUDA finds no GPU, and needs no triton."""
    monkeypatch.setattr(choose, "triton_fault", choose.triton_fault.__wrapped__)
    if installed:
        pytest.importorskip("triton")
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    main(["doctor"])
    printed = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    assert (lines["triton"] == "not installed") is not installed
    if cuda is None:
        assert lines["gpu"].endswith("is built without CUDA and ROCm")
    elif installed:
        assert lines["gpu"].endswith("the triton backend would serve one")
    else:
        assert "the torch backend would serve one: tritonclip uses its slower" in lines["gpu"]
        assert "triton is not installed: run pip install" in lines["gpu"]
    assert not printed.err


def test_self_test_fails_with_a_reason_where_a_backend_is_wrong(monkeypatch, capsys):
    break_norm(monkeypatch, TorchBatch, 1.001)
    with tritonclip.use_backend("torch"):
        assert main(["doctor"]) == 1
    assert "self-test failed: VerificationError: " in capsys.readouterr().out


def test_self_test_fails_with_a_reason_where_the_backend_cannot_serve(monkeypatch, capsys):
    monkeypatch.setenv("TRITONCLIP_BACKEND", "triton")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr()
    said = "self-test failed: NotImplementedError: the triton backend was asked for, but"
    assert said in printed.out
    assert not printed.err


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRITONCLIP_BACKEND", "gpu", "expected 'auto', 'triton', 'native' or 'torch', got 'gpu'"),
        ("TRITONCLIP_VERIFY", "yse", "expected '1' or '0', got 'yse'"),
    ],
)
def test_self_test_fails_with_a_reason_where_a_variable_is_wrong(
    variable, value, message, monkeypatch, capsys
):
    monkeypatch.setenv(variable, value)
    assert main(["doctor"]) == 1
    assert capsys.readouterr() == (f"{variable}: {message}\n", "")
