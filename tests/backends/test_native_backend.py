"""The native backend in `clip_`: versions, modes, forked processes, and what operators serve.

By unit: the arguments of the loops, in both forms, and calls on whole lists.
"""

import ctypes
import math
import mmap
import os
import sys
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tritonclip
from helpers import reference
from helpers.cases import FLOATS, Operators, assert_bits, grad_of, normal, parameter, parameters
from helpers.native_lists import BLOCK, amid_canaries, assert_canaries, listed, norms_of
from helpers.units import check_clip, make
from helpers.workers import NEEDS_FORK, python, run_in_fork
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue
from tritonclip.backends import native, operators
from tritonclip.backends.native import CODES, NativeLayout, loops

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


@pytest.mark.parametrize(
    "rule", [ClipByGlobalNorm(0.1), ClipByNorm(0.1), ClipByValue(0.1), ClipByUnitNorm(0.1)]
)
def test_modes_see_every_write(rule):
    params = parameters([normal(9), normal(4)])
    with tritonclip.use_backend("native"):
        tritonclip.clip_(params, rule)
        with Operators() as operators:
            tritonclip.clip_(params, type(rule)(0.05))
    assert operators.written()


# Of torch itself, when it first makes a dual tensor.
def test_tangents_of_dual_numbers_are_clamped_too():
    with forward_ad.dual_level(), tritonclip.use_backend("native"):
        (one,) = parameters([forward_ad.make_dual(torch.tensor([0.5, 3.0]), torch.ones(2))])
        tritonclip.clip_([one], ClipByValue(1.0))
        tangent = forward_ad.unpack_dual(grad_of(one)).tangent
    assert tangent is not None
    assert tangent.tolist() == [1.0, 0.0]


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


# Rows and their length: none, without elements, of parts of vectors, of many blocks, and one.
FORMS = [(0, 5), (3, 0), (5, 1), (40, 7), (9, 8), (17, 33), (3, 300), (2, BLOCK), (3, BLOCK + 5)]
FORMS += [(1, 3 * BLOCK + 5), (BLOCK + 3, 1), (2 * BLOCK, 3)]
BY_FORM = pytest.mark.parametrize(("rows", "length"), FORMS, ids=str)


def arguments(tensors: list[Tensor], threads: int = 1) -> tuple[Any, ...]:
    """Tensors of two dimensions, as the loops take their rows."""
    at, _, code, _ = listed(tensors)
    lengths = array("q", [tensor.shape[1] for tensor in tensors]).tobytes()
    return at, lengths, code, threads, array("q", map(len, tensors)).tobytes()


def unit_norms(tensors: list[Tensor], threads: int = 1) -> tuple[Tensor, list[int]]:
    """The norms of all rows, and the tensors whose norms are not known."""
    norms = torch.full((sum(map(len, tensors)),), math.nan, dtype=torch.float64)
    return norms, loops.unit_norms(*arguments(tensors, threads), norms.data_ptr())


def packed(factors: Tensor) -> bytes:
    return array("d", factors.tolist()).tobytes()


@pytest.mark.usefixtures("both_forms")
@BY_FORM
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_of_units_are_those_of_their_rows(dtype, rows, length):
    tensors = [normal((4, 9), dtype), normal((rows, length), dtype), normal((2, 3), dtype)]
    norms, unknown = unit_norms(tensors)
    assert norms.tolist() == norms_of([row for tensor in tensors for row in tensor])
    assert not unknown
    assert torch.equal(unit_norms(tensors, 3)[0], norms)


def test_norms_of_tensors_without_an_address_are_inf():
    tensors = [normal((4, 9)), normal((3, 5)), torch.empty(2, 0)]
    at, *form = arguments(tensors)
    norms = torch.zeros(9, dtype=torch.float64)
    assert loops.unit_norms([at[0], 0, 0], *form, norms.data_ptr()) == [1]
    assert norms[:4].tolist() == norms_of(list(tensors[0]))
    assert norms[4:].tolist() == [math.inf] * 3 + [0.0] * 2


@pytest.mark.parametrize("value", [1e-200, 1e200, math.inf, math.nan, 5e-324])
def test_tensors_with_extreme_units_of_float64_are_named(value):
    tensors = [normal((3, 5), torch.float64) for _ in range(3)]
    tensors[1][2] = value
    tensors[2][0] = 0.0
    assert unit_norms(tensors)[1] == [1]
    assert not unit_norms([tensor.float() for tensor in tensors])[1]


@pytest.mark.usefixtures("both_forms")
@BY_FORM
@pytest.mark.parametrize("dtype", FLOATS)
def test_products_of_units_are_those_of_their_rows(dtype, rows, length):
    factors = torch.rand(rows + 4, dtype=torch.float64)
    factors[rows // 2] = 1.0
    x = normal((rows, length), dtype)
    expected, others = x.clone(), normal((4, 9), dtype)
    own, memory = amid_canaries(x.view(-1), 3)
    for one, factor in zip(expected, factors[:rows].tolist(), strict=True):
        loops.multiply_(*listed([one]), factor)
    for threads in (1, 3):
        own.copy_(x.view(-1))
        loops.multiply_units_(
            *arguments([own.view(rows, length), others], threads), packed(factors)
        )
        assert_bits([own], [expected.view(-1)])
    assert_canaries(memory, own)


def test_products_leave_tensors_without_an_address():
    tensors = [normal((2, 3)), normal((2, 3), seed=1)]
    at, *form = arguments(tensors)
    loops.multiply_units_([0, at[1]], *form, packed(torch.arange(4.0)))
    assert_bits(tensors, [normal((2, 3)), normal((2, 3), seed=1) * torch.tensor([[2.0], [3.0]])])


SPREAD = [0.0, 1e-300, 1e-42, 1e-8, 0.3, 1.0, 1 + 2**-30, 7.0, 1e30, 1e300, math.inf, math.nan]


@pytest.mark.covering(2)
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0, math.inf])
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_factors_of_units_are_those_of_operators(dtype, wide, ratio, eps, scale):
    norms = torch.cartesian_prod(*[torch.tensor(SPREAD, dtype=torch.float64)] * 2).t().contiguous()
    own, weights = norms[0] / scale, norms[1]
    limit = ratio * torch.where(weights < eps, eps, weights)
    limit[(weights == math.inf) | (ratio == math.inf)] = math.inf
    by = torch.where((own == 0) | (own <= limit), 1.0, limit / own)
    by = by.to(torch.float64 if wide else torch.float32)
    expected = (by / torch.tensor(scale, dtype=by.dtype)).to(dtype)
    rows = array("q", [len(own)]).tobytes()
    factors, changed, least = loops.unit_factors(
        norms.data_ptr(), rows, ratio, eps, scale, wide, CODES[dtype]
    )
    np.testing.assert_array_equal(np.frombuffer(factors), expected.double().numpy())
    assert changed == ([] if bool((expected == 1).all()) else [0])
    np.testing.assert_array_equal(least, by.min().item())


def test_each_gradient_may_have_its_own_ratio():
    norms = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 0.5, 0.5]], dtype=torch.float64)
    counts, code = array("q", [2, 0, 1, 1]).tobytes(), CODES[torch.float32]
    found = loops.unit_factors(norms.data_ptr(), counts, [0.5, 9.0, 2.0, 1.0], 0, 1, False, code)
    assert found is not None
    assert np.frombuffer(found[0]).tolist() == [0.25, 1.0, 1.0, 0.5]
    assert found[1:] == ([0, 3], 0.25)


@pytest.fixture
def counted(monkeypatch):
    """Names of the loops by unit that are called."""
    names: list[str] = []

    def note(name: str, *given: Any) -> Any:
        names.append(name)
        return getattr(loops, name)(*given)

    fakes = {name: partial(note, name) for name in dir(loops) if "unit" in name}
    monkeypatch.setattr(native, "loops", SimpleNamespace(**vars(loops) | fakes))
    with tritonclip.use_backend("native"):
        yield names


@pytest.fixture
def by_operators(monkeypatch):
    """Shapes of the tensors that operators measure."""
    shapes: list[tuple[int, ...]] = []

    def measure(tensor: Tensor, **options: Any) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return operators.norms_of_units(tensor, **options)

    monkeypatch.setattr(native, "norms_of_units", measure)
    with tritonclip.use_backend("native"):
        yield shapes


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_call_measures_a_list_and_one_writes_it(dtype, policy, counted):
    """Where cores are busy, each region of several threads may wait for them."""
    parameters, rule = make(dtype=dtype), ClipByUnitNorm()
    check_clip(parameters, rule, nonfinite=policy)
    assert counted == ["unit_norms", "unit_factors", "multiply_units_"]
    counted.clear()
    tritonclip.clip_(parameters, ClipByUnitNorm(1e9), nonfinite=policy)
    assert "multiply_units_" not in counted


@pytest.mark.parametrize("policy", ["propagate", "zero"])
def test_versions_count_once_where_a_unit_is_written(policy):
    parameters = make([(5, 8), (3, 700), (70,), (6, 3, 3, 3)])
    grads = [grad_of(one) for one in parameters]
    grads[1].mul_(1e-9)
    # One row of those that are written.
    grads[3][:5] *= 1e-9
    before, weights = [g._version for g in grads], [one._version for one in parameters]
    with tritonclip.use_backend("native"):
        tritonclip.clip_(parameters, ClipByUnitNorm(), nonfinite=policy)
    assert [g._version - old for g, old in zip(grads, before, strict=True)] == [1, 0, 1, 1]
    assert [one._version for one in parameters] == weights


def test_only_units_with_gaps_take_operators(by_operators):
    parameters, rule = make([(5, 8), (7, 3), (6,), (4, 9)]), ClipByUnitNorm()
    parameters[1].data = parameters[1].data.t().contiguous().t()
    parameters[3].data = parameters[3].data.t().contiguous().t()
    parameters[3].grad = grad_of(parameters[3]).t().contiguous().t()
    before = [grad_of(p)._version for p in parameters]
    check_clip(parameters, rule)
    assert by_operators == [(4, 9), (7, 3), (4, 9)]
    assert [grad_of(p)._version for p in parameters] == [old + 1 for old in before]


def test_only_tensors_with_extreme_units_take_operators(by_operators):
    parameters, rule = make([(5, 8), (7, 3), (6,)], torch.float64), ClipByUnitNorm()
    grad_of(parameters[1]).mul_(1e200)
    parameters[2].data *= 1e-200
    norms = check_clip(parameters, rule)
    assert by_operators == [(7, 3), (6,)]
    assert bool(norms.isfinite().all())


@pytest.mark.parametrize("length", [BLOCK + 5, 5])
def test_units_of_many_blocks_and_threads(length, set_threads):
    n = 4 * loops.SHARED // length
    rule, found = ClipByUnitNorm(), []
    for threads in (1, 2):
        parameters = make([(n, length), (n * length,)])
        set_threads(threads)
        with tritonclip.use_backend("native"):
            norms = check_clip(parameters, rule)
        found.append([norms, *map(grad_of, parameters)])
    assert_bits(*found)
