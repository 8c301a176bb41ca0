"""What the tests run on: dtypes, sizes, rules, and the few lines that every test file needs."""

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tritonclip
from helpers import reference
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, functional
from tritonclip.backends import choose
from tritonclip.engine import gradients

# The kernels run through Triton's interpreter, at up to 0.1 s for every 16,384 elements.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

CHUNK = 16_384
# 0, 1, odd, and one below, at and above every kernel block (2,048 to 8,192 elements by dtype) and
# the chunk.
SIZES = (0, 1, 7, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 16383, 16384, 16385)
LARGE = 2 * CHUNK + 5 if INTERPRETED else 1_000_003
MANY = 200 if INTERPRETED else 4_000
# Each of which is a program of a kernel, and takes the interpreter milliseconds.
DOZENS = 12 if INTERPRETED else 60
# Functions out of place, of a list of tensors and a limit; they return a list.
FUNCTIONS: dict[str, Any] = {
    "global": lambda x, limit: functional.clip_by_global_norm(x, limit)[0],
    "known": lambda x, limit: functional.clip_by_global_norm(x, limit, 3.0)[0],
    "norm": functional.clip_by_norm,
    "norm-1": lambda x, limit: functional.clip_by_norm(x, limit, norm_type=1.0),
    "norm-inf": lambda x, limit: functional.clip_by_norm(x, limit, norm_type=math.inf),
    "average": functional.clip_by_average_norm,
    "rms": functional.clip_by_rms,
    "value": lambda x, limit: functional.clip_by_value(x, -limit, limit),
}


def named(dtypes: Iterable[torch.dtype]) -> list[object]:
    """Parameters for pytest, each with the dtype's short name for an id."""
    return [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in dtypes]


FLOATS = named((torch.float16, torch.bfloat16, torch.float32, torch.float64))
HALVES = named((torch.float16, torch.bfloat16))

NORM_TYPES = [pytest.param(p, id=f"p={p}") for p in (1.0, 1.5, 2.0, 3.0, 20.0, torch.inf)]


def each_rule(limit: float, *bounds: float) -> list[Any]:
    """Parameters for pytest: clipping by the norm of all, by the norm of each, and by value."""
    return [
        pytest.param(ClipByGlobalNorm(limit), id="global"),
        pytest.param(ClipByNorm(limit), id="by-norm"),
        pytest.param(ClipByValue(*bounds), id="by-value"),
    ]


def normal(
    shape: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Random normal values, the same on every machine and for every device."""
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=wide)
    return values.to(dtype).to(device)


def few_large(size: int, p: float, dtype: torch.dtype, period: int, large: int) -> Tensor:
    """Some ones at the start of every period, and then elements whose p-th power is 2^-24.

    Added to a one in float32, each is lost: the worst case of a running sum. float64 likewise.
    """
    lost = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    values = torch.full((size,), lost ** (1 / p), dtype=dtype)
    values[torch.arange(size) % period < large] = 1.0
    return values


def of_sizes(
    sizes: Iterable[int | Sequence[int]], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """One random gradient a size, or shape."""
    return [normal(size, dtype, device, seed) for seed, size in enumerate(sizes)]


def parameter(grad: Tensor | None, device: torch.device | str = "cpu") -> Tensor:
    """A parameter whose ``.grad`` is this very tensor (or None)."""
    if grad is None:
        return torch.nn.Parameter(torch.zeros(2, device=device))
    made = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    if grad.is_floating_point() or grad.is_complex():
        made = torch.nn.Parameter(made)
    made.grad = grad
    return made


def parameters(grads: Iterable[Tensor | None]) -> list[Tensor]:
    """A parameter for each gradient."""
    return [parameter(grad) for grad in grads]


_known: dict[object, Tensor] = {}


def same_parameters(grads: Iterable[Tensor]) -> list[Tensor]:
    """As `parameters`, the same ones in every call, as those of a model from step to step."""
    found = []
    for at, grad in enumerate(grads):
        key = at, grad.shape, grad.dtype, grad.device
        with torch.inference_mode(False):
            one = _known.setdefault(key, parameter(torch.zeros_like(grad)))
        one.grad = grad
        found.append(one)
    return found


def grad_of(one: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    assert one.grad is not None
    return one.grad


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies on the CPU, for a comparison after the originals were written to."""
    return [tensor.detach().clone().cpu() for tensor in tensors]


def bounds_of(rule: ClipByValue) -> tuple[float, float]:
    """The bounds of a rule whose bounds are numbers."""
    assert not callable(rule.min)
    assert not callable(rule.max)
    return rule.min, rule.max


def clipped(grads: Sequence[Tensor], rule: Any) -> tuple[Any, list[Tensor]]:
    """Clips gradients in place; what was measured, and the gradients by the rule's formula."""
    before = copies(grads)
    measured = tritonclip.clip_(parameters(grads), rule)
    return measured, reference.clipped(before, rule, measured)


def check_clip(grads: Sequence[Tensor], rule: Any, params: Any = None, **options: Any) -> Any:
    """Norms are right, and gradients are those of the formula; returns what was measured.

    `params` have these gradients; by default, parameters made for them.
    """
    rule = rule if hasattr(rule, "per_gradient") else ClipByGlobalNorm(rule)
    before, scale = copies(grads), options.get("grad_scale")
    given = parameters(grads) if params is None else params
    measured: Any = tritonclip.clip_(given, rule, **options)
    if measured is not None:
        truths = reference.norms if measured.dim() else reference.total_norm
        truth = torch.tensor(truths(before, rule.norm_type), dtype=torch.float64)
        assert_norm(measured, (truth / (scale or 1.0)).tolist())
    assert_bits(grads, reference.clipped(before, rule, measured, scale))
    return measured


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """No bit changes inside."""
    tensors = list(tensors)
    before = copies(tensors)
    yield
    assert_bits(tensors, before)


@contextmanager
def untouched(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Nothing is written inside, not even what was there."""
    tensors = list(tensors)
    versions = [tensor._version for tensor in tensors]
    with unchanged(tensors):
        yield
    assert [tensor._version for tensor in tensors] == versions


def bits(tensor: Tensor) -> Tensor:
    """A copy of the same bits as integers, so that -0.0 differs from 0.0 and NaN equals itself."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
    plain = plain.resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return plain.view(ints[plain.element_size()])


def assert_bits(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Every tensor equals its counterpart to the last bit; any NaN equals any other NaN."""
    for index, (ours, truth) in enumerate(zip(actual, expected, strict=True)):
        assert ours.dtype == truth.dtype
        assert ours.shape == truth.shape
        left, right = ours.detach().cpu(), truth.detach().cpu()
        if left.is_complex():
            left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right)
        if torch.equal(bits(left), bits(right)):
            continue
        wrong = (bits(left) != bits(right)) & ~(left.isnan() & right.isnan())
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            pytest.fail(
                f"gradient {index}: {int(wrong.sum())} of {wrong.numel()} elements differ, the "
                f"first at {at}: {left[at].item()!r} instead of {right[at].item()!r}"
            )


# The contract, by the dtype of the result. float32: storing it costs 2**-24 = 6.0e-8; where a
# chunk is added up in float32 lanes, k additions cost at most k * 2**-24 of the sum and half of it
# in the root, so 1e-6 leaves room for k = 31 in the worst case (4 blocks a lane and a tree of 12
# levels are 16), and all above the chunk is float64. float64: a sum by trees of at most 40 levels
# is right to 40 * 2**-53 = 4.4e-15, and the power and the root of a norm cost some 2**-53 * p.
RELATIVE = {torch.float32: 1e-6, torch.float64: 1e-12}
# A norm below the smallest normal number is right to one unit in the last place.
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}


def assert_norm(
    actual: Tensor, expected: float | Sequence[float], *, is_mixed: bool = False
) -> None:
    """A norm, or one norm a gradient, is right to the tolerance of its dtype.

    `is_mixed`: of gradients of several dtypes, of which those below float64 are right to 1e-6.
    """
    kind = torch.float32 if is_mixed else actual.dtype
    torch.testing.assert_close(
        actual.detach().cpu().double(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=RELATIVE[kind],
        atol=SMALLEST[kind],
        equal_nan=True,
    )


@contextmanager
def no_sync() -> Iterator[None]:
    """A host sync inside is an error."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # That the mode is a prototype.
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Operators(TorchDispatchMode):
    """Runs operators, and keeps each of them with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def written(self) -> list[tuple[Any, Any, dict[str, Any]]]:
        """The calls of operators that write."""
        return [call for call in self.calls if call[0]._schema.is_mutable]


class NoHostRead(TorchDispatchMode):
    """Refuses to read a value from a tensor on the host, or to pin memory for a copy of one.

    The library does not see it, and calls the kernels that it calls without a mode.
    """

    def __enter__(self) -> Any:
        self._hidden = ExitStack()
        for module in (choose, gradients):
            self._hidden.enter_context(mock.patch.object(module, "is_observed", return_value=False))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hidden.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        assert not name.startswith(("_local_scalar_dense", "item", "is_nonzero", "nonzero")), name
        given = kwargs or {}
        # Tables of bytes are uploaded from pinned memory.
        assert not given.get("pin_memory") or given["dtype"] == torch.uint8, name
        return func(*args, **given)
