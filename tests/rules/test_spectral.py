"""The rule of singular values, in calls and optimizers, compared with an SVD in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonclip
from helpers import reference
from helpers.cases import FLOATS, assert_bits, grad_of, normal, parameter, parameters
from tritonclip import (
    ClipByNorm,
    ClipBySpectralNorm,
    ClippedOptimizer,
    ClipState,
    FlatGradients,
    GradScaler,
    VerificationError,
)
from tritonclip.backends import singular_values

FORMS = pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
LIMIT = 2.0


def make_model(dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Any:
    """Matrices, some of like shapes, a convolution, and vectors, with gradients over the limit."""
    torch.manual_seed(0)
    linear = nn.Linear(7, 5), nn.Linear(5, 7)
    layers = (nn.Conv2d(3, 8, 3), *linear, nn.LayerNorm(9), nn.Linear(7, 1))
    model = nn.Sequential(*layers).to(device, dtype)
    fill(model)
    return model


def fill(model: nn.Module, size: float = 3.0) -> None:
    for seed, p in enumerate(model.parameters()):
        p.grad = size * normal(p.shape, p.dtype, p.device, seed)


def copies(model: nn.Module) -> list[Tensor]:
    return [grad_of(p).clone() for p in model.parameters()]


def assert_clipped(
    model: nn.Module, before: list[Tensor], limit: float = LIMIT, *, soft: bool = False
) -> None:
    for p, grad in zip(model.parameters(), before, strict=True):
        truth = reference.spectrally_clipped(grad, limit, soft=soft)
        error = reference.singular_value(grad_of(p).cpu().double() - truth)
        largest = reference.singular_value(grad)
        # Beside the accuracy of products, half a unit in the last place of each element.
        eps = torch.finfo(grad.dtype).eps
        rounding = 0.5 * eps * float(truth.norm())
        relative = 1e-10 if grad.dtype == torch.float64 else 1e-4
        assert error <= relative * limit + relative / 10 * largest + 2 * rounding


def assert_norms(norms: Tensor, before: list[Tensor]) -> None:
    """At most 1% too small."""
    truth = torch.tensor([reference.singular_value(grad) for grad in before])
    ratio = norms.cpu().double() / truth
    assert ((ratio >= 0.99) & (ratio <= 1 + 1e-5)).all()


@FORMS
@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_spectral_norm_in_place_clips_each_matrix(device, dtype, soft):
    model = make_model(dtype, device)
    grad = grad_of(model[0].weight)
    model[0].weight.grad = grad.to(memory_format=torch.channels_last)
    before = copies(model)
    norms = tritonclip.clip_(model, ClipBySpectralNorm(LIMIT, soft))
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_norms(norms, before)
    assert_clipped(model, before, soft=soft)


@FORMS
@pytest.mark.parametrize("grad_scale", [8.0, torch.tensor(8.0)], ids=["number", "tensor"])
def test_clip_by_spectral_norm_divides_by_the_loss_scale(device, grad_scale, soft):
    model = make_model(device=device)
    before = [grad / 8 for grad in copies(model)]
    norms = tritonclip.clip_(model, ClipBySpectralNorm(0.5, soft), grad_scale=grad_scale)
    assert_norms(norms, before)
    assert_clipped(model, before, 0.5, soft=soft)


@FORMS
@pytest.mark.parametrize(
    ("dtype", "grad_scale"),
    [(torch.float16, 1 / 16), (torch.bfloat16, 3.0)],
    ids=["float16 overflows", "bfloat16 rounds"],
)
def test_clip_by_spectral_norm_rounds_once_under_a_loss_scale(device, dtype, grad_scale, soft):
    tensors = [torch.diag(torch.tensor([5000.0, 10.0])), 3 * normal((64, 64), dtype, "cpu", 0)]
    tensors += [torch.full((2, 2), 2.0**-9), normal((5,), dtype, "cpu", 1)]
    grads = [x.to(device, dtype) for x in tensors]
    before = [grad.double() / grad_scale for grad in grads]
    with tritonclip.verify():
        tritonclip.clip_tensors_(grads, ClipBySpectralNorm(0.5, soft), grad_scale=grad_scale)
    for grad, wide in zip(grads, before, strict=True):
        truth = reference.spectrally_clipped(wide, 0.5, soft=soft).to(device)
        # Where products are not exact, some elements fall to the other side of a tie.
        assert (grad != truth.to(dtype)).double().mean() <= 0.02


def test_clip_by_spectral_norm_keeps_all_bits_below_the_limit(device, backend):
    model = make_model(device=device)
    # Over it is the 2-norm of the convolution, and no singular value.
    limit = 1.15 * max(reference.singular_value(grad) for grad in copies(model))
    assert max(reference.norms(copies(model))) > limit
    before, versions = copies(model), [grad_of(p)._version for p in model.parameters()]
    tritonclip.clip_(model, ClipBySpectralNorm(limit))
    assert_bits(map(grad_of, model.parameters()), before)
    if backend.host_decides:
        assert sum(grad_of(p)._version for p in model.parameters()) == sum(versions)
    tritonclip.clip_(model, ClipBySpectralNorm(math.inf))
    assert_bits(map(grad_of, model.parameters()), before)
    tritonclip.clip_(model, ClipBySpectralNorm(0.0))
    assert not any(grad_of(p).any() for p in model.parameters())


def test_clip_by_spectral_norm_finds_norms_of_separate_blocks(device):
    """The block with the largest elements is not the one with the largest singular value."""
    grad = torch.zeros(101, 101, device=device)
    grad[0, 0], grad[1:, 1:] = 5.0, 0.1
    weight = parameter(grad.clone())
    assert_norms(tritonclip.clip_(weight, ClipBySpectralNorm(6.0)), [grad])
    assert_clipped(nn.ParameterList([weight]), [grad], 6.0)


@pytest.mark.parametrize("flat", [False, True], ids=["loose", "flat"])
def test_clip_by_spectral_norm_leaves_what_is_excluded(device, flat):
    model = make_model(device=device)
    before = copies(model)
    rule = ClipBySpectralNorm(LIMIT, exclude=model[1])
    buffers = FlatGradients(model) if flat else None
    norms = tritonclip.clip_(buffers or model, rule)
    assert_norms(norms, before)
    assert_bits(copies(model[1]), before[2:4])
    assert_clipped(model[:1], before[:2])
    assert_clipped(model[2:], before[4:])
    with pytest.raises(ValueError, match="none of which is among"):
        tritonclip.clip_(copy.deepcopy(model), rule)


@pytest.mark.parametrize("policy", ["propagate", "zero", "error"])
def test_clip_by_spectral_norm_treats_nan_and_inf_by_policy(device, policy):
    model = make_model(device=device)
    grad_of(model[0].weight)[0, 0, 0, 0] = math.inf
    grad_of(model[2].weight)[0, 0] = math.nan
    before = copies(model)
    if policy == "error":
        with pytest.raises(RuntimeError, match=r"singular values of 0\.weight, 2\.weight are non"):
            tritonclip.clip_(model, ClipBySpectralNorm(LIMIT), nonfinite=policy)
        assert_bits(map(grad_of, model.parameters()), before)
        return
    norms = tritonclip.clip_(model, ClipBySpectralNorm(LIMIT), nonfinite=policy)
    assert norms[0] == math.inf
    assert norms[4].isnan()
    if policy == "zero":
        assert not any(grad_of(p).any() for p in model.parameters())
        return
    for p, grad in zip(model.parameters(), before, strict=True):
        p.grad, ours = grad, grad_of(p)
        if not grad.isfinite().all():
            tritonclip.clip_(p, ClipByNorm(LIMIT))
            assert torch.equal(ours.isnan(), grad_of(p).isnan())
        else:
            assert reference.singular_value(ours) <= LIMIT * (1 + 1e-4)


def test_clip_by_spectral_norm_takes_missing_and_odd_gradients(device):
    wide = torch.zeros(4, 8, device=device)
    wide[:, ::2] = 3.0
    grads = [torch.zeros(3, 0, device=device), torch.tensor(3.0, device=device), wide[:, ::2], None]
    norms = tritonclip.clip_(parameters(grads), ClipBySpectralNorm(LIMIT))
    torch.testing.assert_close(norms.cpu(), torch.tensor([0.0, 3.0, 12.0]))
    torch.testing.assert_close(wide[:, ::2].cpu(), torch.full((4, 4), 0.5), rtol=1e-4, atol=0)
    assert not wide[:, 1::2].any()
    assert tritonclip.clip_([], ClipBySpectralNorm(1.0)).shape == (0,)


@FORMS
@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_spectral_norm_passes_verification(device, dtype, soft):
    with tritonclip.verify():
        for scale in (1.0, 4.0):
            for size in (3.0, 0.01):
                model = make_model(dtype, device)
                fill(model, size)
                rule = ClipBySpectralNorm(LIMIT, soft, exclude=model[1])
                tritonclip.clip_(model, rule, grad_scale=scale)


@FORMS
def test_clip_by_spectral_norm_of_singular_values_beyond_float32_passes_verification(device, soft):
    grad = torch.tensor([[3e38, 3e38], [3e38, -3e38]], device=device)
    truth = reference.spectrally_clipped(grad, 1.0, soft=soft)
    with tritonclip.verify():
        tritonclip.clip_tensors_([grad], ClipBySpectralNorm(1.0, soft))
    torch.testing.assert_close(grad.cpu().double(), truth, rtol=1e-4, atol=0)


@pytest.mark.parametrize("broken", ["clipped", "extremes"])
def test_verification_notices_wrong_singular_values(monkeypatch, broken):
    real = getattr(singular_values, broken)

    def wrong(*args: Any, **options: Any) -> Any:
        if broken == "extremes":
            return tuple(0.9 * bound for bound in real(*args, **options))
        return ((i, 1.01 * x) for i, x in real(*args, **options))

    monkeypatch.setattr(singular_values, broken, wrong)
    with tritonclip.verify(), pytest.raises(VerificationError):
        tritonclip.clip_(make_model(), ClipBySpectralNorm(LIMIT))


def test_clip_by_spectral_norm_follows_a_schedule():
    model, state = make_model(), ClipState()
    for step in range(2):
        fill(model)
        before = copies(model)
        tritonclip.clip_(model, ClipBySpectralNorm(lambda step: 1.0 + step), state=state)
        assert_clipped(model, before, 1.0 + step)
    with pytest.raises(ValueError, match="state"):
        tritonclip.clip_(model, ClipBySpectralNorm(lambda step: 1.0))


@FORMS
def test_clip_by_spectral_norm_compiles_to_one_graph(fresh_compiler, soft):
    models = [make_model(), make_model()]
    rules = [ClipBySpectralNorm(LIMIT, soft, exclude=model[1]) for model in models]

    @torch.compile(backend="eager", fullgraph=True)
    def clip(model: nn.Module) -> Tensor:
        return tritonclip.clip_(model, rules[0])

    norms = clip(models[0])
    assert torch.equal(norms, tritonclip.clip_(models[1], rules[1]))
    assert_bits(copies(models[0]), copies(models[1]))


@pytest.mark.parametrize("flat", [False, True], ids=["loose", "flat"])
def test_step_clips_singular_values(flat):
    model = make_model()
    buffers = FlatGradients(model) if flat else None
    rule = ClipBySpectralNorm(LIMIT, exclude=model[4])
    optimizer = ClippedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), rule, flat=buffers, skip_above=1e9
    )
    before = copies(model)
    optimizer.step()
    assert_clipped(model[:4], before[:8])
    assert_bits(copies(model[4]), before[8:])
    summary = optimizer.stats.summary()
    largest = max(reference.singular_value(grad) for grad in before)
    assert summary["norm"] == pytest.approx(largest, rel=0.01)
    assert summary["coefficient"] == pytest.approx(LIMIT / largest, rel=0.01)


def test_step_compares_the_norm_of_all_with_skip_above():
    model = make_model()
    whole = reference.total_norm(copies(model))
    singular = math.hypot(*(reference.singular_value(grad) for grad in copies(model)))
    optimizer = ClippedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        ClipBySpectralNorm(LIMIT),
        skip_above=(whole + singular) / 2,
    )
    optimizer.step()
    assert optimizer.stats.summary()["skipped_steps"] == 1


def test_parameter_group_clips_singular_values_under_a_scaler():
    model = make_model()
    groups: list[dict[str, Any]] = [
        {"params": model[:2].parameters(), "clip": ClipBySpectralNorm(LIMIT, soft=True)},
        {"params": model[2:].parameters(), "clip": None},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.0), 1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    before = [grad / 4 for grad in copies(model)]
    scaler.step(optimizer)
    assert_clipped(model[:2], before[:4], soft=True)
    torch.testing.assert_close(copies(model[2:]), before[4:])


def test_rule_of_singular_values_is_a_frozen_value():
    model = make_model()
    rule = ClipBySpectralNorm(1, exclude=model[1])
    assert repr(rule) == "ClipBySpectralNorm(max_norm=1.0, soft=False, exclude=<2 parameters>)"
    assert rule == ClipBySpectralNorm(1.0, False, [model[1].weight, model[1].bias])
    twin, moved = copy.deepcopy((model, rule))
    assert moved == ClipBySpectralNorm(1.0, exclude=twin[1])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((-1.0,), ValueError, "max_norm must be 0 or more"),
        ((math.nan,), ValueError, "max_norm must be 0 or more"),
        (("1",), TypeError, "max_norm must be a number"),
        ((1.0, "soft"), TypeError, "soft must be True or False"),
        ((1.0, False, "head"), TypeError, "write exclude=model.head"),
        ((), TypeError, r"write ClipBySpectralNorm\(1.0\)"),
    ],
    ids=str,
)
def test_rule_of_singular_values_refuses(arguments, kind, message):
    with pytest.raises(kind, match=message):
        ClipBySpectralNorm(*arguments)


@pytest.mark.parametrize(
    "spoil", [lambda g: g + 0j, lambda g: g.to_sparse()], ids=["complex", "sparse"]
)
def test_clip_by_spectral_norm_refuses_other_matrices(spoil):
    grad = spoil(torch.randn(3, 4))
    weights = parameters([torch.ones(3, 4), torch.zeros(3, 4, dtype=grad.dtype)])
    weights[1].grad = grad
    with pytest.raises(TypeError, match=r"gradients of parameters\[1\] are complex or sparse"):
        tritonclip.clip_(weights, ClipBySpectralNorm(1.0))
    assert torch.equal(grad_of(weights[0]), torch.ones(3, 4))


def test_clip_tensors_clips_singular_values_and_excludes_nothing(device):
    model = make_model(device=device)
    before = copies(model)
    norms = tritonclip.clip_tensors_(map(grad_of, model.parameters()), ClipBySpectralNorm(LIMIT))
    assert_norms(norms, before)
    assert_clipped(model, before)
    with pytest.raises(TypeError, match="a rule without exclude"):
        tritonclip.clip_tensors_([torch.ones(2, 2)], ClipBySpectralNorm(LIMIT, exclude=model[1]))


@pytest.mark.parametrize("scale", [1.0, 0.125, 8.0])
def test_matrix_whose_bound_alone_is_over_the_limit_keeps_every_bit(scale):
    """The bound of 64 equal singular values is 14% over them until it is looked at twice."""
    right = 0.95 * torch.linalg.qr(normal((64, 64), torch.float64)).Q.float()
    grad = scale * right
    tritonclip.clip_(parameter(grad), ClipBySpectralNorm(1.0), grad_scale=scale)
    assert_bits([grad], [right])


def test_matrix_of_zeros_has_the_norm_zero(device):
    grad = torch.zeros(3, 4, device=device)
    assert tritonclip.clip_(parameter(grad), ClipBySpectralNorm(1.0)).tolist() == [0.0]
    assert not grad.any()


@pytest.mark.parametrize("size", [1.01, 1.1, 1.2])
def test_verify_accepts_a_matrix_of_rank_one_over_the_limit(size):
    """Its 2-norm is its singular value: no other norm says whether it is to be written."""
    grad = normal((30, 1)) @ normal((1, 40), seed=1)
    grad *= size / grad.norm()
    with tritonclip.verify():
        tritonclip.clip_(parameter(grad), ClipBySpectralNorm(1.0))
    assert float(grad.norm()) == pytest.approx(1.0, rel=1e-5)
