"""The native backend in `clip_`: versions, modes, forked processes, and what operators serve."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tritonclip
from helpers import reference
from helpers.cases import grad_of, normal, parameter, parameters
from helpers.workers import NEEDS_FORK, python, run_in_fork
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue
from tritonclip.backends import native, operators
from tritonclip.backends.native import NativeLayout

if native.loops is None:
    pytest.skip("tritonclip was installed without its C extension", allow_module_level=True)


def test_only_extreme_gradients_of_float64_are_measured_by_operators(monkeypatch):
    measured = []
    real = operators.norm_of

    def norm_of(tensors, *arguments, **options):
        measured.append([len(tensor) for tensor in tensors])
        return real(tensors, *arguments, **options)

    monkeypatch.setattr(native, "norm_of", norm_of)
    values = [0.0, 1.0, 1e-170, 1e-300, 5e-324, 1e200, math.inf, math.nan]
    grads = [torch.full((i + 2,), v, dtype=torch.float64) for i, v in enumerate(values)]
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(math.inf))
    expected = [reference.norm(grad) for grad in grads]
    assert norms.tolist() == pytest.approx(expected, rel=1e-12, abs=0, nan_ok=True)
    assert measured == [[n] for n in (4, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.1), ClipByNorm(0.1), ClipByValue(0.1)])
def test_writes_count_as_versions_and_others_do_not(rule):
    for limit, written in ((rule, True), (type(rule)(1e9), False)):
        (one,) = parameters([normal(9)])
        before = grad_of(one)._version
        with tritonclip.use_backend("native"):
            tritonclip.clip_([one], limit)
        # By value, an element may be written wherever it is.
        assert (grad_of(one)._version > before) == (written or isinstance(rule, ClipByValue))


class Seen(TorchDispatchMode):
    """Counts operators that write."""

    def __init__(self):
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.written += func._schema.is_mutable
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "rule", [ClipByGlobalNorm(0.1), ClipByNorm(0.1), ClipByValue(0.1), ClipByUnitNorm(0.1)]
)
def test_modes_see_every_write(rule):
    params = parameters([normal(9), normal(4)])
    with tritonclip.use_backend("native"):
        tritonclip.clip_(params, rule)
        with Seen() as mode:
            tritonclip.clip_(params, type(rule)(0.05))
    assert mode.written


# Of torch itself, when it first makes a dual tensor.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_tangents_of_dual_numbers_are_clamped_too():
    with forward_ad.dual_level(), tritonclip.use_backend("native"):
        (one,) = parameters([forward_ad.make_dual(torch.tensor([0.5, 3.0]), torch.ones(2))])
        tritonclip.clip_([one], ClipByValue(1.0))
        tangent = forward_ad.unpack_dual(grad_of(one)).tangent
    assert tangent is not None
    assert tangent.tolist() == [1.0, 0.0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("order", [1.0, 3.0, math.inf])
def test_norms_of_groups_have_tangents(order):
    grads = [torch.ones(3), torch.ones(4, dtype=torch.float64)]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(grad, torch.ones_like(grad)) for grad in grads]
        norm = forward_ad.unpack_dual(tritonclip.get_total_norm(duals, order))
    # All elements are alike: of the norm, too, a step by the elements doubles it.
    assert norm.tangent == pytest.approx(float(norm.primal))


LARGE = """
import os, signal, torch, tritonclip
from tritonclip.backends.native import loops
# Of lengths that PyTorch's operators take in one thread, in both processes.
params = [torch.zeros(10_000, requires_grad=True) for _ in range(2 * loops.SHARED // 10_000 + 1)]
for one in params:
    one.grad = torch.ones(10_000)
"""
FORKS = """
tritonclip.clip_(params, 1.0)
child = os.fork()
if not child:
    signal.alarm(60)
    norm = tritonclip.clip_(params, 0.5)
    os._exit(abs(norm.item() - 1) > 1e-5)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_forked_process_waits_for_no_thread():
    """Where the list is large, but no gradient is, PyTorch's own operators wait for none."""
    done = python("-c", LARGE + FORKS, TRITONCLIP_BACKEND="native")
    assert done.returncode == 0, done.stderr


THREADS = """
torch.set_num_threads(2)
before = len(os.listdir("/proc/self/task"))
tritonclip.clip_(params, 1.0)
assert len(os.listdir("/proc/self/task")) == before + 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux shows them")
def test_large_list_is_shared_by_threads():
    done = python("-c", LARGE + THREADS, TRITONCLIP_BACKEND="native")
    assert done.returncode == 0, done.stderr


SHARES = {
    "none": ([], False),
    "short": ([131_070], False),
    "short, but for one": ([32_767] * 5, False),
    "one that PyTorch shares": ([32_768] * 4, True),
    "long": ([32_767] * 9, True),
}


@pytest.mark.parametrize(("sizes", "is_shared"), SHARES.values(), ids=SHARES)
def test_lists_are_shared_by_threads_from_a_length_on(sizes, is_shared):
    """Busy cores delay only lists that they would delay in PyTorch too, or long ones."""
    layout = NativeLayout([torch.empty(n) for n in [*sizes, 1]])
    assert layout.is_shared == is_shared


@NEEDS_FORK
def test_groups_of_elements_within_the_bounds_are_not_written():
    """Pages of one gradient, of which the inner one may not be written: a fork would die."""
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    grad = torch.frombuffer(memory, dtype=torch.float32)
    grad.fill_(0.5)
    grad[5] = grad[-5] = 9.0
    page = ctypes.c_void_p(grad.data_ptr() + mmap.PAGESIZE)

    def clip() -> None:
        assert ctypes.CDLL(None).mprotect(page, mmap.PAGESIZE, mmap.PROT_READ) == 0
        with tritonclip.use_backend("native"):
            tritonclip.clip_(parameter(grad), ClipByValue(1.0))
        assert grad[[5, -5]].tolist() == [1.0, 1.0]
        assert float(grad.sum()) == grad.numel() / 2 + 1

    run_in_fork(clip)


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.5), ClipByNorm(0.5)], ids=str)
def test_norms_of_dense_views_that_are_measured_again_make_one_view_each(rule, monkeypatch):
    """A view of every gradient for each would take time that grows with their square."""
    known = [parameter(torch.full((3, 2), 1e-200, dtype=torch.float64).t()) for _ in range(20)]
    tritonclip.clip_(known, rule)
    viewed: list[Tensor] = []

    def as_contiguous(tensors):
        viewed.extend(tensors)
        return operators.as_contiguous(tensors)

    monkeypatch.setattr(native, "as_contiguous", as_contiguous)
    tritonclip.clip_(known, rule)
    assert len(viewed) <= len(known)
