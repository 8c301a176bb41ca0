"""`accumulate_`: the gradient of each micro-batch is clipped before it is added to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers import reference
from helpers.cases import (
    FLOATS,
    INTERPRETED,
    assert_bits,
    assert_norm,
    copies,
    grad_of,
    normal,
    unchanged,
)
from helpers.graphs import NEEDS_DYNAMO
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClippedOptimizer, accumulate_
from tritonclip.accumulation import MicroBatch

SHAPES = ((7,), (0,), (3, 5), (2049,), ())
LARGE = (2 * 16_384 + 5,) if INTERPRETED else (300_000,)


def weights(
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
) -> list[Any]:
    return [torch.zeros(tuple(s), dtype=dtype, device=device, requires_grad=True) for s in shapes]


def micro_gradients(params: Sequence[Tensor], step: int, size: float = 1.0) -> list[Tensor]:
    """One gradient for each parameter, another one at every step."""
    return [
        normal(p.shape, p.dtype, p.device, seed=100 * step + i) * size for i, p in enumerate(params)
    ]


def micro_batches(params: Sequence[Tensor], n: int = 2) -> list[list[Tensor]]:
    return [micro_gradients(params, step) for step in range(n)]


def norm_of(micro_batch: MicroBatch) -> Tensor:
    assert micro_batch.norm is not None
    return micro_batch.norm


def backward(params: Sequence[Tensor], grads: Sequence[Tensor | None], scale: float = 1.0) -> None:
    """Leaves these gradients, where there are any, times a loss scale."""
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    torch.autograd.backward([p for p, _ in pairs], [g * scale for _, g in pairs])


def clipped_by_hand(grads: Sequence[Tensor | None], limit: float, p: float = 2.0) -> list[Any]:
    """In float64, with eps=1e-6."""
    norm = reference.total_norm([g for g in grads if g is not None], p)
    factor = min(1.0, limit / (norm + 1e-6))
    wide = [
        None if g is None else g.to(torch.complex128 if g.is_complex() else torch.float64)
        for g in grads
    ]
    return [None if g is None else g * factor for g in wide]


def accumulated(
    params: Sequence[Tensor], steps: Any, p: float = 2.0, given: Any = None
) -> list[Any]:
    """Adds up the gradients of micro-batches; what each of them adds, by hand."""
    parts = []
    for grads in steps:
        rule = ClipByGlobalNorm(0.5, p)
        with accumulate_(params if given is None else given, rule) as micro_batch:
            backward(params, grads)
        there = [grad for grad in grads if grad is not None]
        assert_norm(norm_of(micro_batch), reference.total_norm(there, p))
        parts.append(clipped_by_hand(grads, 0.5, p))
    return parts


def assert_sums(params: Sequence[Tensor], parts: Sequence[Sequence[Tensor | None]]) -> None:
    """`.grad` is the sum of the parts, rounded once for each."""
    for i, param in enumerate(params):
        own = [one for part in parts if (one := part[i]) is not None]
        if not own:
            assert param.grad is None
            continue
        grad = grad_of(param)
        assert grad.dtype == param.dtype
        found = grad.to_dense() if grad.is_sparse else grad
        largest = torch.stack([part.abs() for part in own]).sum(0)
        error = (found.to(own[0].dtype) - torch.stack(own).sum(0)).abs()
        info, n = torch.finfo(param.dtype), len(own)
        allowed = largest * (2e-6 + n * info.eps) + n * info.smallest_normal * info.eps
        assert bool((error <= allowed).all())


@pytest.mark.parametrize("dtype", [*FLOATS, pytest.param(torch.complex64, id="complex64")])
def test_accumulate_sums_clipped_gradients(device, dtype):
    params, parts = weights(dtype=dtype, device=device), []
    for step, size in enumerate((1.0, 1e-3, 30.0)):
        parts += accumulated(params, [micro_gradients(params, step, size)])
        assert_sums(params, parts)


@pytest.mark.parametrize("norm_type", [1.0, torch.inf, 3.0])
def test_accumulate_clips_by_other_norms(device, norm_type):
    params = weights(device=device)
    assert_sums(params, accumulated(params, micro_batches(params), norm_type))


def test_accumulate_adds_large_and_misaligned_gradients(device):
    """More than a chunk; in the sum and in the gradient, other elements of a vector come first."""
    params = weights((LARGE, (16_384,), (37,)), device=device)
    for param in params:
        param.grad = torch.zeros(param.numel() + 3, device=device)[3:]
    assert_sums(params, accumulated(params, micro_batches(params, 1)))


def test_accumulate_adds_gradients_within_the_limit_bit_for_bit(device):
    params = weights(device=device)
    first, second = micro_batches(params)
    for grads in (first, second):
        with accumulate_(params, 1e6):
            backward(params, grads)
    assert_bits(map(grad_of, params), map(torch.add, first, second))


def test_accumulate_mixes_dtypes(device):
    params = [*weights(device=device), *weights(((40,),), torch.bfloat16, device)]
    assert_sums(params, accumulated(params, micro_batches(params)))


def test_accumulate_adds_to_sums_of_other_strides(device):
    params = weights(((4, 6), (2, 3, 4, 5)), device=device)
    params[0].grad = torch.zeros(6, 4, device=device).t()
    params[1].grad = torch.zeros(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    assert_sums(params, accumulated(params, micro_batches(params, 1)))


def test_accumulate_adds_to_lazily_negated_and_conjugated_sums(device):
    params = weights(((3,), (3,), (3,)), device=device)
    params.append(torch.zeros(3, dtype=torch.complex64, device=device, requires_grad=True))
    halves = normal((3,), torch.complex64, device)
    params[0].grad = torch._neg_view(normal((3,), device=device))
    params[1].grad = halves.clone().conj().imag
    params[3].grad = halves.clone().conj()
    before = [None if p.grad is None else p.grad.clone() for p in params]
    parts = accumulated(params, micro_batches(params, 1))
    assert grad_of(params[0]).is_neg()
    assert_sums(params, [before, *parts])


def test_accumulate_adds_channels_last_gradients(device):
    """Dense in another order of dimensions, in which kernels and loops read both."""
    params, parts = weights(((2, 3, 4, 5),), device=device), []
    for step in range(2):
        grads = micro_gradients(params, step)
        with accumulate_(params, 0.5):
            params[0].grad = grads[0].to(memory_format=torch.channels_last)
        parts.append(clipped_by_hand(grads, 0.5))
    assert_sums(params, parts)


def test_accumulate_takes_gradients_that_some_micro_batches_lack(device):
    params = weights(((5,), (3,), (4,), (2,)), device=device)
    steps = [
        [grad if i in there else None for i, grad in enumerate(micro_gradients(params, step))]
        for step, there in enumerate(((0, 1), (0, 2), (1,), (0, 1, 2)))
    ]
    assert_sums(params, accumulated(params, steps))


def test_accumulate_adds_sparse_gradients(device):
    """Some of whose rows are met twice, and a dense one after them."""
    embedding = torch.nn.Embedding(6, 3, sparse=True, device=device)
    parts = []
    for rows in ([0, 1, 1], [4, 1], None):
        whole = torch.ones(6, 3, device=device)
        used: Tensor = embedding.weight
        if rows is not None:
            used = embedding(torch.tensor(rows, device=device))
            whole = torch.tensor([[rows.count(i)] * 3 for i in range(6)], device=device).float()
        with accumulate_(embedding, 0.5):
            used.sum().backward()
        parts.append(clipped_by_hand([whole], 0.5))
        assert_sums([embedding.weight], parts)


def test_accumulate_leaves_out_what_is_not_to_be_clipped(device):
    params = weights(((5,), (3,)), device=device)
    params[1].need_clip = False
    parts = []
    for grads in micro_batches(params):
        with accumulate_([*params, params[0]], 0.5) as micro_batch:
            backward(params, grads)
        parts.append([*clipped_by_hand(grads[:1], 0.5), grads[1].double()])
        assert_norm(norm_of(micro_batch), reference.total_norm(grads[:1]))
    assert_sums(params, parts)


@pytest.mark.parametrize("in_tensor", [False, True])
def test_accumulate_keeps_the_loss_scale(device, in_tensor):
    """A loss divided by n has the factor 1 / n: `.grad` is the mean of clipped gradients."""
    params, parts = weights(device=device), []
    scale = torch.tensor(0.25, device=device) if in_tensor else 0.25
    for step in range(3):
        grads = micro_gradients(params, step)
        with accumulate_(params, 0.5, grad_scale=scale) as micro_batch:
            backward(params, grads, 0.25)
        parts.append([part / 4 for part in clipped_by_hand(grads, 0.5)])
        assert_norm(norm_of(micro_batch), reference.total_norm(grads))
    assert_sums(params, parts)


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, tritonclip.GradScaler])
def test_accumulate_under_a_grad_scaler(scaler_type):
    """A micro-batch that overflows makes the scaler skip the step and lower the scale."""
    params = weights()
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = scaler_type("cpu", init_scale=1024.0)
    for step, overflows in enumerate((False, True, False)):
        parts, before = [], copies(params)
        optimizer.zero_grad()
        for micro in range(2):
            grads = micro_gradients(params, 10 * step + micro)
            if overflows and micro == 0:
                grads[0][3] = torch.inf
            with accumulate_(params, 0.5, grad_scale=scaler.get_scale()):
                loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
                scaler.scale(loss).backward()
            parts.append(clipped_by_hand(grads, 0.5))
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert_bits(params, before)
            continue
        for param, old, *own in zip(params, before, *parts, strict=True):
            expected = old.double() - torch.stack(own).sum(0)
            torch.testing.assert_close(param.double(), expected, rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 1])
def test_accumulate_with_zero_leaves_a_nonfinite_micro_batch_out(device, bad, at):
    params, parts = weights(((5,), (3,)), device=device), []
    for step in range(2):
        grads = micro_gradients(params, step)
        if step == at:
            grads[1][1] = bad
        with accumulate_(params, 0.5, nonfinite="zero") as micro_batch:
            backward(params, grads)
        finite = step != at
        assert bool(norm_of(micro_batch).isfinite()) == finite
        parts.append(clipped_by_hand(grads, 0.5) if finite else [g.double() * 0 for g in params])
    assert_sums(params, [[part.detach() for part in own] for own in parts])


def test_accumulate_propagates_nan(device):
    params = weights(((5,), (3,)), device=device)
    for bad in (1.0, torch.nan):
        grads = micro_gradients(params, 0)
        grads[1][1] *= bad
        with accumulate_(params, 0.5):
            backward(params, grads)
    assert all(bool(p.grad.isnan().all()) for p in params)


@pytest.mark.parametrize("named", [True, False])
def test_accumulate_with_error_names_the_gradients_and_adds_nothing(device, named):
    module: Any = torch.nn.Linear(3, 2, device=device)
    module.weight.need_clip = False
    given = module if named else list(module.parameters())
    with accumulate_(given, 0.5, nonfinite="error"):
        module(torch.ones(1, 3, device=device)).sum().backward()
    before = module.bias.grad
    name = "bias" if named else r"parameters\[1\]"
    with (
        unchanged([before]),
        pytest.raises(RuntimeError, match=rf"Non-finite gradients: {name}$"),
        accumulate_(given, 0.5, nonfinite="error"),
    ):
        (module.bias.sum() * torch.nan).backward()
    assert module.bias.grad is before


def fail_after(micro_batch: Any, params: Any, grads: Any) -> None:
    """An exception in a block, after its backward."""

    def fail() -> None:
        backward(params, grads)
        raise KeyError

    with pytest.raises(KeyError), micro_batch:
        fail()


def test_accumulate_after_an_exception_is_as_before():
    params = weights()
    (grads,) = micro_batches(params, 1)
    parts = accumulated(params, [grads])
    sums = [p.grad for p in params]
    micro_batch = accumulate_(params, 0.5)
    with unchanged(sums):
        fail_after(micro_batch, params, grads)
    assert all(p.grad is own for p, own in zip(params, sums, strict=True))
    # The block can be entered again.
    with micro_batch:
        backward(params, grads)
    assert_sums(params, parts * 2)


def test_accumulate_of_a_block_without_backward_raises():
    params = weights()
    nothing = pytest.raises(RuntimeError, match="left no gradient in any of 5 parameters")
    with nothing, accumulate_(params, 0.5):
        pass
    assert all(p.grad is None for p in params)


def test_accumulate_refuses_a_block_within_itself():
    micro_batch = accumulate_(weights(), 0.5)
    with pytest.raises(RuntimeError, match="entered already"), micro_batch, micro_batch:
        pass


def test_accumulate_refuses_gradients_written_over_the_sum():
    """As gradient_as_bucket_view=True leaves them, where each backward is reduced."""
    params = weights(((5,),))
    bucket = torch.ones(5)
    params[0].grad = bucket.view(5)
    refused = pytest.raises(ValueError, match="has the memory of another one, or of the sum")
    with refused, accumulate_(params, 0.5):
        params[0].grad = bucket.view(5)


@pytest.mark.parametrize("clip", [ClipByNorm(1.0), ClipByGlobalNorm(lambda step: 1.0), None, -1.0])
def test_accumulate_refuses_other_rules(clip):
    with pytest.raises((TypeError, ValueError), match=r"accumulate_ clips|max_norm|clip must"):
        accumulate_(weights(), clip)


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"grad_scale": 0.0}])
def test_accumulate_refuses_wrong_options(options):
    with pytest.raises(ValueError, match=r"nonfinite must be|grad_scale must be"):
        accumulate_(weights(), 0.5, **options)


def test_accumulate_before_a_wrapper_and_flat_gradients():
    model = torch.nn.Linear(3, 2)
    flat = tritonclip.FlatGradients(model)
    optimizer = ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 0.01, flat=flat)
    params = list(model.parameters())
    parts = accumulated(params, micro_batches(params), given=model)
    assert_sums(params, parts)
    optimizer.step()
    sums = [torch.stack(own).sum(0) for own in zip(*parts, strict=True)]
    assert_norm(optimizer.stats.last_norm, reference.total_norm(sums))


def test_accumulate_counts_versions_of_sums(device):
    params = weights(((5,),), device=device)
    params[0].grad = torch.zeros(5, device=device)
    before = params[0].grad._version
    with accumulate_(params, 0.5):
        backward(params, micro_gradients(params, 0))
    assert params[0].grad._version > before


def test_accumulate_is_verified(device):
    params = weights(device=device)
    with tritonclip.verify():
        for grads in micro_batches(params, 3):
            with accumulate_(params, 0.5, grad_scale=8.0):
                backward(params, grads, 8.0)


@NEEDS_DYNAMO
@pytest.mark.plain_empty
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_accumulate_in_a_compiled_step():
    """The graph breaks around the block, and nothing of the library is traced."""
    model = torch.nn.Linear(3, 2)

    def step(batch):
        with accumulate_(model, 0.5) as micro_batch:
            model(batch).square().sum().backward()
        return micro_batch.norm

    compiled, parts = torch.compile(step, backend="aot_eager"), []
    for factor in (1.0, 2.0):
        batch = torch.full((4, 3), factor)
        grads = torch.autograd.grad(model(batch).square().sum(), list(model.parameters()))
        assert_norm(compiled(batch), reference.total_norm(grads))
        parts.append(clipped_by_hand(grads, 0.5))
    assert_sums(list(model.parameters()), parts)


def test_accumulate_without_a_block_warns_that_nothing_is_clipped():
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.warns(tritonclip.ClippingWarning, match="without a block, and clips nothing"):
        tritonclip.accumulate_([weight], 1.0)


def inference_zeros() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize("need_clip", [True, False])
@pytest.mark.parametrize(
    ("own", "fault"),
    [
        pytest.param(torch.zeros(()).expand(3), "elements that share memory", id="overlap"),
        pytest.param(inference_zeros(), "inference mode", id="inference"),
        pytest.param(torch.zeros(3, requires_grad=True), "requires a gradient", id="leaf"),
    ],
)
def test_accumulate_refuses_sums_that_cannot_be_written(own, fault, need_clip):
    params = weights(((3,), (3,)))
    params[1].need_clip = need_clip
    params[0].grad, params[1].grad = torch.zeros(3), own
    for _ in range(2):
        refused = pytest.raises(ValueError, match=rf"\.grad of parameters\[1\] .*{fault}")
        with refused, accumulate_(params, 0.5):
            backward(params, micro_gradients(params, 0))
        assert params[1].grad is own
        assert_bits([p.grad.detach() for p in params], [torch.zeros(3)] * 2)


def test_accumulate_refuses_a_sum_of_two_parameters():
    params = weights(((3,), (3,)))
    params[0].grad = params[1].grad = torch.ones(3)
    refused = pytest.raises(ValueError, match=r"parameters\[0\] and parameters\[1\] have one")
    with refused, accumulate_(params, 0.5):
        backward(params, micro_gradients(params, 0))
    assert params[0].grad is params[1].grad
    assert_bits([params[0].grad], [torch.ones(3)])


def test_accumulate_after_an_exception_restores_what_is_not_to_be_clipped(device):
    params = weights(((3,), (3,), (2,)), device=device)
    params[1].need_clip = params[2].need_clip = False
    grads = micro_gradients(params, 0)
    with accumulate_(params, 0.5):
        backward(params, grads)
    kept = copies([p.grad for p in params])
    fail_after(accumulate_(params, 0.5), params, grads)
    assert_bits([p.grad for p in params], kept)
    with accumulate_(params, 0.5):
        backward(params, [*grads[:2], None])
    assert_bits([params[1].grad, params[2].grad], [2 * grads[1], grads[2]])


def test_accumulate_refuses_a_block_within_another_one_on_its_parameters():
    params, others = weights(((3,), (2,))), weights(((2,),))

    def nested() -> None:
        with accumulate_(others, 0.5):
            backward(others, micro_gradients(others, 0))
        accumulate_(params[1:], 0.5).__enter__()

    with pytest.raises(RuntimeError, match="within another one"), accumulate_(params, 0.5):
        nested()
    assert others[0].grad is not None
    assert all(p.grad is None for p in params)
    assert_sums(params, accumulated(params, micro_batches(params, 1)))


@pytest.mark.parametrize("marked", [False, True])
def test_accumulate_refuses_a_list_without_parameters_to_clip(marked):
    params = weights(((3,),)) if marked else []
    for param in params:
        param.need_clip = False
    with pytest.raises(ValueError, match="accumulate_ got no parameter to clip"):
        accumulate_(params, 0.5)


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
def test_a_step_within_a_block_is_refused_and_changes_nothing(wrapped):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    stepped = tritonclip.ClippedOptimizer(optimizer, 1.0) if wrapped else optimizer
    weight.grad = torch.tensor([0.25, 0.5])

    def step_within():
        with tritonclip.accumulate_([weight], 0.5):
            (3 * weight).sum().backward()
            stepped.step()

    refused = pytest.raises(RuntimeError, match=r"expected optimizer.step\(\) after the block")
    with unchanged([weight, weight.grad]), refused:
        step_within()
    assert torch.equal(grad_of(weight), torch.tensor([0.25, 0.5]))
    stepped.step()
    assert not torch.equal(weight, torch.tensor([1.0, 2.0]))


def test_other_optimizers_step_within_a_block():
    weight, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    other.grad = torch.ones(1)
    with tritonclip.accumulate_([weight], 1.0):
        (2 * weight).sum().backward()
        torch.optim.SGD([other], lr=0.5).step()
    assert other.item() == 0.5
    assert grad_of(weight).item() == pytest.approx(1.0, rel=1e-6)
