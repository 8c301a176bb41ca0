"""`patch_torch`: which names are replaced, what torch still serves, and that all is put back."""

from __future__ import annotations

import math
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import grad_of, parameters
from tritonclip.integrations.patching import original_of
from tritonclip.monitor.history import read

NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
TORCHS = {name: getattr(torch.nn.utils, name) for name in NAMES}


def served_by_torch():
    said = "torch's own function serves this call"
    return pytest.warns(tritonclip.ClippingWarning, match=said)


class Gradient(Tensor):
    """A subclass, which tritonclip refuses and torch clips."""


@pytest.fixture
def trainer(monkeypatch):
    """A module that imported torch's functions by name before the patch."""
    module = types.ModuleType("a_trainer")
    vars(module).update(TORCHS)
    module.clip = TORCHS["clip_grad_norm_"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_trainer", module)
    return module


def assert_torchs_own() -> None:
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in NAMES:
            assert getattr(module, name, TORCHS[name]) is TORCHS[name]


@pytest.mark.parametrize("name", NAMES)
def test_modules_that_hold_a_function_get_ours_and_then_torchs_again(trainer, name):
    with tritonclip.patch_torch() as patch:
        replaced = getattr(torch.nn.utils, name)
        assert replaced is not TORCHS[name]
        assert getattr(trainer, name) is replaced
        assert f"{name} in " in str(patch)
        # By another name, too.
        assert trainer.clip is torch.nn.utils.clip_grad_norm_
        assert "clip in a_trainer" in str(patch)
        # As code that is imported later finds it.
        later = types.ModuleType("imported_later")
        sys.modules["imported_later"] = later
        setattr(later, name, replaced)
    try:
        assert getattr(trainer, name) is TORCHS[name]
        assert trainer.clip is TORCHS["clip_grad_norm_"]
        assert getattr(later, name) is TORCHS[name]
    finally:
        del sys.modules["imported_later"]
    assert_torchs_own()


def test_the_first_of_nested_patches_may_be_removed_first():
    first, second = tritonclip.patch_torch(), tritonclip.patch_torch()
    first.remove()
    first.remove()
    assert torch.nn.utils.clip_grad_norm_ is not TORCHS["clip_grad_norm_"]
    assert "removed" in str(first)
    second.remove()
    assert_torchs_own()


def test_an_error_in_the_block_puts_torchs_functions_back():
    with pytest.raises(KeyError), tritonclip.patch_torch():
        raise KeyError
    assert_torchs_own()


def test_patched_functions_are_tritonclips():
    """Squares of float16 elements overflow in torch's norm."""
    half = torch.full((4,), 6e4, dtype=torch.float16)
    (param,) = parameters([half.clone()])
    with tritonclip.patch_torch():
        norm = torch.nn.utils.clip_grad_norm_([param], 1.0)
        total = torch.nn.utils.get_total_norm([half.float()])
        torch.nn.utils.clip_grad_value_([param], 0.25)
    assert norm.item() == pytest.approx(math.hypot(*half.tolist()), rel=1e-6)
    assert total.item() == pytest.approx(math.hypot(*half.tolist()), rel=1e-6)
    assert grad_of(param).abs().max() <= 0.25


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"max_norm": -1.0}, [-0.6, -0.8], id="negative limit"),
        pytest.param({"max_norm": True}, [0.6, 0.8], id="a truth value"),
    ],
)
def test_torch_serves_what_tritonclip_refuses_and_says_so_once(given, expected):
    first, second, third = (parameters([torch.tensor([3.0, 4.0])]) for _ in range(3))
    norm = torch.nn.utils.clip_grad_norm_(first, **given)
    with tritonclip.patch_torch() as patch:
        with served_by_torch():
            assert torch.equal(torch.nn.utils.clip_grad_norm_(second, **given), norm)
        # Without another warning, which would be an error here.
        torch.nn.utils.clip_grad_norm_(third, **given)
    assert torch.equal(grad_of(second[0]), grad_of(first[0]))
    torch.testing.assert_close(grad_of(third[0]), torch.tensor(expected), rtol=1e-5, atol=0)
    assert patch.served_by_torch.total() == 2
    assert "torch served 2 calls: clip_grad_norm_: " in str(patch)


def test_torch_serves_gradients_of_subclasses():
    (weight,) = parameters([torch.tensor([3.0, 4.0]).as_subclass(Gradient)])
    with tritonclip.patch_torch(), served_by_torch():
        assert float(torch.nn.utils.clip_grad_norm_([weight], 1.0)) == 5.0


def test_where_both_refuse_the_error_is_torchs():
    (param,) = parameters([torch.tensor([math.nan, 4.0])])
    with pytest.raises(RuntimeError) as expected:
        torch.nn.utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    with tritonclip.patch_torch() as patch, pytest.raises(RuntimeError) as found:
        torch.nn.utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    assert str(found.value) == str(expected.value)
    assert not patch.served_by_torch


@pytest.mark.parametrize("name", NAMES)
def test_arguments_may_be_named_as_torchs_are(name):
    """Also the first, which may be an iterator."""
    given: dict[str, dict[str, object]] = {
        "clip_grad_norm_": {"max_norm": 1.0},
        "clip_grad_value_": {"clip_value": 1.0},
        "clip_grads_with_norm_": {"max_norm": 1.0, "total_norm": torch.tensor(5.0)},
        "get_total_norm": {},
    }
    first, second = (parameters([torch.tensor([3.0, 4.0])]) for _ in range(2))

    def clip(params):
        if name == "get_total_norm":
            return torch.nn.utils.get_total_norm(tensors=[grad_of(p) for p in params])
        return getattr(torch.nn.utils, name)(parameters=iter(params), **given[name])

    expected = clip(first)
    with tritonclip.patch_torch() as patch:
        found = clip(second)
    assert not patch.served_by_torch
    if expected is not None:
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad_of(second[0]), grad_of(first[0]))


def test_an_iterator_is_read_once_for_both_functions():
    params = parameters([torch.tensor([3.0]), torch.tensor([4.0])])
    with tritonclip.patch_torch(), served_by_torch():
        norm = torch.nn.utils.clip_grad_norm_(iter(params), -5.0)
    assert norm.item() == 5.0


def test_a_recorder_takes_each_norm_and_its_limit_once(tmp_path):
    """Also by two calls, as torchtitan clips: one measures, the other one scales."""
    path = tmp_path / "norms.csv"
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder):
        for size in (5.0, 0.5):
            params = parameters([torch.tensor([size])])
            torch.nn.utils.clip_grad_norm_(params, max_norm=1.0)
            torch.nn.utils.get_total_norm([size * torch.ones(1)])
        params = parameters([torch.tensor([3.0, 4.0])])
        norm = torch.nn.utils.get_total_norm([grad_of(p) for p in params])
        torch.nn.utils.clip_grads_with_norm_(params, 1.0, total_norm=norm)
    history = read(path)
    assert history.norms.tolist() == [5.0, 0.5, 5.0]
    assert history.limits.tolist() == [1.0, 1.0, 1.0]


def test_a_recorder_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="recorder must be a Recorder or None, got str; make one"):
        tritonclip.patch_torch(recorder="norms.csv")  # type: ignore[arg-type]
    assert_torchs_own()


def test_a_wrapper_beside_a_patched_call_warns_of_a_second_clip():
    """The likeliest mistake: a trainer that clips, and a wrapped optimizer in it."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = tritonclip.ClippedOptimizer(torch.optim.SGD([weight], lr=0.1), 1.0)
    with tritonclip.patch_torch():
        for step in range(12):
            weight.grad = torch.full((4,), 2.0 + step)
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
    with pytest.warns(tritonclip.ClippingWarning, match="something else clips to the same limit"):
        optimizer.stats.summary()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_call_takes_the_patched_function(fullgraph):
    torch._dynamo.reset()
    (param,) = parameters([torch.tensor([3.0, 4.0])])

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def clip(param):
        return torch.nn.utils.clip_grad_norm_([param], 1.0)

    with tritonclip.patch_torch():
        assert clip(param).item() == 5.0
    torch.testing.assert_close(grad_of(param), torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_torchs_function_stays_reachable():
    """And torch's functions call each other as before."""
    with tritonclip.patch_torch():
        assert torch.nn.utils.clip_grad._get_total_norm is TORCHS["get_total_norm"]
        assert original_of(torch.nn.utils.clip_grad_norm_) is TORCHS["clip_grad_norm_"]
    assert original_of(torch.nn.utils.clip_grad_norm_) is TORCHS["clip_grad_norm_"]
    assert original_of(len) is len


def test_threads_patch_and_clip_at_once():
    def work(_):
        for _ in range(5):
            with tritonclip.patch_torch():
                params = parameters([torch.tensor([3.0, 4.0])])
                assert torch.nn.utils.clip_grad_norm_(params, 1.0).item() == 5.0

    with ThreadPoolExecutor(3) as pool:
        # An error of a thread is raised here.
        list(pool.map(work, range(3)))
    assert_torchs_own()
