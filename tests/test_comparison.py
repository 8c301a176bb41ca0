"""`compare` checks and times both libraries on copies, and leaves the model as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tritonclip
from helpers.cases import grad_of, parameter
from tritonclip import comparison, samples
from tritonclip.backends.native import NativeBatch
from tritonclip.samples import Samples

compare = partial(tritonclip.compare, seconds=0.01)


class Tied(torch.nn.Module):
    """A frozen, a tied and an unused parameter, batch statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.ones(5))
        self.norm = torch.nn.BatchNorm1d(6)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout(self.norm(self.second(self.first(x)))) + self.frozen(x)
        return found


X = torch.linspace(-1, 1, 48).view(8, 6)


def loss_of(model: Any) -> Tensor:
    loss: Tensor = model(X.to(model.unused)).square().mean()
    return loss


def trained() -> Tied:
    """With gradients."""
    torch.manual_seed(0)
    model = Tied()
    loss_of(model).backward()
    return model


def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return parameter(torch.full((4,), value, dtype=dtype))


def state(model: torch.nn.Module) -> list[Any]:
    """All that must not change, with the identity and the version of gradients."""
    found: list[Any] = [torch.get_rng_state().tolist(), model.training, torch.is_grad_enabled()]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found += [name, id(tensor), tensor.tolist(), tensor._version, tensor.requires_grad]
        if (grad := tensor.grad) is not None:
            found += [id(grad), grad.tolist(), grad._version, grad.data_ptr()]
    return found


@pytest.mark.parametrize("loss", [None, loss_of], ids=["present", "loss"])
def test_compare_finds_three_calls_and_the_share_of_a_step(backend, loss):
    model = trained().to(backend.device)
    found = compare(model, loss)
    calls = [(call.rule, call.clipped) for call in found.calls]
    assert calls == [("by global norm", True), ("by global norm", False), ("by value", True)]
    for call in found.calls:
        assert call.variant in ("default", "foreach", "no foreach")
        assert min(call.torch_us, call.tritonclip_us) > 0
        assert 0 < call.ratio_lo <= call.ratio <= call.ratio_hi
    for call in found.calls[:2]:
        assert call.torch_error is not None
        assert call.torch_error < 1e-5
        assert call.tritonclip_error is not None
        assert call.tritonclip_error < 1e-6
    assert found.calls[2].torch_error is found.calls[2].tritonclip_error is None
    # Two biases, one weight for both layers, weight and bias of the batch norm.
    assert (found.n_gradients, found.n_elements) == (5, 36 + 4 * 6)
    assert (found.dtypes, found.device) == ((torch.float32,), backend.device)
    assert found.backends == (backend.name,)
    assert found.source == ("present" if loss is None else "loss")
    assert (found.step is None) == (loss is None)
    if found.step is not None:
        assert found.step.step_us > 0
        assert 0 < found.step.torch_share_lo <= found.step.torch_share_hi < 1
        assert 0 < found.step.tritonclip_share_lo <= found.step.tritonclip_share_hi < 1


@pytest.mark.parametrize("loss", [None, loss_of], ids=["present", "loss"])
def test_compare_changes_nothing_of_the_model(loss):
    model = trained()
    before = state(model)
    compare(model, loss)
    assert state(model) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("at", [1, 4])
def test_compare_changes_nothing_when_a_loss_raises(error, at):
    model, calls = trained(), []

    def raises(model):
        calls.append(torch.rand(2))
        if len(calls) == at:
            raise error
        return loss_of(model)

    before = state(model)
    with pytest.raises(error):
        compare(model, raises)
    assert state(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_steps_do_not_move_the_copy(dtype):
    """In float16, squares of gradients are 0, as the usual epsilon of AdamW."""
    losses = []

    def recorded(model):
        losses.append(loss_of(model.eval()))
        return losses[-1]

    compare(trained().to(dtype), recorded)
    assert len(losses) > 10
    assert len({loss.item() for loss in losses}) == 1


def test_a_model_without_gradients_gets_random_ones_and_the_answer_says_so():
    model = Tied()
    before = state(model)
    found = compare(model)
    assert state(model) == before
    assert (found.source, found.n_gradients) == ("random", 6)
    assert "random gradients, because the model has none: 6 with " in str(found)


def test_compare_takes_what_clip_takes():
    model = trained()
    model.first.bias.need_clip = False  # type: ignore[attr-defined]
    flat = tritonclip.FlatGradients(torch.nn.Linear(3, 2))
    flat.buffers[0].fill_(2.0)
    for parameters, n in (
        (model.parameters(), 4),
        (list(model.named_parameters()) * 2, 4),
        (model.second.bias, 1),
        (flat, 2),
    ):
        assert compare(parameters).n_gradients == n


@pytest.mark.parametrize(
    ("dtype", "n_calls", "least"),
    [(torch.bfloat16, 3, 1e-5), (torch.float64, 3, 0.0), (torch.complex64, 2, 0.0)],
    ids=str,
)
def test_norms_are_compared_with_float64_in_every_dtype(dtype, n_calls, least):
    torch.manual_seed(0)
    found = compare(parameter(torch.randn(300).to(dtype)))
    assert len(found.calls) == n_calls
    errors = [call.torch_error for call in found.calls[:2]]
    # In bfloat16, torch rounds its norm to three digits.
    assert all(error is not None and least <= error < 1e-2 for error in errors)
    ours = [call.tritonclip_error for call in found.calls[:2]]
    assert all(error is not None and error < 1e-6 for error in ours)


def test_an_overflow_of_torch_is_its_error():
    found = compare(filled(6e4, torch.float16))
    assert found.calls[0].torch_error == math.inf
    assert "inf, " in str(found)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("norm", r"by global norm, clipped: .* norm: got .*, expected "),
        ("scale_", r"by global norm, clipped: .* first\.weight\[0, 1\]: got .*, expected "),
        ("clamp_", r"by value: .* first\.weight\[0, 1\]: got .*, expected "),
    ],
)
def test_a_wrong_result_of_tritonclip_is_an_error_with_both_values(monkeypatch, verb, said):
    real = getattr(NativeBatch, verb)

    def wrong(batch, *args, **kwargs):
        result = real(batch, *args, **kwargs)
        if verb == "norm":
            return [1.0001 * norm for norm in result]
        target = next(t for t in batch.tensors if t.numel() == 36)
        target.view(-1)[1] *= 1.0001
        return result

    monkeypatch.setattr(NativeBatch, verb, wrong)
    model = trained()
    before = state(model)
    refused = pytest.raises(tritonclip.VerificationError, match=said)
    with tritonclip.use_backend("native"), refused:
        compare(model)
    assert state(model) == before


def test_a_write_within_the_limit_is_an_error(monkeypatch):
    """Of a gradient that clipping at ten times the norm must leave bit for bit as it is.

    By the verb that is timed, in place of those that are verified.
    """
    real = NativeBatch.clip_

    def writes(batch, norm_type, eps, limit, grad_scale):
        norm = real(batch, norm_type, eps, limit, grad_scale)
        if limit > norm:
            grad = next(t for t in batch.tensors if t.numel() == 36).view(-1)
            grad[3] = torch.nextafter(grad[3], torch.tensor(math.inf))
        return norm

    monkeypatch.setattr(NativeBatch, "clip_", writes)
    said = r"by global norm, unclipped: .* first\.weight\[0, 3\]: got .*, expected "
    refused = pytest.raises(tritonclip.VerificationError, match=said)
    with tritonclip.use_backend("native"), refused:
        compare(trained())


def test_clipped_calls_get_fresh_gradients_and_ratios_are_to_the_fastest_of_torch(monkeypatch):
    refilled = []

    def interleaved(timed, device, *_, **__):
        refilled.append([one.prepare is not None for one in timed])
        for one in timed:
            assert one.prepared()() == one.prepared()()
        return [Samples([us, us], [], 1) for us in (5.0, 30.0, 10.0, 20.0)]

    monkeypatch.setattr(comparison, "interleaved", interleaved)
    found = compare(trained())
    assert refilled == [[True] * 4, [False] * 4, [True] * 4]
    assert {(call.variant, call.ratio) for call in found.calls} == {("foreach", 2.0)}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_steps_train_in_any_mode(mode):
    model = trained()
    with mode():
        assert compare(model, loss_of).step is not None


def test_only_variants_that_torch_has_are_compared(monkeypatch):
    real = torch.nn.utils.clip_grad_value_

    def without_foreach(parameters, limit, foreach=None):
        if foreach is not False:
            raise RuntimeError("no foreach here")
        real(parameters, limit, foreach)

    without_foreach.__name__ = "clip_grad_value_"
    monkeypatch.setattr(torch.nn.utils, "clip_grad_value_", without_foreach)
    found = compare(trained())
    assert found.calls[2].variant == "no foreach"


def test_an_answer_prints_its_numbers_and_what_the_share_needs():
    times: dict[str, Any] = {"torch_us": 1500.0, "tritonclip_us": 500.0}
    ratio = {"ratio": 3.0, "ratio_lo": 2.9, "ratio_hi": 3.1}
    errors = {"torch_error": 2e-3, "tritonclip_error": 0.0}
    no_errors: dict[str, Any] = {"torch_error": None, "tritonclip_error": None}
    call = comparison.CallTimes
    calls = (
        call("by global norm", True, "foreach", **times, **ratio, **errors),
        call("by global norm", False, "default", **times, **ratio, **errors),
        call("by value", True, "no foreach", **times, **ratio, **no_errors),
    )
    step = comparison.StepTimes(98_500.0, 1500.0, 500.0, 0.015, 0.01, 0.02, 0.005, 0.004, 0.006)
    rest = (12, 1_000_000, (torch.float32, torch.bfloat16), torch.device("cpu"), ("native",))
    lines = str(comparison.Comparison(calls, step, "loss", *rest)).splitlines()
    assert lines[0] == "gradients of the loss: 12 with 1,000,000 elements, float32, bfloat16"
    norm = ["1,500 us (foreach)", "500 us", "3.00x (2.90 to 3.10)", "2e-03, 0e+00"]
    for words, row in (
        (["by global norm, clipped", *norm], lines[3]),
        (["by value", "1,500 us (no foreach)", "500 us", "3.00x (2.90 to 3.10)", "-"], lines[5]),
    ):
        assert [word for word in words if word not in row] == []
    assert lines[6:8] == [
        "share of a training step: torch 1.5% (1.0% to 2.0%), tritonclip 0.5% (0.4% to 0.6%),",
        "beside 98.5 ms of forward, backward and AdamW",
    ]
    assert "idle" not in "".join(lines)
    noisy = str(comparison.Comparison((replace(calls[0], ratio_hi=9.0),), None, "present", *rest))
    assert "because no loss was given; write\ncompare(model, lambda model: ...)" in noisy
    assert "\nCompare again when it is idle" in noisy
    for name in ("torch_share_hi", "tritonclip_share_hi"):
        shares = replace(step, **{name: 0.5})
        assert "\nCompare again when" in str(comparison.Comparison(calls, shares, "loss", *rest))


def sparse() -> torch.nn.Module:
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    return embedding


class Kind(Tensor):
    """A subclass, as DTensor is one."""


# What is compared, the loss, and the error.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no gradients": (torch.nn.Linear(2, 2).requires_grad_(False), None, "none among 2; pass the"),
    "no parameters": (torch.nn.ReLU(), None, "got none among 0; pass the model that is trained"),
    "optimizer": (torch.optim.SGD([filled(1.0)], lr=0.1), None, "pass the parameters of the"),
    "text": ("model", None, "expected an iterable of tensors, a tensor, a module"),
    "nan": ([("w", filled(math.nan))], None, "got NaN or inf in w; expected"),
    "large": (filled(3e38), None, r"within the range of torch.float32, got a norm of 6e\+38"),
    "zero": (filled(0.0), None, "all gradients are 0"),
    "sparse": (sparse(), None, "torch.sparse_coo, on cpu for the gradient of weight"),
    "lazy": (torch.nn.LazyLinear(3), None, "got a UninitializedParameter of"),
    "meta": (torch.nn.Linear(2, 2, device="meta"), None, "on meta for the gradient of weight"),
    "subclass": (torch.ones(2).as_subclass(Kind).requires_grad_(), None, "got a Kind of"),
    "parameters": ([filled(1.0)], loss_of, "with loss_of, model must be a module"),
    "no argument": (Tied(), lambda: 1, "takes 0 positional arguments but 1 was given"),
    "number": (Tied(), lambda model: 3.0, "must return the loss, a tensor, got float"),
    "constant": (Tied(), lambda model: torch.ones(()), "depends on no parameter of the model"),
}


@pytest.mark.parametrize(("model", "loss", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_refused(model, loss, said):
    with pytest.raises((TypeError, ValueError), match=said):
        compare(model, loss)


def test_gradients_that_are_not_clipped_are_left_out_of_the_copy_too():
    model = trained()
    model.norm.weight.need_clip = False  # type: ignore[attr-defined]
    assert compare(model, loss_of).n_gradients == 4
    for one in model.parameters():
        one.need_clip = False  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the loss depends on has need_clip = False; expected"):
        compare(model, loss_of)


def test_both_clip_the_same_parameters_in_a_step(monkeypatch):
    """torch does not know need_clip."""
    model, real, sizes = trained(), torch.nn.utils.clip_grad_norm_, set()
    model.norm.weight.need_clip = False  # type: ignore[attr-defined]

    def recorded(parameters, *args, **kwargs):
        parameters = list(parameters)
        sizes.add(sum(p.numel() for p in parameters if p.grad is not None))
        return real(parameters, *args, **kwargs)

    recorded.__name__ = "clip_grad_norm_"
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    found = compare(model, loss_of)
    assert sizes == {found.n_elements}


@pytest.mark.parametrize("loss", [None, loss_of], ids=["present", "loss"])
def test_more_seconds_take_more_samples(monkeypatch, loss):
    """By a clock that goes on by 10 ms with each sample of a call."""
    n_taken = []

    def sample(timed, device, n_calls=1):
        n_taken.append(n_calls)
        return 1.0, 1.0

    monkeypatch.setattr(samples, "sample", sample)
    monkeypatch.setattr(samples, "perf_counter_ns", lambda: len(n_taken) * 10_000_000)
    for seconds in (10, 30):
        n_taken.clear()
        compare(trained(), loss, seconds=seconds)
        assert len(n_taken) == pytest.approx(100 * seconds, rel=0.1)


def test_gradients_made_in_inference_mode_are_compared():
    weight = torch.nn.Parameter(torch.ones(4))
    with torch.inference_mode():
        weight.grad = torch.arange(4.0)
    assert compare(weight).n_gradients == 1
    assert grad_of(weight).tolist() == [0, 1, 2, 3]


def test_subnormal_gradients_are_right():
    assert compare(filled(1e-42)).calls[0].clipped


@pytest.mark.parametrize("also", [False, True], ids=["only", "also"])
def test_a_loss_of_the_model_itself_is_refused_and_writes_no_gradient(also):
    model = Tied()
    with pytest.raises(ValueError, match=r"the loss depends on .* of the model that loss_of got"):
        compare(model, lambda copy: loss_of(model) + also * loss_of(copy))
    assert all(one.grad is None for one in model.parameters())


def test_a_loss_of_a_tensor_that_gets_gradients_is_refused():
    scale = torch.ones(6, requires_grad=True)
    with pytest.raises(ValueError, match=r"gradient, 1 in number, the first of shape \(6,\);"):
        compare(Tied(), lambda model: (model(X) * scale).mean())
    assert scale.grad is None


def test_a_loss_may_make_tensors_that_require_a_gradient():
    """As for a penalty on the gradient of the input, and for checkpointing."""

    def penalized(model):
        x = X.clone().requires_grad_()
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().mean()

    assert compare(trained(), penalized).step is not None


def test_reentrant_checkpointing_of_the_whole_model_is_named():
    def checkpointed(model):
        x = X.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=True).square().mean()

    with pytest.raises(ValueError, match=r"use_reentrant=False where torch\.utils\.check"):
        compare(trained(), checkpointed)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, "4"])
def test_seconds_must_be_positive(seconds):
    with pytest.raises(ValueError, match="seconds must be a positive number, got"):
        compare(Tied(), seconds=seconds)


def test_compare_refuses_to_time_verification():
    with tritonclip.verify(), pytest.raises(RuntimeError, match=r"outside of verify\(\)"):
        compare(trained())


@pytest.mark.gpu
def test_gradients_on_several_devices_are_refused(cuda_backend):
    mixed = [filled(1.0), filled(1.0).to("cuda").detach().requires_grad_()]
    mixed[1].grad = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="on one device, got cpu, cuda:0"):
        compare(mixed)
