"""Verification passes what is right, and says where and by how much a kernel is wrong."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given

import tritonclip
from helpers.broken_verbs import break_norm, break_scale
from helpers.cases import FLOATS, normal, of_sizes, parameter, parameters, unchanged
from helpers.clips import CHOICES, clip_a_list, random_arena
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByUnitNorm,
    ClipByValue,
    VerificationError,
    settings,
)
from tritonclip.engine import verify


def named(grads):
    """Parameters called w0, w1, ..."""
    return [(f"w{index}", one) for index, one in enumerate(parameters(grads))]


@contextmanager
def wrong(match=None):
    """Verification finds what is wrong inside."""
    with pytest.raises(VerificationError, match=match) as caught, tritonclip.verify():
        yield caught


# Kernels read runs of memory; gradients with gaps go to the torch backend, which is said once.
@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@given(choice=CHOICES)
def test_verify_passes_what_is_right_and_changes_no_result(backend, choice):
    with tritonclip.verify():
        clip_a_list(choice, random_arena(choice, backend.device))


def test_verify_passes_elements_that_round_the_other_way(device):
    """Between two numbers of float16, the last digit of the norm decides."""
    every_mantissa = torch.arange(1024, 2048, device=device).half() / 1024
    with tritonclip.verify():
        for limit in range(1, 40):
            tritonclip.clip_(parameters([every_mantissa.clone()]), float(limit))


@pytest.mark.parametrize("rule", [ClipByValue(0.5, 1.0), ClipByValue(-1.0, -0.5)], ids=repr)
def test_verify_passes_zeros_that_the_bounds_exclude(device, rule):
    grad = torch.tensor([1.0, torch.nan], device=device)
    with tritonclip.verify():
        tritonclip.clip_(parameters([grad]), rule, nonfinite="zero")
    assert not grad.any()


def test_verify_leaves_errors_as_they_are(device):
    grads = [torch.tensor([1.0, torch.nan], device=device)]
    with tritonclip.verify(), pytest.raises(RuntimeError, match="non-finite") as caught:
        tritonclip.clip_(parameters(grads), 1.0, nonfinite="error")
    assert not isinstance(caught.value, VerificationError)


@pytest.mark.parametrize(
    ("rule", "verb"),
    [
        (ClipByGlobalNorm(0.5), "scale_"),
        (ClipByNorm(0.5), "scale_"),
        (ClipByValue(0.1), "clamp_"),
    ],
    ids=["global", "by-norm", "by-value"],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_verify_names_parameter_index_and_values(verbs, device, monkeypatch, rule, verb, dtype):
    """One element of one gradient, wrong by a sixteenth."""
    grads = [normal(5, dtype, device), normal((4, 300), dtype, device, seed=1)]
    right = [grad.clone() for grad in grads]
    tritonclip.clip_(parameters(right), rule)
    break_scale(monkeypatch, verbs, lambda: grads[1][2, 256].mul_(1.0625), verb)
    with wrong() as caught:
        tritonclip.clip_(named(grads), rule)
    message = r"w1\[2, 256\]: got (\S+), expected (\S+) \(1 of 1200 elements differ\)"
    found = re.search(message, str(caught.value))
    assert found, caught.value
    got, expected = map(float, found.groups())
    assert got == grads[1][2, 256].item()
    # What is expected is not rounded yet.
    assert expected == pytest.approx(right[1][2, 256].item(), rel=2 * torch.finfo(dtype).eps)
    assert "w0" not in str(caught.value)


def sparse() -> torch.Tensor:
    at, values = torch.tensor([[0, 2, 2], [1, 0, 3]]), torch.tensor([1.0, 2.0, 3.0])
    return torch.sparse_coo_tensor(at, values, (3, 4), check_invariants=False).coalesce()


# Gradients, a limit, what is done to them after the call, and what is said.
FAULTS: dict[str, tuple[Any, float, Any, str]] = {
    "two units in the last place": (
        *(lambda: [torch.ones(300, dtype=torch.bfloat16)], 1.0),
        *(lambda grads, _: grads[0][299:].view(torch.int16).add_(2), r"w0\[299\]"),
    ),
    "an element left out by a mask that is one short": (
        *(lambda: of_sizes((5, 300), torch.float32), 0.5),
        *(lambda grads, before: grads[1][-1].copy_(before[1][-1]), r"w1\[299\]"),
    ),
    # By little more than the norm may be off by.
    "a write where none was due": (
        *(lambda: [torch.ones(300)], 1e9),
        *(lambda grads, _: grads[0][3].mul_(1 + 2.0**-18), r"w0\[3\]"),
    ),
    "what should have become zero": (
        *(lambda: [torch.tensor([1.0, torch.nan]), torch.ones(3)], 1.0),
        *(lambda grads, _: grads[1][2].fill_(1e-30), r"w1\[2\]: got 1\S*e-30, expected 0\.0"),
    ),
    # Named by its place in the dense tensor.
    "a value of a sparse gradient": (
        *(lambda: [sparse()], 0.5),
        *(lambda grads, _: grads[0]._values()[2].mul_(1.001), r"w0\[2, 3\]: got"),
    ),
    "a value of a complex gradient": (
        *(lambda: [normal((3, 4), torch.complex64)], 0.5),
        lambda grads, _: torch.view_as_real(grads[0])[2, 1, 1].mul_(1.001),
        r"w0\[2, 1\]: got \(.*j\), exp",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds(verbs, device, monkeypatch, fault):
    make, limit, spoil, message = FAULTS[fault]
    grads = [grad.to(device) for grad in make()]
    before = [grad.clone() for grad in grads]
    break_scale(monkeypatch, verbs, lambda: spoil(grads, before))
    with wrong(message):
        tritonclip.clip_(named(grads), limit, nonfinite="zero")


@pytest.mark.parametrize(
    ("factor", "got"), [(1 + 1e-4, r"5\.000\d+"), (torch.nan, "nan")], ids=["off", "nan"]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda grad: tritonclip.clip_(parameters([grad]), 1.0),
        lambda grad: tritonclip.clip_([("w0", parameter(grad))], ClipByNorm(1.0)),
        tritonclip.get_total_norm,
    ],
    ids=["clip_", "by-norm", "get_total_norm"],
)
def test_verify_finds_a_norm_that_is_off(faulty_verbs, device, monkeypatch, call, factor, got):
    break_norm(monkeypatch, faulty_verbs, factor)
    with wrong(rf"norm( of w0)?: got {got}, expected 5\.0\b"):
        call(torch.tensor([3.0, 4.0], device=device))


@pytest.mark.parametrize(
    "rule", [ClipByGlobalNorm(0.5), ClipByNorm(0.5)], ids=["global", "by-norm"]
)
@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-4, math.inf], ids=["above", "below", "none"])
def test_verify_finds_a_limit_that_is_off(faulty_verbs, device, monkeypatch, rule, factor):
    """By a limit of inf, nothing is written."""
    real = faulty_verbs.scale_

    def broken(batch, norms, clip):
        return real(batch, norms, clip._replace(limit=clip.limit * factor))

    monkeypatch.setattr(faulty_verbs, "scale_", broken)
    with wrong(r"w0\[0\]: got .* w1\[0\]"):
        tritonclip.clip_(named(of_sizes((5, 300), torch.float32, device)), rule)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda grad: grad.nan_to_num_(0.1), r"w0\[1\]: got 0\.1\S*, expected nan \(1 of 3"),
        (lambda grad: grad.mul_(1 + 2.0**-18), r"w0\[0\]"),
    ],
    ids=["drops NaN", "is off by a little"],
)
def test_verify_finds_a_clamp_that(verbs, device, monkeypatch, spoil, message):
    grads = [torch.tensor([0.05, torch.nan, 7.0], device=device)]
    break_scale(monkeypatch, verbs, lambda: spoil(grads[0]), "clamp_")
    with wrong(message):
        tritonclip.clip_(named(grads), ClipByValue(0.1))


def test_verify_knows_that_a_bound_stays_finite(device):
    grads = [torch.tensor([-torch.inf, 3.0], dtype=torch.float16, device=device)]
    with tritonclip.verify():
        tritonclip.clip_(named(grads), ClipByValue(-1e30, 1e30))
    assert grads[0].tolist() == [-65504.0, 3.0]


def test_verify_knows_that_zeros_stay_outside_of_the_bounds(device):
    grads = [torch.tensor([torch.nan, 3.0], device=device)]
    with tritonclip.verify():
        tritonclip.clip_(named(grads), ClipByValue(-2.0, -1.0), nonfinite="zero")
    assert grads[0].tolist() == [0.0, 0.0]


def test_verify_covers_the_torch_functions(verbs, device, monkeypatch):
    grads = [torch.full((3,), 2.0, device=device)]
    for name, verb in (("clip_grad_norm_", "scale_"), ("clip_grad_value_", "clamp_")):
        break_scale(monkeypatch, verbs, lambda: grads[0][1].mul_(1.001), verb)
        with wrong(r"w0\[1\]: got"):
            getattr(tritonclip, name)(named(grads), 0.5)


@pytest.mark.parametrize("rule", [0.5, ClipByNorm(0.5)], ids=["global", "by-norm"])
def test_verify_knows_that_zeros_of_a_sparse_gradient_stay(device, rule):
    """Whatever they are multiplied by, as NaN here."""
    at, values = torch.tensor([[0, 2]]), torch.tensor([1.0, torch.nan])
    grad = torch.sparse_coo_tensor(at, values, (4,), check_invariants=False).to(device)
    with tritonclip.verify():
        tritonclip.clip_(named([grad]), rule)
    assert grad.to_dense().isnan().tolist() == [True, False, True, False]


def test_verify_multiplies_both_parts_of_a_complex_gradient(device):
    grad = torch.tensor([complex(torch.inf, 1.0), complex(3.0, 4.0)], device=device)
    with tritonclip.verify():
        tritonclip.clip_(named([grad]), 0.5)
    assert torch.view_as_real(grad).isnan().tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize(("n", "more"), [(3, 0), (4, 1), (8, 5)])
def test_verify_names_three_gradients_at_most(verbs, device, monkeypatch, n, more):
    grads = of_sizes(range(1, n + 1), torch.float32, device)
    break_scale(monkeypatch, verbs, lambda: [grad[0].mul_(1.001) for grad in grads])
    with wrong() as caught:
        tritonclip.clip_(named(grads), 0.5)
    assert re.findall(r"w\d", str(caught.value)) == ["w0", "w1", "w2"]
    assert re.findall(r"and (\d) more", str(caught.value)) == [str(more)] * (more > 0)


def test_verify_leaves_the_gradients_as_the_call_left_them(verbs, device, monkeypatch):
    grad = torch.tensor([3.0, 4.0], device=device)
    break_scale(monkeypatch, verbs, lambda: grad[1].fill_(9.0))
    with wrong():
        tritonclip.clip_(parameters([grad]), 1.0)
    assert grad.tolist() == pytest.approx([0.6, 9.0])


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        *((value, 1.0) for value in (3e38, 1e-41, 3e-43, 1e-45)),
        # Rounded to inf, by the check too.
        (2e37, 6.5e38),
    ],
)
def test_verify_accepts_norms_and_limits_beyond_the_normal_numbers(device, value, limit):
    dtype = torch.bfloat16 if value == 2e37 else torch.float32
    grads = [torch.full((33_000 if value == 2e37 else 3,), value, dtype=dtype, device=device)]
    nothing = unchanged(grads) if value != 3e38 else nullcontext()
    with nothing, tritonclip.verify():
        norm = tritonclip.clip_(parameters(grads), limit)
        tritonclip.clip_(parameters([grads[0].clone()]), limit, grad_scale=3.0)
        tritonclip.get_total_norm(grads)
    assert value != 3e38 or norm == torch.inf


# The verb that writes, and the call, of a weight with a gradient and a limit.
CALLS: dict[str, tuple[str, Any]] = {
    "clip_": ("scale_", tritonclip.clip_),
    "scale-3": ("scale_", lambda one, limit: tritonclip.clip_(one, limit, grad_scale=3.0)),
    "scale-0.7": ("scale_", lambda one, limit: tritonclip.clip_(one, limit, grad_scale=0.7)),
    "by-norm": ("scale_", lambda one, limit: tritonclip.clip_(one, ClipByNorm(limit))),
    "by-unit": ("", lambda one, limit: tritonclip.clip_(one, ClipByUnitNorm(limit, eps=1.0))),
    "known-norm": (
        "scale_",
        lambda one, limit: tritonclip.clip_grads_with_norm_(one, limit, one.grad.norm(torch.inf)),
    ),
}


def weight_of(size, dtype, device):
    """A weight whose gradient has elements of one size."""
    return parameter(torch.full((2, 4), size, dtype=dtype, device=device))


@pytest.mark.covering(2)
@pytest.mark.parametrize("limit", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float64], ids=str
)
@pytest.mark.parametrize("call", CALLS)
def test_verify_accepts_a_subnormal_coefficient(device, call, dtype, limit):
    """1e-5 over a norm of 1.4e38 has six bits in float32."""
    size = 3e307 if dtype == torch.float64 else 5e37
    with tritonclip.verify():
        CALLS[call][1](weight_of(size, dtype, device), limit)


@pytest.mark.parametrize("size", [1.0, 5e37])
@pytest.mark.parametrize("call", [name for name, (verb, _) in CALLS.items() if verb])
def test_verify_finds_a_tenth(verbs, device, monkeypatch, call, size):
    """At usual magnitudes, and where the coefficient is a subnormal number."""
    verb, run = CALLS[call]
    weight = weight_of(size, torch.float32, device)
    break_scale(monkeypatch, verbs, lambda: weight.grad[1, 3].mul_(1.1), verb)
    with wrong(r"\[1, 3\]: got"):
        run(weight, 1e-5)


@pytest.mark.parametrize("value", ["1", "true"])
def test_environment_switches_verification_on(faulty_verbs, device, monkeypatch, value):
    monkeypatch.setenv("TRITONCLIP_VERIFY", value)
    break_norm(monkeypatch, faulty_verbs, 1.001)
    with pytest.raises(VerificationError):
        tritonclip.clip_(parameters(of_sizes((5,), torch.float32, device)), 0.5)


def test_environment_with_another_word_is_refused(monkeypatch):
    monkeypatch.setenv("TRITONCLIP_VERIFY", "maybe")
    with pytest.raises(ValueError, match="TRITONCLIP_VERIFY: expected '1' or '0', got 'maybe'"):
        tritonclip.clip_(parameters(of_sizes((5,), torch.float32, "cpu")), 0.5)


@pytest.mark.parametrize("value", ["0", "off", "", None])
def test_verification_that_is_off_costs_nothing(backend, monkeypatch, value):
    """No gradient is copied and nothing is looked at."""
    monkeypatch.setenv("TRITONCLIP_VERIFY", value or "")
    if value is None:
        monkeypatch.delenv("TRITONCLIP_VERIFY")
    monkeypatch.setattr(verify, "Reference", lambda found: pytest.fail("verified"))
    clone, sizes = torch.Tensor.clone, (5, 300)

    def checked_clone(tensor):
        return pytest.fail("copied") if tensor.numel() in sizes else clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", checked_clone)
    grads = of_sizes(sizes, torch.float32, backend.device)
    for rule in (ClipByGlobalNorm(0.5), ClipByNorm(0.5), ClipByValue(0.1)):
        tritonclip.clip_(parameters(grads), rule)
    tritonclip.get_total_norm(grads)
    tritonclip.clip_grads_with_norm_(parameters(grads), 1.0, torch.tensor(3.0))


def test_verify_checks_a_known_list_until_its_block_ends(faulty_verbs, device, monkeypatch):
    monkeypatch.delenv("TRITONCLIP_VERIFY", raising=False)
    known = parameters(of_sizes((5,), torch.float32, device))
    for _ in range(2):
        tritonclip.clip_(known, 0.5)
    break_norm(monkeypatch, faulty_verbs, 1.001)
    with tritonclip.verify(), tritonclip.verify():
        pass
    with wrong():
        tritonclip.clip_(known, 0.25)
    tritonclip.clip_(known, 0.125)


def test_verify_holds_in_its_own_thread_only(monkeypatch):
    monkeypatch.delenv("TRITONCLIP_VERIFY", raising=False)
    with ThreadPoolExecutor(max_workers=1) as pool, tritonclip.verify():
        assert settings.current().verifying
        assert not pool.submit(settings.current).result().verifying
