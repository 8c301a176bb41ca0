"""`python -m tritonclip doctor`: prints the installed versions and tests each device."""

import argparse
import importlib
import platform
import warnings

import torch

import tritonclip
from tritonclip import settings
from tritonclip.backends import choose, native
from tritonclip.clipping import clip_
from tritonclip.engine.verify import VerificationError
from tritonclip.rules import ClipByGlobalNorm, ClipByNorm, ClipByValue, Rule

# The self-test clips in these dtypes by these rules.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RULES = (ClipByGlobalNorm(1.0), ClipByNorm(1.0), ClipByValue(0.5))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds no arguments."""


def main(chosen: argparse.Namespace) -> int:
    """Prints versions, devices and backends; returns 1 if a self-test or a setting fails."""
    try:
        backend, verifying = settings.current()
    except ValueError as error:
        print(error)
        return 1
    for name, text in (
        ("tritonclip", tritonclip.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", _triton_version()),
        ("c extension", native.describe()),
        ("backend", backend),
        ("verify", "on" if verifying else "off"),
    ):
        print(f"{name:<12}{text}")
    failed = False
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in [torch.device("cpu"), *gpus]:
        backend, result = _self_test(device)
        failed |= result != "ok"
        is_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_gpu else platform.machine()
        print(f"{device!s:<12}{name}: {backend} backend, self-test {result}")
    if not gpus:
        print(f"{'gpu':<12}no GPU was found{_without_a_gpu()}")
    return int(failed)


def _triton_version() -> str:
    """The version as the module says it, since packages of other builds have other names."""
    if fault := choose.triton_fault():
        text = fault.removeprefix("triton is ")
        # The remedy is left out if Triton is not installed, since nobody needs it on a CPU.
        return "not installed" if text.startswith("not installed") else text
    return str(importlib.import_module("triton").__version__)


def _without_a_gpu() -> str:
    """Why no GPU can be found, or the backend that would serve one and why it is slow, if it is."""
    if not (torch.version.cuda or torch.version.hip):
        return f": torch {torch.__version__} is built without CUDA and ROCm"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            backend = choose.backend_name(torch.device("cuda"))
        except RuntimeError as error:
            return f"; one would not be served: {error}"
    found = f"; the {backend} backend would serve one"
    return ": ".join([found, *(str(warning.message) for warning in caught)])


def _self_test(device: torch.device) -> tuple[str, str]:
    """The backend of a device, and the result of a verified clip in every dtype by every rule."""
    try:
        backend = choose.backend_name(device)
        _clip_known(device)
        with settings.verify():
            for dtype in _DTYPES:
                for rule in _RULES:
                    _clip_sample(device, dtype, rule)
    except Exception as error:
        return "no", f"failed: {type(error).__name__}: {error}"
    return backend, "ok"


def _clip_known(device: torch.device) -> None:
    """Clips a gradient of known norm, since verification relies on the torch backend itself."""
    weight = torch.zeros(2, device=device, requires_grad=True)
    weight.grad = torch.tensor([3.0, 4.0], device=device)
    norm = float(clip_(weight, 1.0))
    if abs(norm - 5) > 1e-5 or not torch.allclose(weight.grad.cpu(), torch.tensor([0.6, 0.8])):
        raise VerificationError(
            f"the gradient [3, 4] of norm 5 was clipped to {weight.grad.tolist()}, by a norm of "
            f"{norm}; expected [0.6, 0.8]"
        )


def _clip_sample(device: torch.device, dtype: torch.dtype, rule: Rule) -> None:
    """Clips gradients of awkward sizes."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for size in (1, 15, 4097, 20001):
        parameter = torch.zeros(size, dtype=dtype, device=device, requires_grad=True)
        parameter.grad = torch.randn(size, generator=generator).to(device, dtype)
        parameters.append(parameter)
    clip_(parameters, rule)
