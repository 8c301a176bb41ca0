"""`python -m tritonclip doctor`: versions, devices, and for each its backend and a self-test."""

import platform
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

import tritonclip
from tritonclip import settings
from tritonclip.backends import choose, native

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RULES = (
    tritonclip.ClipByGlobalNorm(1.0),
    tritonclip.ClipByNorm(1.0),
    tritonclip.ClipByValue(0.5),
)


def examine() -> int:
    """Prints the report; 1 where a self-test failed or the environment asks for nonsense."""
    try:
        backend, verifying = settings.current()
    except ValueError as error:
        print(error)
        return 1
    for name, text in (
        ("tritonclip", tritonclip.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", _version("triton")),
        ("c extension", native.describe()),
        ("backend", backend),
        ("verify", "on" if verifying else "off"),
    ):
        print(f"{name:<12}{text}")
    failed = False
    for device in _devices():
        backend, verdict = _report(device)
        failed |= verdict != "ok"
        print(f"{device!s:<12}{_device_name(device)}: {backend} backend, self-test {verdict}")
    if not torch.cuda.device_count():
        print(f"{'gpu':<12}no GPU was found{_why_no_gpu()}; {_backend_of_a_gpu()}")
    return int(failed)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[torch.device]:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *gpus]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _why_no_gpu() -> str:
    built = torch.version.cuda or torch.version.hip
    return "" if built else f": torch {torch.__version__} is built without CUDA and ROCm"


def _backend_of_a_gpu() -> str:
    """The backend that a GPU would have and, where it is a slow one, why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            backend = choose.backend_name(torch.device("cuda"), torch.float32)
        except RuntimeError as error:
            return f"one would not be served: {error}"
    return ": ".join([f"the {backend} backend would serve one", *(str(w.message) for w in caught)])


def _report(device: torch.device) -> tuple[str, str]:
    """The backend of a device, and the result of a self-test of every dtype and rule there."""
    try:
        backend = choose.backend_name(device, torch.float32)
        with tritonclip.verify():
            for dtype in _DTYPES:
                for rule in _RULES:
                    _clip_sample(device, dtype, rule)
    except Exception as error:
        return "no", f"failed: {type(error).__name__}: {error}"
    return backend, "ok"


def _clip_sample(device: torch.device, dtype: torch.dtype, rule: tritonclip.rules.Rule) -> None:
    """Clips gradients of awkward sizes; verification raises where something is wrong."""
    random: Callable[..., torch.Tensor] = torch.randn
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for size in (1, 15, 4097, 20001):
        parameter = torch.zeros(size, dtype=dtype, device=device, requires_grad=True)
        parameter.grad = random(size, generator=generator).to(device, dtype)
        parameters.append(parameter)
    tritonclip.clip_(parameters, rule)
