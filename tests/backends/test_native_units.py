"""Clipping by unit in the C loops: their arguments, in both forms, and calls on whole lists."""

from __future__ import annotations

import math
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import FLOATS, assert_bits, grad_of, normal
from helpers.native_lists import BLOCK, amid_canaries, assert_canaries, listed, norms_of
from helpers.units import check_clip, make
from tritonclip import ClipByUnitNorm
from tritonclip.backends import native_units, units
from tritonclip.backends.native import CODES, loops

if loops is None:
    pytest.skip("tritonclip was installed without its C extension", allow_module_level=True)

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
    monkeypatch.setattr(native_units, "loops", SimpleNamespace(**vars(loops) | fakes))
    with tritonclip.use_backend("native"):
        yield names


@pytest.fixture
def by_operators(monkeypatch):
    """Shapes of the tensors that operators measure."""
    shapes: list[tuple[int, ...]] = []

    def measure(tensor: Tensor, **options: Any) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return units.unit_norms(tensor, **options)

    monkeypatch.setattr(native_units, "unit_norms", measure)
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
