"""Calls are verified where a block or the environment asks for it, and nowhere else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tritonclip
from helpers.broken_verbs import break_norm
from helpers.cases import of_sizes, parameters
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, VerificationError, settings
from tritonclip.engine import verify


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
    if value is None:
        monkeypatch.delenv("TRITONCLIP_VERIFY", raising=False)
    else:
        monkeypatch.setenv("TRITONCLIP_VERIFY", value)
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


def test_verify_ends_with_its_block(faulty_verbs, device, monkeypatch):
    monkeypatch.delenv("TRITONCLIP_VERIFY", raising=False)
    break_norm(monkeypatch, faulty_verbs, 1.001)
    grads = of_sizes((5,), torch.float32, device)
    with tritonclip.verify(), tritonclip.verify():
        pass
    with pytest.raises(VerificationError), tritonclip.verify():
        tritonclip.clip_(parameters(grads), 0.5)
    tritonclip.clip_(parameters(grads), 0.5)


def test_verify_checks_a_list_that_was_clipped_without_it(faulty_verbs, device, monkeypatch):
    monkeypatch.delenv("TRITONCLIP_VERIFY", raising=False)
    known = parameters(of_sizes((5,), torch.float32, device))
    for _ in range(2):
        tritonclip.clip_(known, 0.5)
    break_norm(monkeypatch, faulty_verbs, 1.001)
    with pytest.raises(VerificationError), tritonclip.verify():
        tritonclip.clip_(known, 0.25)
    tritonclip.clip_(known, 0.125)


def test_verify_holds_in_its_own_thread_only(monkeypatch):
    monkeypatch.delenv("TRITONCLIP_VERIFY", raising=False)
    with ThreadPoolExecutor(max_workers=1) as pool, tritonclip.verify():
        assert settings.current().verifying
        assert not pool.submit(settings.current).result().verifying


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tritonclip.verify(False), r"write with tritonclip.verify\(\): "),  # type: ignore[call-arg]
        (lambda: tritonclip.verify(on=True), r"expected no argument, as in verify\(\)"),  # type: ignore[call-arg]
    ],
    ids=["position", "name"],
)
def test_verify_takes_no_argument_and_says_how_it_is_called(call, said):
    with pytest.raises(TypeError, match=said):
        call()
