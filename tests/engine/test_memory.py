"""Shared memory is found exactly: elements of one tensor, and parts of several."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonclip.engine.memory import find_overlap, has_overlap, region_of

BUFFER = torch.zeros(512)
STRIDED = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), max_size=3)


def view(
    dims: list[tuple[int, int]], offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    return BUFFER.view(dtype).as_strided(sizes, strides, offset)


def bytes_of(tensor: Tensor) -> list[int]:
    """The address of every byte, by enumeration."""
    at = [range(size) for size in tensor.shape]
    item = tensor.element_size()
    starts = [
        tensor.data_ptr() + item * sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*at)
    ]
    return [start + byte for start in starts for byte in range(item)]


@given(dims=STRIDED)
def test_has_overlap_is_exact(dims):
    tensor = view(dims)
    met = bytes_of(tensor)
    assert has_overlap(tensor) == (len(set(met)) < len(met))


@given(
    dims=st.lists(STRIDED, min_size=2, max_size=4), offsets=st.lists(st.integers(0, 9), min_size=4)
)
def test_find_overlap_is_exact(dims, offsets):
    dtypes = itertools.cycle([torch.float32, torch.float16, torch.complex64])
    tensors = [view(*given) for given in zip(dims, offsets, dtypes, strict=False)]
    tensors = [tensor for tensor in tensors if not has_overlap(tensor)]
    met = [set(bytes_of(tensor)) for tensor in tensors]
    sharing = [(i, j) for i, j in itertools.combinations(range(len(tensors)), 2) if met[i] & met[j]]
    found = find_overlap([region_of(tensor) for tensor in tensors])
    assert found in sharing if sharing else found is None


@given(first=STRIDED, second=STRIDED)
def test_equal_regions_have_equal_bytes(first, second):
    one, other = view(first), view(second)
    if region_of(one) == region_of(other):
        assert sorted(bytes_of(one)) == sorted(bytes_of(other))


@pytest.mark.parametrize(
    "again",
    [
        lambda grid: grid.t(),
        lambda grid: grid.unsqueeze(1),
        lambda grid: grid.unflatten(0, (2, 3)),
        lambda grid: grid.unflatten(0, (2, 3)).permute(2, 1, 0),
    ],
    ids=["transposed", "unsqueezed", "unflattened", "permuted"],
)
def test_views_of_the_same_elements_have_one_region(again):
    for grid in (BUFFER[:30].view(6, 5), BUFFER[:30].view(6, 5)[:, :3]):
        assert region_of(grid) == region_of(again(grid))


def test_find_overlap_of_columns_allocates_nothing(monkeypatch):
    grid = torch.empty(1, device="meta").expand(2**20).as_strided((2**20, 1024), (1024, 1))
    columns = [grid[:, :1], grid[:, 1:700], grid[:, 700:]]
    parts = [region_of(part) for part in (*columns, grid[:, 699:701])]
    for name in ("zeros", "empty", "arange"):
        monkeypatch.delattr(torch, name)
    assert find_overlap(parts[:3]) is None
    assert find_overlap(parts) == (1, 3)
