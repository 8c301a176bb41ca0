"""By name, of each gradient or of groups: norms, largest magnitudes and shares of zeros."""

import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import tritonclip
from helpers import reference
from helpers.arena import Arena
from helpers.cases import FLOATS, INTERPRETED, assert_norm, normal, parameters, untouched
from helpers.clips import CHOICES, NORM_TYPES, Clip, random_arena

Named = list[tuple[str, Tensor]]


def by_first_name(name: str) -> str:
    return name.split(".")[0]


def random_names(arena: Arena, choice: random.Random) -> Named:
    """Parameters, of which some share a name, have two, or have no gradient or none to measure."""
    drawn = random.Random(choice.randrange(2**32))
    kinds = drawn.choice([["dense"], ["dense", "dense", "sparse", "none", "frozen", "left out"]])
    for one, grad in zip(arena.params, arena.grads, strict=True):
        grad[drawn.choice([slice(None), slice(0, None, 3), slice(-1, None)])] *= drawn.choice(
            [0.0, -0.0, 1.0]
        )
        kind = drawn.choice(kinds)
        if kind == "sparse":
            rows = torch.arange(len(grad), device=grad.device).repeat(2)
            one.grad = torch.sparse_coo_tensor(
                rows[None], torch.cat([grad, grad]), grad.shape, check_invariants=True
            )
        elif kind in ("none", "frozen"):
            one.grad = None if kind == "none" else drawn.choice([None, grad])
            one.requires_grad_(kind == "none")
        one.need_clip = kind != "left out"  # type: ignore[attr-defined]
    scalar = parameters([torch.tensor(-2.0, device=arena.memory.device)])
    items = [*arena.params, *scalar, *drawn.choices(arena.params, k=drawn.choice([0, 2]))]
    n = drawn.choice([2, len(items)])
    return [(f"{'abc'[i % n % 3]}.{i % n}", one) for i, one in enumerate(items)]


def members_of(named: Named) -> dict[str, list[Tensor]]:
    """The parameters that are measured, once for each of their names."""
    members: dict[str, dict[Tensor, None]] = {}
    for name, one in named:
        if getattr(one, "need_clip", True) and (one.requires_grad or one.grad is not None):
            members.setdefault(name, {})[one] = None
    return {name: [*found] for name, found in members.items()}


def assert_near(found: Tensor, expected: float, measured: Iterable[Tensor]) -> None:
    """A number of the dtype that the widest of all gradients asks for."""
    dtypes = {one.dtype for one in measured if one.grad is not None}
    wide = not dtypes.isdisjoint((torch.float64, torch.complex128))
    assert found.dtype == (torch.float64 if wide else torch.float32)
    assert found.shape == ()
    assert_norm(found, expected, is_mixed=len(dtypes) > 1)


def share_of_zeros(members: list[Tensor]) -> float:
    n = sum(one.numel() for one in members)
    grads = [one.grad.to_dense() for one in members if one.grad is not None]
    return 1 - sum(int(grad.count_nonzero()) for grad in grads) / max(n, 1)


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@given(choice=CHOICES)
def test_numbers_of_random_names_and_groups_are_right(backend, choice: random.Random):
    arena = random_arena(choice, backend.device, [Arena])
    Clip(1.0, spoils=choice.random() < 0.3, is_extreme=True).fill(arena, choice)
    named = random_names(arena, choice)
    options: Any = choice.choice([{}, {}, {"grad_scale": 8.0}, {"grad_scale": torch.tensor(8.0)}])
    scale = float(options.get("grad_scale", 1.0))
    group_of = choice.choice([None, by_first_name, lambda name: "all"])
    p = choice.choice(NORM_TYPES)
    sparse = [one.grad for _, one in named if one.grad is not None and one.grad.is_sparse]
    coalesced = [grad.is_coalesced() for grad in sparse]

    with untouched([arena.memory, *(grad._values() for grad in sparse)]):
        norms = tritonclip.norms_by_name(named, group_of=group_of, norm_type=p, **options)
        statistics = tritonclip.statistics_by_name(named, group_of=group_of, **options)

    assert [grad.is_coalesced() for grad in sparse] == coalesced
    members = members_of([(group_of(name) if group_of else name, one) for name, one in named])
    assert list(norms) == list(statistics) == list(members)
    measured = [one for found in members.values() for one in found]
    for name, found in members.items():
        grads = [one.grad for one in found if one.grad is not None]
        by_order = {
            order: reference.total_norm(grads, order) / scale for order in (p, 2.0, math.inf)
        }
        assert_near(norms[name], by_order[p], measured)
        norm, largest, zeros = statistics[name]
        assert_near(norm, by_order[2.0], measured)
        assert_near(largest, by_order[math.inf], measured)
        assert_near(zeros, share_of_zeros(found), measured)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_smallest_numbers_are_no_zeros(backend, device, dtype):
    if backend.name == "triton" and INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter makes subnormal numbers of bfloat16 zeros")
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    grad = torch.tensor([least, -least, 0.0, -0.0], dtype=dtype, device=device)
    found = tritonclip.statistics_by_name(parameters([grad]))["parameters[0]"]
    assert float(found.zeros) == 0.5
    if dtype != torch.float64:
        assert float(found.largest) == least


def test_modules_and_lists_give_the_same_norms():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model(torch.ones(5, 3)).sum().backward()
    norms = tritonclip.norms_by_name(model)
    unnamed = tritonclip.norms_by_name(model.parameters())
    assert [*unnamed] == [f"parameters[{i}]" for i in range(4)]
    assert [*map(float, unnamed.values())] == [*map(float, norms.values())]


SHAPES = {"body.weight": (7, 5), "body.bias": (7,), "head.weight": (3,), "head.bias": ()}


def new_model() -> Named:
    """Named parameters with random gradients."""
    grads = [normal(shape, torch.float32, seed=seed) for seed, shape in enumerate(SHAPES.values())]
    return [*zip(SHAPES, parameters(grads), strict=True)]


def test_verification_covers_the_norms(monkeypatch):
    from tritonclip.backends.native import NativeBatch

    real = NativeBatch.combine
    monkeypatch.setattr(NativeBatch, "combine", lambda *args: real(*args) * 1.01)
    wrong = pytest.raises(tritonclip.VerificationError, match=r"norm of body\.weight")
    with tritonclip.use_backend("native"), tritonclip.verify(), wrong:
        tritonclip.norms_by_name(new_model())


@pytest.mark.parametrize("p", [0.0, 0.5, -math.inf, -1.0, math.nan])
def test_norm_types_that_do_not_combine_are_refused(p):
    with pytest.raises(ValueError, match="norm_type must be from 1 to inf"):
        tritonclip.norms_by_name(new_model(), norm_type=p)


def test_groups_that_are_no_text_are_refused():
    with pytest.raises(TypeError, match="group_of must be a function of a name, got 'body'"):
        tritonclip.norms_by_name(new_model(), group_of="body")
    with pytest.raises(TypeError, match=r"group_of must return text for 'body\.weight', got 3"):
        tritonclip.norms_by_name(new_model(), group_of=lambda name: 3)


def test_norms_go_into_a_recorder(tmp_path):
    path = tmp_path / "run.csv"
    named = new_model()
    with tritonclip.record(path) as recorder:
        norms = tritonclip.norms_by_name(named)
        recorder.add_(tritonclip.clip_(named, 1.0), limit=1.0, norms=norms)
    header, row = path.read_text().splitlines()
    assert header.split(",")[6:] == [f"norm/{name}" for name in SHAPES]
    assert list(map(float, row.split(",")[6:])) == list(map(float, norms.values()))
