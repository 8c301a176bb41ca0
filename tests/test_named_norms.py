"""By name, of each gradient or of groups: norms, largest magnitudes and shares of zeros."""

import math

import pytest
import torch
from torch import Tensor, nn

import tritonclip
from helpers import reference
from helpers.cases import CHUNK, FLOATS, INTERPRETED, assert_norm, normal, parameters, untouched
from tritonclip.named_norms import GradientStatistics


def expected_of(grads: list[Tensor]) -> tuple[float, float, float]:
    """Norm, largest magnitude and share of zeros of some gradients, in float64."""
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
    wide = [g.to(torch.complex128 if g.is_complex() else torch.float64).cpu() for g in dense]
    elements = torch.cat([g.abs().flatten() for g in wide])
    if not len(elements):
        return 0.0, 0.0, 1.0
    zeros = float((elements == 0).double().mean())
    return float(elements.norm()), float(elements.max()), zeros


def assert_statistics(found: GradientStatistics, grads: list[Tensor]) -> None:
    norm, largest, zeros = expected_of(grads)
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    assert {one.dtype for one in found} == {torch.float64 if wide else torch.float32}
    assert {one.shape for one in found} == {()}
    assert_norm(found.norm, norm)
    assert float(found.largest) == pytest.approx(largest, rel=1e-7, nan_ok=True)
    assert float(found.zeros) == pytest.approx(zeros, rel=1e-7)


def with_zeros(n: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """A gradient whose first, last and every third element is 0 or -0."""
    grad = normal(n, dtype, device, seed)
    grad[::3] = 0.0
    grad[1::6] = -0.0
    grad[-1:] = 0.0
    return grad


@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_are_those_of_each_gradient(device, dtype):
    sizes = (0, 1, 7, 2049, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)
    grads = [with_zeros(n, dtype, device, seed) for seed, n in enumerate(sizes)]
    grads.append(torch.zeros(CHUNK + 3, dtype=dtype, device=device))
    found = tritonclip.statistics_by_name(parameters(grads))
    assert list(found) == [f"parameters[{i}]" for i in range(len(grads))]
    for one, grad in zip(found.values(), grads, strict=True):
        assert_statistics(one, [grad])


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_stay_with_their_gradient(device, dtype, value):
    grads = [with_zeros(n, dtype, device) for n in (5, CHUNK + 9)]
    grads[1][CHUNK + 2] = value
    first, second = tritonclip.statistics_by_name(parameters(grads)).values()
    assert_statistics(first, grads[:1])
    assert_statistics(second, grads[1:])


def test_dtypes_complex_sparse_and_strided_gradients_mix(device):
    real = with_zeros(40, torch.float32, device)
    grads = [
        with_zeros(36, torch.float32, device).view(9, 4).t(),
        with_zeros(40, torch.bfloat16, device, 1),
        with_zeros(15, torch.float64, device, 2),
        # Of pairs, the largest magnitude and the number of zeros are others.
        torch.complex(real, real.roll(1) * 2),
        torch.tensor(-2.0, device=device),
        torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, -4.0]], device=device).to_sparse(1),
        with_zeros(30, torch.float32, device)[::2],
    ]
    found = tritonclip.statistics_by_name(parameters(grads))
    for one, grad in zip(found.values(), grads, strict=True):
        norm, largest, zeros = expected_of([grad])
        assert one.norm.dtype == torch.float64
        assert [*map(float, one)] == pytest.approx([norm, largest, zeros], rel=1e-6)


def test_groups_have_the_statistics_of_all_their_elements(device):
    grads = [with_zeros(n, torch.float32, device, n) for n in (1, 50, 7)]
    named = list(zip(("a.x", "a.y", "b"), parameters(grads), strict=True))
    found = tritonclip.statistics_by_name(named, group_of=lambda name: name[0])
    assert_statistics(found["a"], grads[:2])
    assert_statistics(found["b"], grads[2:])


def test_no_gradient_is_all_zeros():
    model = nn.Linear(3, 2)
    model.bias.grad = torch.tensor([0.0, 2.0])
    found = tritonclip.statistics_by_name(model)
    assert [*map(float, found["weight"])] == [0.0, 0.0, 1.0]
    assert [*map(float, found["bias"])] == [2.0, 2.0, 0.5]
    model.bias.grad = None
    assert [*map(float, tritonclip.statistics_by_name(model)["bias"])] == [0.0, 0.0, 1.0]
    assert tritonclip.statistics_by_name([torch.ones(2)]) == {}


def test_a_group_counts_parameters_without_a_gradient_as_zeros():
    model = nn.Linear(3, 2)
    model.bias.grad = torch.tensor([0.0, 2.0])
    found = tritonclip.statistics_by_name(model, group_of=lambda name: "all")["all"]
    assert [*map(float, found)] == pytest.approx([2.0, 2.0, 7 / 8])


def test_the_loss_scale_divides_magnitudes(device):
    grads = [with_zeros(9, torch.float16, device)]
    scale = torch.tensor(8.0, device=device)
    (found,) = tritonclip.statistics_by_name(parameters(grads), grad_scale=scale).values()
    norm, largest, zeros = expected_of([grads[0] / 8])
    assert [*map(float, found)] == pytest.approx([norm, largest, zeros], rel=1e-3)


SHAPES = {"body.weight": (7, 5), "body.bias": (7,), "head.weight": (3,), "head.bias": ()}


def new_model(dtype=torch.float32, device="cpu"):
    """Named parameters with random gradients."""
    grads = [normal(s, dtype, device, seed) * 10**seed for seed, s in enumerate(SHAPES.values())]
    return [*zip(SHAPES, parameters(grads), strict=True)]


def by_first_name(name):
    return name.split(".")[0]


def numbers(norms):
    return {name: float(norm) for name, norm in norms.items()}


def expected_norms(named, p=2.0):
    return {name: reference.norms([one.grad], p)[0] for name, one in named}


@pytest.mark.covering(2)
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, 20.0, math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_are_those_of_each_gradient(device, dtype, p):
    named = new_model(dtype, device)
    norms = tritonclip.norms_by_name(named, norm_type=p)
    assert list(norms) == list(SHAPES)
    for name, expected in expected_norms(named, p).items():
        assert norms[name].shape == ()
        assert norms[name].device.type == device.type
        assert norms[name].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_norm(norms[name], expected)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 20.0, math.inf])
def test_group_of_measures_groups_together(device, p):
    named = new_model(device=device)
    norms = tritonclip.norms_by_name(named, group_of=by_first_name, norm_type=p)
    assert list(norms) == ["body", "head"]
    for group, norm in norms.items():
        grads = [one.grad for name, one in named if name.startswith(group)]
        assert_norm(norm, reference.total_norm(grads, p))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_groups_neither_overflow_nor_underflow(device, size):
    grads = [torch.full((3,), size, device=device) for _ in range(2)]
    named = zip(("w0", "w1"), parameters(grads), strict=True)
    (norm,) = tritonclip.norms_by_name(named, group_of=lambda name: "all").values()
    assert_norm(norm, reference.total_norm(grads, 2.0))


def test_parameters_of_one_name_are_one_group():
    named = [("group0", one) for _, one in new_model()]
    norms = tritonclip.norms_by_name(named)
    assert list(norms) == ["group0"]
    assert_norm(norms["group0"], reference.total_norm([one.grad for _, one in named], 2.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_not_finite_stay_with_their_names(device, value):
    named = new_model(device=device)
    named[0][1].grad[0, 0] = value
    norms = tritonclip.norms_by_name(named, group_of=by_first_name)
    assert not math.isfinite(norms["body"])
    assert math.isfinite(norms["head"])
    assert math.isnan(norms["body"]) == math.isnan(value)


def test_modules_and_lists_give_the_same_norms():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model(torch.ones(5, 3)).sum().backward()
    norms = numbers(tritonclip.norms_by_name(model))
    unnamed = numbers(tritonclip.norms_by_name(model.parameters()))
    assert [*unnamed] == [f"parameters[{i}]" for i in range(4)]
    assert [*unnamed.values()] == [*norms.values()]


def test_sparse_complex_and_empty_gradients_are_measured():
    rows = nn.Embedding(5, 3, sparse=True)
    rows(torch.tensor([1, 1, 2])).sum().backward()
    before = rows.weight.grad
    pairs, none = parameters([torch.tensor([3 + 4j, 12j]), torch.zeros(0)])
    norms = tritonclip.norms_by_name([("rows", rows.weight), ("pairs", pairs), ("none", none)])
    # Row 1 has the gradient 2, row 2 has 1, in three columns.
    assert_norm(norms["rows"], 15**0.5)
    assert_norm(norms["pairs"], 13.0)
    assert float(norms["none"]) == 0.0
    assert before is not None
    assert rows.weight.grad is before
    assert not before.is_coalesced()


def test_a_tied_weight_counts_under_each_of_its_names():
    """And once in a group."""
    one, other = parameters([torch.tensor([3.0, 4.0]), torch.tensor([12.0])])
    named = [("first.a", one), ("between", other), ("second.a", one), ("second.b", other)]
    assert [*numbers(tritonclip.norms_by_name(named)).values()] == [5.0, 12.0, 5.0, 12.0]
    norms = tritonclip.norms_by_name(named, group_of=by_first_name)
    assert numbers(norms) == {"first": 5.0, "between": 12.0, "second": 13.0}
    norms = tritonclip.norms_by_name(named, group_of=lambda name: "all")
    assert numbers(norms) == {"all": 13.0}


def test_names_stay_where_a_gradient_is_missing():
    named = new_model()
    named[1][1].grad = None
    norms = tritonclip.norms_by_name(named)
    assert list(norms) == list(SHAPES)
    assert float(norms["body.bias"]) == 0.0


def test_left_out_are_parameters_that_are_not_clipped_or_frozen():
    named = new_model()
    named[0][1].need_clip = False
    named[1][1].grad = None
    named[1][1].requires_grad_(False)
    assert list(tritonclip.norms_by_name(named)) == ["head.weight", "head.bias"]


def test_no_gradient_at_all_gives_zeros():
    assert [*numbers(tritonclip.norms_by_name(nn.Linear(2, 1))).values()] == [0.0, 0.0]


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0)], ids=["number", "tensor"])
def test_norms_are_divided_by_the_loss_scale(scale):
    named = new_model()
    whole = numbers(tritonclip.norms_by_name(named))
    divided = numbers(tritonclip.norms_by_name(named, grad_scale=scale))
    assert divided == {name: norm / 8 for name, norm in whole.items()}


def test_gradients_are_not_changed(device):
    named = new_model(device=device)
    with untouched(one.grad for _, one in named):
        tritonclip.norms_by_name(named)


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
