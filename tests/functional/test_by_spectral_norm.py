"""Clipping singular values, compared with an SVD in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from helpers import reference
from helpers.cases import FLOATS
from tritonclip.functional import clip_by_norm, clip_by_spectral_norm

FORMS = pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])


def spectra(n: int) -> dict[str, Tensor]:
    """Singular values that are hard to clip to 1."""
    rise = line(n, 0, 1)
    ones = torch.ones_like(rise)

    def with_top(rest: Tensor, top: float) -> Tensor:
        return torch.cat([rest[1:], torch.tensor([top], dtype=torch.float64)])

    return {
        "far below": 1e-3 * rise,
        "at the limit": ones,
        "around the limit": 1 + 1e-3 * (rise - 0.5),
        "just above": 1 + 1e-4 * rise,
        "all twice": 2 * ones,
        "ill-conditioned": 10 ** (8 * rise - 6),
        "a spike on clustered ones": with_top(ones + 1e-4 * rise, 7.9),
        "a spike on nothing": with_top(0 * ones, 5.0),
        "a spike of a million": with_top(1.2 * rise, 1e6),
        "rank deficient": torch.cat([rise[: n // 2] * 0, 3 * rise[n // 2 :]]),
    }


def line(n: int, low: float = 0.0, high: float = 3.0) -> Tensor:
    return torch.linspace(low, high, n, dtype=torch.float64)


def matrix(values: Tensor, columns: int, seed: int = 0) -> Tensor:
    """A random matrix with these singular values, in float64."""
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    u, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(columns, n, dtype=torch.float64, generator=generator))
    made: Tensor = (u * values) @ v.mT
    return made


def error(clipped: Tensor, x: Tensor, limit: float, *, soft: bool) -> float:
    """The spectral norm of what differs from an SVD's result."""
    truth = reference.spectrally_clipped(x, limit, soft=soft)
    return reference.singular_value(clipped.cpu().double() - truth)


def assert_clips(x: Tensor, limit: float, *, soft: bool, rtol: float = 2e-4) -> None:
    clipped = clip_by_spectral_norm(x, limit, soft)
    assert error(clipped, x, limit, soft=soft) <= rtol * limit


@pytest.mark.covering(2)
@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", spectra(8))
def test_clip_by_spectral_norm_is_as_right_as_it_says(device, name, dtype, soft):
    relative = 1e-4 if dtype == torch.float32 else 1e-10
    for rows, columns in ((40, 56), (8, 8)):
        for limit in (1.0, 1e-6, 1e6):
            x = limit * matrix(spectra(rows)[name], columns)
            for own in (x, x.mT):
                own = own.to(device, dtype)
                clipped = clip_by_spectral_norm(own, limit, soft)
                assert reference.singular_value(clipped) <= limit * (1 + relative)
                largest = reference.singular_value(own)
                allowed = relative * limit + relative / 10 * largest
                assert error(clipped, own, limit, soft=soft) <= allowed


@FORMS
def test_clip_by_spectral_norm_with_less_exact_products_is_within_one_percent(monkeypatch, soft):
    """As TF32 has them: operands of 11 bits."""
    real = {name: getattr(torch, name) for name in ("bmm", "baddbmm")}

    def short(x: Tensor) -> Tensor:
        return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)

    monkeypatch.setattr(torch, "bmm", lambda a, b: real["bmm"](short(a), short(b)))
    monkeypatch.setattr(
        torch, "baddbmm", lambda x, a, b, **k: real["baddbmm"](x, short(a), short(b), **k)
    )
    monkeypatch.setattr("tritonclip.backends.choose.host_decides", lambda device: False)
    for values in spectra(40).values():
        x = matrix(values, 56).float()
        clipped = clip_by_spectral_norm(x, 1.0, soft)
        assert reference.singular_value(clipped) <= 1.01
        largest = reference.singular_value(x)
        assert error(clipped, x, 1.0, soft=soft) <= 1e-2 + 1e-3 * largest


@pytest.mark.covering(2)
@FORMS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape", [(5, 7), (6, 2, 3, 3), (1, 9), (9, 1), (5,), (), (3, 0), (0, 4), (1, 1)], ids=str
)
def test_clip_by_spectral_norm_takes_each_shape(device, shape, dtype, soft):
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(device, dtype)
    clipped = clip_by_spectral_norm(x, 0.5, soft)
    assert (clipped.shape, clipped.dtype, clipped.device) == (x.shape, dtype, x.device)
    if x.numel():
        # Half a unit in the last place of each element, of less than 54 elements.
        rounding = 7 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-4
        assert error(clipped, x, 0.5, soft=soft) <= 0.5 * rounding + 1e-5 * x.double().norm()


@FORMS
def test_clip_by_spectral_norm_clips_like_shapes_together_as_alone(device, soft):
    generator = torch.Generator().manual_seed(2)
    shapes = [(4, 6), (6, 4), (4, 2, 3), (5, 5), (4, 6), (3,)]
    tree = {str(i): torch.randn(s, generator=generator).to(device) for i, s in enumerate(shapes)}
    tree["0"] = tree["0"].mT.contiguous().mT
    assert clip_by_spectral_norm([None, tree["3"].half()], 1.0, soft)[0] is None
    together = clip_by_spectral_norm(tree, 1.0, soft)
    for name, x in tree.items():
        assert error(together[name], x, 1.0, soft=soft) <= 2e-4


def test_clip_by_spectral_norm_keeps_all_bits_where_nothing_is_over(device):
    # Its 2-norm is over the limit by five times, its largest singular value just below.
    x = matrix(0.99 * torch.ones(32, dtype=torch.float64), 40).to(device, torch.float32)
    over = matrix(2 * torch.ones(32, dtype=torch.float64), 40).to(device, torch.float32)
    clipped, other = clip_by_spectral_norm([x, over], 1.0)
    assert torch.equal(clipped, x)
    assert clipped.data_ptr() != x.data_ptr()
    assert not torch.equal(other, over)
    small = 1e-5 * x
    assert torch.equal(clip_by_spectral_norm(small, 1.0, soft=True), small)
    assert torch.equal(clip_by_spectral_norm(over, math.inf), over)
    assert torch.equal(clip_by_spectral_norm(over, math.inf, soft=True), over)


@FORMS
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e37], ids="{:g}".format)
def test_clip_by_spectral_norm_neither_overflows_nor_underflows(device, scale, soft):
    assert_clips((scale * matrix(line(6, 0.1), 9)).to(device).float(), scale, soft=soft)


@FORMS
def test_clip_by_spectral_norm_takes_limits_far_below_the_largest_number(device, soft):
    x = torch.diag(torch.tensor([1e200, 1e199], dtype=torch.float64)).to(device)
    clipped = clip_by_spectral_norm(x, 1e-200, soft)
    torch.testing.assert_close(clipped.cpu() * 1e200, torch.eye(2, dtype=x.dtype))


@FORMS
def test_clip_by_spectral_norm_keeps_small_matrices_beside_huge_ones(device, soft):
    huge, small = [(x * matrix(line(6, 0.1), 9)).to(device).float() for x in (1e30, 1e-18)]
    clipped = clip_by_spectral_norm([huge, small], 1e-18, soft)[1]
    assert error(clipped, small, 1e-18, soft=soft) <= 2e-4 * 1e-18


@FORMS
@pytest.mark.parametrize("limit", [1.0, 4e38], ids="{:g}".format)
def test_clip_by_spectral_norm_takes_norms_beyond_float32(device, limit, soft):
    x = torch.tensor([[3e38, 3e38], [3e38, -3e38]], device=device)
    assert_clips(x, limit, soft=soft)


@FORMS
def test_clip_by_spectral_norm_follows_nan_and_inf_as_clip_by_norm(device, soft):
    xs = [torch.randn(3, 4, device=device) for _ in range(3)]
    xs[0][0, 0], xs[1][1, 1] = math.nan, math.inf
    xs.append(torch.tensor([math.inf, 1.0], device=device))
    clipped, scaled = clip_by_spectral_norm(xs, 1.0, soft), clip_by_norm(xs, 1.0)
    for ours, theirs in zip(clipped, scaled, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
    assert clipped[2].isfinite().all()
    assert not clip_by_spectral_norm(xs[2], 0.0, soft).any()
    assert not clip_by_spectral_norm(torch.zeros(3, 3, device=device), 1.0, soft).any()


@FORMS
def test_clip_by_spectral_norm_has_the_derivatives_of_an_svd(soft):
    # Singular values on both sides of the limit, and two that are equal.
    x = matrix(torch.tensor([0.3, 0.9, 0.9, 1.5, 4.0], dtype=torch.float64), 7)
    x.requires_grad_()

    def clip(x: Tensor) -> Tensor:
        return clip_by_spectral_norm(x, 1.0, soft)

    assert torch.autograd.gradcheck(clip, x)
    direction = torch.randn(5, 7, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    (own,) = torch.autograd.grad((clip(x) * direction).sum(), x)
    transformed = torch.func.grad(lambda x: (clip(x) * direction).sum())(x.detach())
    torch.testing.assert_close(transformed, own)
    narrow = torch.func.grad(lambda x: (clip(x) * direction.float()).sum())(x.detach().float())
    torch.testing.assert_close(narrow.double(), own, rtol=1e-4, atol=1e-4)
    (vector,) = torch.autograd.grad(clip_by_spectral_norm(x[0], 1.0, soft).sum(), x)
    assert vector.isfinite().all()


def test_clip_by_spectral_norm_does_its_products_in_full_under_autocast():
    x = matrix(line(30), 40).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clipped = clip_by_spectral_norm(x, 1.0)
    assert torch.equal(clipped, clip_by_spectral_norm(x, 1.0))


def test_clip_by_spectral_norm_breaks_the_graph_of_compile(fresh_compiler):
    x = torch.randn(4, 6)
    compiled = torch.compile(lambda x: clip_by_spectral_norm(x, 1.0) + 1, backend="eager")
    assert torch.equal(compiled(x), clip_by_spectral_norm(x, 1.0) + 1)


REFUSED: dict[str, Any] = {
    "negative": (lambda x: clip_by_spectral_norm(x, -1.0), ValueError, "c must be 0 or more"),
    "NaN": (lambda x: clip_by_spectral_norm(x, math.nan), ValueError, "c must be 0 or more"),
    "bool": (lambda x: clip_by_spectral_norm(x, True), TypeError, "c must be a number"),
    "soft": (lambda x: clip_by_spectral_norm(x, 1, "yes"), TypeError, "soft must be True or"),  # type: ignore[arg-type]
    "flags": (
        lambda x: clip_by_spectral_norm(x, 1.0, x[0]),
        TypeError,
        r"soft must be True or False, got tensor\(.* of type Tensor",
    ),
    "int64": (lambda x: clip_by_spectral_norm(x.long(), 1.0), TypeError, "dtype torch.int64"),
    "complex": (lambda x: clip_by_spectral_norm(x + 0j, 1), TypeError, "real and dense.*complex64"),
    "sparse": (lambda x: clip_by_spectral_norm(x.to_sparse(), 1), TypeError, "dense.*sparse_coo"),
    "vmap": (lambda x: torch.vmap(to_one)(x[None]), RuntimeError, r"vmap.*list\(batch\)"),
    "make_fx": (lambda x: make_fx(to_one)(x), RuntimeError, "make_fx"),
    "jit": (lambda x: torch.jit.trace(to_one, x), RuntimeError, "torch.jit.trace"),
}


def to_one(x: Tensor) -> Any:
    return clip_by_spectral_norm(x, 1.0)


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_clip_by_spectral_norm_refuses(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.randn(3, 4))
