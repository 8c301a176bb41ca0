"""clip_per_example: each example by its norm, one sum over the batch, norms [B]."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.func import functional_call, grad, vmap

import tritonclip
from bench.timing import extra_bytes
from helpers import reference
from helpers.cases import FLOATS, INTERPRETED, assert_bits, assert_norm, normal, untouched
from helpers.clips import CHOICES, MAGNITUDES
from tritonclip.engine import units
from tritonclip.functional import clip_per_example

DTYPES = (*MAGNITUDES, torch.complex64, torch.complex64)
SHAPES = ((3, 5), (7,), (), (2, 3, 2, 2), (0,))


def batch_of(n: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> dict[str, Any]:
    """Gradients of n examples whose norms differ by four orders of magnitude."""
    sizes = torch.logspace(-2, 2, max(n, 1), dtype=torch.float64)[:n]
    made: dict[str, Any] = {"none": None}
    for i, shape in enumerate(SHAPES):
        values = normal((n, *shape), torch.float64, seed=i) * sizes.view(n, *(1,) * len(shape))
        made[str(i)] = values.to(dtype).to(device)
    return made


def tensors_of(tree: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in tree.items() if x is not None}


def expected_of(
    tree: dict[str, Any],
    max_norm: float,
    *,
    per_layer: bool = False,
    normalize: bool = False,
    zero: bool = False,
) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
    """Sums and norms in float64, an example at a time."""
    tensors = tensors_of(tree)
    n = len(next(iter(tensors.values())))
    sums = {name: torch.zeros(x.shape[1:], dtype=torch.float64) for name, x in tensors.items()}
    norms: dict[str, list[float]] = {name: [] for name in tensors}
    for i in range(n):
        whole = reference.total_norm([x[i] for x in tensors.values()])
        for name, x in tensors.items():
            norm = reference.norm(x[i]) if per_layer else whole
            by = max_norm / (norm + 0.01 if normalize else norm or math.inf)
            by = by if normalize or by < 1 or math.isnan(by) or not norm else 1.0
            if math.isfinite(norm) or not zero:
                sums[name] += x[i].double().cpu() * by
            norms[name].append(norm)
    return sums, norms


def assert_sums(actual: dict[str, Any], tree: dict[str, Any], sums: dict[str, Tensor]) -> None:
    """Sums of n examples whose norm is at most 2, rounded once to the result's dtype.

    A coefficient has the error of its norm, 1e-6 unless all are float64; n products and sums are
    rounded.
    """
    assert list(actual) == list(tree)
    is_double = all(x.dtype == torch.float64 for x in tensors_of(tree).values())
    for name, x in tree.items():
        if x is None:
            assert actual[name] is None
            continue
        ours = actual[name]
        assert ours.shape == x.shape[1:]
        assert ours.device == x.device
        assert ours.dtype == x.dtype
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        error = (len(x) + 4) * torch.finfo(wide).eps + (0.0 if is_double else 1e-6)
        allowed = 2 * len(x) * error + sums[name].abs() * torch.finfo(ours.dtype).eps / 2
        allowed += torch.finfo(ours.dtype).smallest_normal
        found = ours.double().cpu()
        assert torch.equal(found.isnan(), sums[name].isnan())
        assert not bool(((found - sums[name]).abs() > allowed).any())


ORDERS = {
    "pages": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "innermost": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "gaps-between-rows": lambda x: torch.cat([x, x + 1], 1)[:, : x.shape[1]],
    "gaps-between-elements": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "expanded-inside": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided(x.shape, (1, 1, 2)),
}


def random_batch(choice: random.Random, device: torch.device) -> dict[str, Any]:
    """Gradients of examples, in any order of memory, some huge or tiny, or with NaN or inf."""
    n = choice.choice([0, 1, 4] if INTERPRETED else [0, 1, 2, 9, 33])
    dtype, seed = choice.choice(DTYPES), choice.randrange(10**6)
    is_mixed, is_extreme, is_bad = (choice.random() < 0.3 for _ in range(3))
    drawn = random.Random(seed)
    sizes = torch.tensor([10 ** drawn.uniform(-2, 2) for _ in range(n)], dtype=torch.float64)
    made: dict[str, Any] = {"none": None}
    for i in range(choice.choice([1, 2, 5])):
        own = drawn.choice(DTYPES) if is_mixed else dtype
        shape = drawn.choice([*SHAPES, *[(6, 5)] * 5, (16385,)])
        x = normal((n, *shape), own, seed=seed + i)
        x *= sizes.view(n, *(1,) * len(shape))
        if is_extreme:
            x[drawn.choice([slice(None), slice(0, 1)])] *= drawn.choice(MAGNITUDES[own.to_real()])
        if is_bad and x.numel():
            x.view(n, -1)[drawn.randrange(n), -1] = drawn.choice([math.nan, math.inf])
        orders = [*ORDERS.values()] if len(shape) == 2 else [lambda x: x]
        x = drawn.choice(orders)(x.to(device))
        if drawn.random() < 0.2:
            x = x.conj() if x.is_complex() else torch._neg_view(x)
        made[str(i)] = x
    return made


def in_pairs(tree: dict[str, Any]) -> dict[str, Any]:
    """With complex tensors as pairs of real numbers."""
    pairs = {
        name: torch.view_as_real(x.resolve_conj())
        for name, x in tree.items()
        if x is not None and x.is_complex()
    }
    return {**tree, **pairs}


@given(choice=CHOICES)
def test_clip_per_example_is_the_sum_of_clipped_examples(backend, choice: random.Random):
    tree = random_batch(choice, backend.device)
    n = len(tree["0"])
    limit = choice.choice([1.5, 0.25, 0.0])
    given_limit: Any = choice.choice([limit, torch.tensor(limit), torch.tensor([limit]).double()])
    own_norms, normalize = choice.random() < 0.5, choice.random() < 0.3
    nonfinite: Any = choice.choice(["propagate", "zero"])
    reduce: Any = choice.choice(["sum", "mean"] if n else ["sum"])
    pairs = in_pairs(tree)
    sums, norms = expected_of(
        pairs, limit, per_layer=own_norms, normalize=normalize, zero=nonfinite == "zero"
    )

    with untouched(tensors_of(tree).values()):
        total, known = clip_per_example(
            tree,
            given_limit,
            per_layer=own_norms,
            normalize=normalize,
            reduce=reduce,
            nonfinite=nonfinite,
        )

    scale = n if reduce == "mean" else 1
    assert_sums(in_pairs(total), pairs, {name: x / scale for name, x in sums.items()})
    dtypes = {x.dtype.to_real() for x in tensors_of(tree).values()}
    for name, own in tensors_of(known if own_norms else {"0": known}).items():
        assert own.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
        assert_norm(own, norms[name], is_mixed=len(dtypes) > 1)


def test_clip_per_example_in_half_precision_takes_several_pieces(backend, monkeypatch):
    monkeypatch.setattr("tritonclip.functional.per_example._PIECE", 64)
    monkeypatch.setattr("tritonclip.functional.per_example._LARGE_PIECE", 64)
    pages = normal((9, 5, 7), torch.bfloat16, backend.device).transpose(0, 1)
    tree = {"long": normal((5, 101), torch.bfloat16, backend.device), "pages": pages}
    total, _ = clip_per_example(tree, 1.0)
    assert_sums(total, tree, expected_of(tree, 1.0)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", ["rows", "pages"])
def test_clip_per_example_makes_no_copy_of_the_batch(dtype, order):
    """Sums take a 64th of the gradients, and pieces of narrower dtypes 4 MiB of float32."""
    x = torch.ones(64, 2**7, 2**10, dtype=dtype)
    if order == "pages":
        x = x.view(2**7, 64, 2**10).transpose(0, 1)
    tree = [x]
    clip_per_example(tree, 1.0)
    extra = extra_bytes(lambda: clip_per_example(tree, 1.0))
    assert extra < x.nbytes / 64 + 2**20 * (8 if dtype == torch.float64 else 4) + 2**20


def test_clip_per_example_at_its_limit_changes_no_bit():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    total, norms = clip_per_example(x, 5.0)
    assert norms.tolist() == [5.0, 0.0]
    assert_bits([total], [x[0]])
    for limit in (math.inf, 1e300):
        assert clip_per_example(x, limit)[0].tolist() == [3.0, 4.0]
    assert clip_per_example(x, 1e-300)[0].tolist() == [0.0, 0.0]
    assert clip_per_example(x, 0.0)[0].tolist() == [0.0, 0.0]
    assert clip_per_example(x, 0.0, normalize=True)[0].tolist() == [0.0, 0.0]


def test_clip_per_example_error_names_the_examples(backend):
    tree = tensors_of(batch_of(4, device=backend.device))
    tree["3"].view(4, -1)[1, 0], tree["0"].view(4, -1)[3, 0] = math.inf, math.nan
    each = r"examples 3 in gradients\['0'\], 1 in gradients\['3'\]"
    for per_layer, message in ((False, "norms of examples 1, 3 of 4 are not finite"), (True, each)):
        with pytest.raises(RuntimeError, match=message):
            clip_per_example(tree, 1.0, nonfinite="error", per_layer=per_layer)


BATCH = torch.ones(3, 2)
NO_BATCHES: dict[str, Any] = {
    "sizes": ([BATCH, BATCH[:2]], r"got gradients\[0\] of shape \(3, 2\) and gradients\[1\] of"),
    "0-d": ([BATCH, BATCH[0, 0]], r"\[B, \.\.\.\], got gradients\[1\] of shape \(\)"),
    "0-d alone": (torch.ones(()), r"got gradients of shape \(\)"),
    "nothing": ({}, "no tensor; expected tensors of shape"),
    "None": ([None], "no tensor; expected tensors of shape"),
    "sparse": ([BATCH.to_sparse()], r"convert it with to_dense\(\)"),
    "integers": ([BATCH.int()], "expected a floating-point dtype"),
    "no example": ([BATCH[:0]], "needs at least one example"),
}


@pytest.mark.parametrize(("tree", "message"), NO_BATCHES.values(), ids=NO_BATCHES)
def test_clip_per_example_refuses_bad_batches(tree, message):
    kind = TypeError if "convert" in message or "dtype" in message else ValueError
    reduce: Any = "mean" if "example" in message else "sum"
    with pytest.raises(kind, match=message):
        clip_per_example(tree, 1.0, reduce=reduce)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": -1.0}, "must be 0 or more"),
        ({"max_norm": math.nan}, "must be 0 or more"),
        ({"max_norm": torch.ones(3)}, "one-element tensor"),
        ({"max_norm": math.inf, "normalize": True}, "must be finite with normalize=True"),
        ({"max_norm": torch.tensor(math.inf), "normalize": True}, "must be finite with norm"),
        ({"max_norm": 1.0, "reduce": "none"}, "must be 'sum' or 'mean', got 'none'"),
        ({"max_norm": 1.0, "nonfinite": "skip"}, "nonfinite must be"),
    ],
    ids=str,
)
def test_clip_per_example_refuses_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        clip_per_example(BATCH, **options)


# Derivatives and torch.func.


def recipe() -> tuple[torch.nn.Module, dict[str, Tensor], Tensor, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(11, 4), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    )
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    examples = torch.randint(11, (6, 3))

    def loss(parameters: Any, example: Tensor) -> Tensor:
        result: Tensor = functional_call(model, parameters, (example[None],)).square().sum()
        return result

    return model, parameters, examples, loss


def test_clip_per_example_of_torch_func_is_a_loop_over_examples():
    model, parameters, examples, loss = recipe()
    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, examples)
    total, norms = clip_per_example(gradients, 1.0, reduce="mean")

    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for example, norm in zip(examples, norms, strict=True):
        model.zero_grad()
        model(example[None]).square().sum().backward()
        known = tritonclip.clip_(model, tritonclip.ClipByGlobalNorm(1.0, eps=0.0))
        torch.testing.assert_close(norm, known, rtol=2e-6, atol=0)
        for name, p in model.named_parameters():
            assert p.grad is not None
            sums[name] += p.grad / len(examples)
    torch.testing.assert_close(total, sums)


# Of torch itself, while it traces.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.plain_empty
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "nonfinite", ["zero", pytest.param("propagate", marks=pytest.mark.exhaustive)]
)
def test_clip_per_example_inside_torch_func_and_compile_is_the_plain_call(nonfinite):
    _, parameters, examples, loss = recipe()

    def both(parameters: Any, examples: Tensor) -> Any:
        gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, examples)
        return clip_per_example(gradients, 1.0, nonfinite=nonfinite)

    total, norms = both(parameters, examples)
    mapped = vmap(both, in_dims=(None, 0))(parameters, torch.stack([examples] * 2))
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(parameters, examples)
    for other_total, other in (
        (compiled[0], compiled[1]),
        ({k: x[1] for k, x in mapped[0].items()}, mapped[1][1]),
    ):
        torch.testing.assert_close(other_total, total)
        torch.testing.assert_close(other, norms)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_clip_per_example_has_derivatives(per_layer, normalize):
    x = normal((4, 3), torch.float64).mul(torch.tensor([[0.1], [1.0], [5.0], [0.0]]).double())
    y = normal((4,), torch.float64).mul(torch.tensor([0.1, 1.0, 5.0, 1.0]).double())
    inputs = (x.requires_grad_(), y.requires_grad_(), torch.tensor(0.8).double().requires_grad_())

    def call(*inputs: Tensor) -> Any:
        total, norms = clip_per_example(
            inputs[:2], inputs[2], per_layer=per_layer, normalize=normalize, reduce="mean"
        )
        return (*total, *norms) if per_layer else (*total, norms)

    # The norm of the last row of x has no derivative at 0 by differences.
    with torch.no_grad():
        x[3] = 0.3
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_clip_per_example_zero_keeps_bad_examples_out_of_derivatives():
    x = torch.tensor([[3.0, 4.0], [math.inf, 1.0], [0.3, 0.4]], requires_grad=True)
    total, _ = clip_per_example(x, 1.0, nonfinite="zero")
    assert total.tolist() == pytest.approx([0.9, 1.2])
    (slope,) = torch.autograd.grad(total.sum(), x)
    assert slope[1].tolist() == [0.0, 0.0]
    assert slope[2].tolist() == [1.0, 1.0]


def test_clip_per_example_error_inside_torch_func_is_refused():
    with pytest.raises(RuntimeError, match="reads norms on the host"):
        vmap(lambda x: clip_per_example(x, 1.0, nonfinite="error"))(torch.ones(2, 3, 4))


def test_clip_per_example_under_autocast_keeps_the_digits_of_float32():
    tree = tensors_of(batch_of(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = clip_per_example(tree, 1.0)
    assert_bits(total.values(), clip_per_example(tree, 1.0)[0].values())


def test_clip_per_example_under_verify_compares_the_norms(backend, monkeypatch):
    tree = batch_of(3, device=backend.device)
    with tritonclip.verify():
        clip_per_example(tree, 1.0)
        measure = units.norms_by_unit
        monkeypatch.setattr(units, "norms_by_unit", lambda g: [2 * x for x in measure(g)])
        with pytest.raises(tritonclip.VerificationError, match=r"norm of tensors\[0\]\[0\]: got"):
            clip_per_example(tree, 1.0)


def test_clip_per_example_normalizes_zeros_by_a_huge_limit():
    zeros = torch.zeros(2, 3)
    for x in (zeros, zeros.clone().requires_grad_()):
        assert not clip_per_example(x, 4e36, normalize=True)[0].any()
    wide = {"a": zeros, "b": zeros.double()}
    assert not clip_per_example(wide, 1e40, normalize=True)[0]["a"].any()


# Of the norms of all parameters, some are larger.
N, LIMIT = 12, 6.5
# Opacus adds 1e-6 to norms, of which those that are clipped are 0.1 or more here.
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 1e-7}


@pytest.fixture
def opacus():
    """clip_per_example is its DPOptimizer without noise."""
    return pytest.importorskip("opacus", reason="needs tritonclip[test]")


def module_and_loss(opacus: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.GroupNorm(2, 4),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    )
    module = opacus.GradSampleModule(model)
    images = torch.randn(N, 1, 6, 6) * torch.logspace(-1, 1, N).view(N, 1, 1, 1)
    loss = torch.nn.functional.cross_entropy(module(images.requires_grad_()), torch.arange(N) % 3)
    return module, loss


def clipped_by_opacus(opacus: Any, name: str, limit: Any) -> list[Tensor]:
    module, loss = module_and_loss(opacus)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = getattr(opacus.optimizers, name)(
        sgd, noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=N
    )
    loss.backward()
    optimizer.pre_step()
    return [p.grad for p in module.parameters()]


def test_sum_is_that_of_dp_optimizer_without_noise(opacus):
    module, loss = module_and_loss(opacus)
    loss.backward()
    gradients = {name: p.grad_sample for name, p in module.named_parameters()}
    mean, norms = clip_per_example(gradients, LIMIT, reduce="mean")
    assert 0 < int((norms > LIMIT).sum()) < N
    expected = clipped_by_opacus(opacus, "DPOptimizer", LIMIT)
    torch.testing.assert_close(list(mean.values()), expected, **CLOSE)


def test_limits_of_single_tensors_are_those_of_the_optimizer_by_layer(opacus):
    module, loss = module_and_loss(opacus)
    loss.backward()
    gradients = [p.grad_sample for p in module.parameters()]
    limits = [0.1 * (i + 1) for i in range(len(gradients))]
    pairs = zip(gradients, limits, strict=True)
    mean = [clip_per_example(own, limit, reduce="mean")[0] for own, limit in pairs]
    expected = clipped_by_opacus(opacus, "DPPerLayerOptimizer", limits)
    torch.testing.assert_close(mean, expected, **CLOSE)
    same, _ = clip_per_example(gradients, LIMIT, per_layer=True, reduce="mean")
    expected = clipped_by_opacus(opacus, "DPPerLayerOptimizer", [LIMIT] * len(gradients))
    torch.testing.assert_close(same, expected, **CLOSE)
