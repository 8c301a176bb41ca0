"""Statistics of a run: norms, coefficients, counts of steps, groups, checkpoints, a summary."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from helpers import reference
from helpers.cases import assert_bits, assert_norm
from helpers.serving import decided_on_device
from helpers.training import give_grads, new_params, sgd, wrapped
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByQuantile,
    ClipByValue,
    ClippedOptimizer,
    ClippingWarning,
)
from tritonclip.monitor.stats import ClipStats

COUNTS = {"steps", "clipped_steps", "skipped_steps", "overflowed_steps", "consecutive_skips"}
KEYS = {"norm", "coefficient", "limit", "clipped_share", *COUNTS}


def step_of(params: Sequence[Tensor], optimizer: ClippedOptimizer, **values: Any) -> list[Tensor]:
    """Takes a step on new gradients, and returns copies of them."""
    grads = give_grads(params, **values)
    optimizer.step()
    return grads


def torch_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> float:
    """torch's own norm, in float64."""
    twins = [torch.nn.Parameter(torch.zeros_like(grad, dtype=torch.float64)) for grad in grads]
    for twin, grad in zip(twins, grads, strict=True):
        twin.grad = grad.double()
    return float(torch.nn.utils.clip_grad_norm_(twins, 1.0, norm_type))


def grouped(params: Sequence[Tensor]) -> ClippedOptimizer:
    """Groups 0 and 2 share the wrapper's rule, group 1 has its own."""
    optimizer = ClippedOptimizer(sgd([{"params": [param]} for param in params]), 1.0)
    optimizer.param_groups[1]["clip"] = 0.25
    return optimizer


def test_statistics_follow_a_model_that_was_moved():
    """As trainers do it, after the optimizer was made; what stayed behind would be a transfer."""
    params, optimizer = wrapped(sgd, device="meta")
    for param in params:
        param.grad = torch.empty_like(param)
    stats = optimizer.stats = ClipStats(torch.device("cpu"))
    optimizer.step()
    tensors = (stats.last_norm, stats.last_coefficient, stats.steps, stats.clipped_steps)
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("swapped", [False, True], ids=["replaced", "swapped"])
def test_statistics_of_a_model_made_on_meta_start_with_its_values(swapped):
    """`to_empty` replaces parameters, or gives them memory where the user asked for it."""
    layer = torch.nn.Linear(2, 1, bias=False, device="meta")
    optimizer = ClippedOptimizer(sgd(layer.parameters()), 1.0)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    try:
        layer.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()
    if swapped:
        assert optimizer.stats.summary()["norm"] == 5
        assert optimizer.stats.summary()["steps"] == 1
    else:
        with pytest.raises(RuntimeError, match=r"device meta.*make the optimizer after model\.to_"):
            optimizer.stats.summary()


def test_counts_are_on_the_device_of_the_parameters():
    """Made, kept and given back there; nothing can be read from the device meta."""
    param = torch.nn.Parameter(torch.empty(3, device="meta"))
    param.grad = torch.empty(3, device="meta")
    optimizer = ClippedOptimizer(sgd([param]), 1.0)
    optimizer.step()
    assert {value.device.type for value in optimizer.stats.state_dict().values()} == {"meta"}


def test_summary_before_the_first_step():
    summary = wrapped(sgd)[1].stats.summary()
    assert set(summary) == KEYS
    assert all(summary[name] == 0 for name in COUNTS)
    assert all(math.isnan(summary[name]) for name in KEYS - COUNTS)


def test_summary_is_of_plain_numbers():
    params = new_params()
    optimizer = grouped(params)
    step_of(params, optimizer)
    types = {name: type(value) for name, value in optimizer.stats.summary().items()}
    assert {name for name, kind in types.items() if kind is int} == COUNTS
    assert {kind for name, kind in types.items() if name not in COUNTS} == {float}


def test_summary_is_not_changed_by_later_steps():
    params, optimizer = wrapped(sgd)
    step_of(params, optimizer)
    summary = optimizer.stats.summary()
    kept = dict(summary)
    step_of(params, optimizer, size=5.0)
    assert summary == kept
    assert optimizer.stats.summary() != kept


def test_repr_does_not_read_the_device():
    stats = ClipStats(torch.device("meta"))
    assert repr(stats) == "<ClipStats on meta; summary() reads it>"


def test_stats_that_name_their_attributes_are_copied():
    stats = copy.deepcopy(ClipStats(torch.device("cpu")))
    assert pickle.loads(pickle.dumps(stats)).summary()["steps"] == 0
    with pytest.raises(AttributeError, match=r"no attribute '_private'$"):
        _ = stats._private  # type: ignore[attr-defined]


def stats_of_run(limit, before=None, steps=40, **options):
    """Statistics of gradients whose norms are about 3; `before` is another clip's limit."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(60)) for _ in range(3)]
    optimizer = ClippedOptimizer(SGD(weights, lr=0.1, **options), limit, nonfinite="skip")
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(60) * (1 + 0.5 * torch.rand(())) * 0.2
        if before is not None:
            torch.nn.utils.clip_grad_norm_(weights, before)
        optimizer.step()
    return optimizer.stats


CLIPPED_BEFORE = "steps had a norm at the limit, and none .* something else clips to the same limit"


@pytest.mark.parametrize("limit", [0.1, 1.0, 2.5])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_summary_warns_once_where_something_clips_first(limit, fused):
    with decided_on_device() if fused else nullcontext():
        stats = stats_of_run(limit, before=limit, fused=fused)
    with pytest.warns(ClippingWarning, match=CLIPPED_BEFORE) as caught:
        stats.summary()
    assert [warning.filename for warning in caught] == [__file__]
    stats.summary()


@pytest.mark.parametrize(
    ("limit", "before"),
    [(1.0, None), (2.9, None), (50.0, None), (2.0, 3.0), (3.0, 2.0)],
    ids=["clipped", "clipped-sometimes", "never", "looser-before", "tighter-before"],
)
def test_summary_does_not_warn_where_nothing_clips_to_the_same_limit_first(limit, before):
    stats_of_run(limit, before).summary()


def after_norms(rule: Any, norms: Sequence[float]) -> ClippedOptimizer:
    """An optimizer that took steps on gradients of these norms."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = ClippedOptimizer(sgd([weight]), rule)
    for norm in norms:
        weight.grad = torch.tensor([norm])
        optimizer.step()
    return optimizer


def test_summary_does_not_warn_of_a_norm_at_the_limit_by_chance():
    optimizer = after_norms(1.0, [1.0 if step % 20 == 7 else 0.3 for step in range(100)])
    assert optimizer.stats.summary()["clipped_steps"] == 5


def test_summary_does_not_warn_of_a_limit_that_follows_the_norms():
    norms = [1.0 + 1e-6 * step for step in range(100)]
    optimizer = after_norms(ClipByQuantile(0.9, 10), norms)
    assert optimizer.stats.summary()["clipped_steps"] > 10


def test_summary_warns_no_more_after_a_checkpoint_was_loaded():
    optimizer = after_norms(1.0, [1.0] * 20)
    with pytest.warns(ClippingWarning, match=CLIPPED_BEFORE):
        optimizer.stats.summary()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.stats.summary()


def test_summary_does_not_warn_of_statistics_of_an_earlier_version():
    saved = stats_of_run(1.0).state_dict()
    del saved["well_clipped_steps"]
    stats = ClipStats(torch.device("cpu"))
    stats.load_state_dict(saved)
    assert stats.summary()["clipped_steps"] == 40


def assert_shows(stats: ClipStats, norm: float, limit: float) -> None:
    assert_norm(stats.last_norm, norm)
    coefficient = min(1.0, limit / (norm + 1e-6))
    # A float32 norm and a float32 quotient: two roundings of 2**-24 beside the norm's 1e-6.
    assert float(stats.last_coefficient) == pytest.approx(coefficient, rel=1.2e-6, abs=0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3], ids=["below", "clipped", "far above"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_last_norm_is_that_before_clipping(backend, norm_type, size):
    params, optimizer = wrapped(sgd, ClipByGlobalNorm(1.0, norm_type), backend.device)
    grads = step_of(params, optimizer, size=size)
    assert_shows(optimizer.stats, torch_norm(grads, norm_type), 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_last_values_are_of_the_dtype_of_norms(backend, dtype):
    params = new_params(device=backend.device, dtype=dtype)
    optimizer = ClippedOptimizer(sgd(params), 1.0)
    step_of(params, optimizer)
    wide, stats = torch.float64 if dtype == torch.float64 else torch.float32, optimizer.stats
    values = (stats.last_norm, stats.last_coefficient, stats.steps, stats.clipped_steps)
    assert [value.dtype for value in values] == [wide, wide, torch.int64, torch.int64]
    assert {(value.shape, value.device.type) for value in values} == {((), backend.device.type)}


def test_last_values_of_earlier_steps_stay_what_they_were(backend):
    """A logger may collect them and read them later."""
    params, optimizer = wrapped(sgd, device=backend.device)
    kept, expected = [], []
    for step in range(3):
        expected.append(torch_norm(step_of(params, optimizer, size=1.0 + step, seed=step)))
        kept.append(optimizer.stats.last_norm)
    for norm, truth in zip(kept, expected, strict=True):
        assert_norm(norm, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_norms_have_their_dtype_whatever_the_default(dtype):
    _, optimizer = wrapped(sgd)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made, loaded = wrapped(sgd)[1].stats, wrapped(sgd)[1]
        loaded.load_state_dict(loaded.optimizer.state_dict())
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    for stats in (made, loaded.stats, optimizer.stats):
        assert stats.last_norm.dtype == stats.last_coefficient.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("policy", ["skip", "error"])
def test_last_norm_is_that_of_the_last_step_taken(policy, fused):
    params = new_params()
    optimizer = ClippedOptimizer(SGD(params, lr=0.1, fused=fused), 1.0, nonfinite=policy)
    norm = torch_norm(step_of(params, optimizer))
    give_grads(params, size=math.inf)
    if policy == "skip":
        optimizer.step()
    else:
        with pytest.raises(RuntimeError):
            optimizer.step()
    assert_norm(optimizer.stats.last_norm, norm)


def test_by_norm_shows_the_largest_norm_and_the_least_coefficient(backend):
    params, optimizer = wrapped(sgd, ClipByNorm(0.5), backend.device)
    grads = step_of(params, optimizer)
    assert_shows(optimizer.stats, max(torch_norm([grad]) for grad in grads), 0.5)


def test_steps_by_value_make_no_norm():
    """A fill would be a second launch on a GPU."""
    params, optimizer = wrapped(sgd, ClipByValue(0.1))
    seen = []
    for _ in range(2):
        step_of(params, optimizer)
        seen.append(optimizer.stats.last_norm)
    assert seen[1] is seen[0]
    assert seen[0].isnan()


def test_by_value_shows_nan_and_counts_steps(backend):
    params, optimizer = wrapped(sgd, ClipByValue(1e-3), backend.device)
    step_of(params, optimizer)
    summary = optimizer.stats.summary()
    assert math.isnan(summary["norm"])
    assert math.isnan(summary["coefficient"])
    assert math.isnan(summary["clipped_share"])
    assert (summary["steps"], summary["clipped_steps"]) == (1, 0)


@pytest.mark.parametrize("rule", [1.0, ClipByNorm(1.0)], ids=["global", "each"])
def test_steps_are_counted_by_what_became_of_them(rule):
    """Three clipped, two unclipped, one skipped."""
    params, optimizer = wrapped(sgd, rule, nonfinite="skip")
    for size in (10.0, 1e-3, math.nan, 10.0, 1e-3, 10.0):
        step_of(params, optimizer, size=size)
    summary = optimizer.stats.summary()
    expected = {"steps": 5, "clipped_steps": 3, "skipped_steps": 1}
    assert {name: summary[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0) | expected
    assert summary["clipped_share"] == 0.6


def test_summary_has_the_skips_in_a_row():
    params, optimizer = wrapped(sgd, nonfinite="skip")
    for size, expected in ((math.nan, 1), (math.nan, 2), (1.0, 0)):
        step_of(params, optimizer, size=size)
        assert optimizer.stats.summary()["consecutive_skips"] == expected


def test_steps_clipped_to_zero_count_as_clipped():
    params, optimizer = wrapped(sgd, nonfinite="zero")
    step_of(params, optimizer, size=math.nan)
    summary = optimizer.stats.summary()
    assert (summary["coefficient"], summary["clipped_steps"]) == (0.0, 1)


def test_steps_at_the_limit_exactly_are_not_clipped():
    """With eps=0, a norm of 5 under a limit of 5 has the coefficient 1."""
    optimizer = after_norms(ClipByGlobalNorm(5.0, eps=0.0), [5.0])
    assert int(optimizer.stats.clipped_steps) == 0
    assert float(optimizer.stats.last_coefficient) == 1


def test_share_is_of_the_steps_that_measured_a_norm():
    params, optimizer = wrapped(sgd)
    for rule in (1.0, 1e9, ClipByValue(0.1), ClipByValue(0.1)):
        optimizer.clip = rule
        step_of(params, optimizer, size=100.0)
    _, loaded = wrapped(sgd, ClipByValue(0.1))
    loaded.load_state_dict(optimizer.state_dict())
    for stats in (optimizer.stats, loaded.stats):
        assert (int(stats.steps), int(stats.measured_steps), int(stats.clipped_steps)) == (4, 2, 1)
        assert stats.summary()["clipped_share"] == 0.5


def test_counts_that_were_read_stay_what_they_were():
    params, optimizer = wrapped(sgd)
    counts = []
    for _ in range(3):
        step_of(params, optimizer)
        counts.append(optimizer.stats.steps)
    assert [int(count) for count in counts] == [1, 2, 3]


@pytest.mark.parametrize("rule", [1.0, ClipByNorm(1.0)], ids=["global", "each"])
def test_counts_stay_where_the_last_coefficient_is_written_to(rule):
    """As by an all-reduce that logs it; over 1,000 gradients it is a tensor on a CPU too."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(1000)]
    optimizer = ClippedOptimizer(sgd(params), rule)
    for _ in range(3):
        step_of(params, optimizer, size=9.0)
        optimizer.stats.last_coefficient.fill_(1.0)
    assert int(optimizer.stats.clipped_steps) == 3
    assert float(optimizer.stats.last_coefficient) < 1


def test_groups_with_a_rule_have_entries_of_their_own():
    params = new_params()
    optimizer = grouped(params)
    grads = step_of(params, optimizer)
    stats, summary = optimizer.stats, optimizer.stats.summary()
    own, shared = torch_norm([grads[1]]), torch_norm([grads[0], grads[2]])
    assert set(stats.group_norms) == set(stats.group_coefficients) == {1}
    assert_norm(stats.group_norms[1], own)
    assert_norm(stats.last_norm, shared)
    assert set(summary) == KEYS | {"group1_norm", "group1_coefficient"}
    assert summary["group1_norm"] == pytest.approx(own, rel=1e-6)
    assert summary["group1_coefficient"] == pytest.approx(0.25 / (own + 1e-6), rel=1.2e-6)


def test_last_norm_is_unknown_without_a_group_under_the_wrappers_rule():
    params, optimizer = wrapped(sgd)
    step_of(params, optimizer)
    optimizer.param_groups[0]["clip"] = 2.0
    step_of(params, optimizer)
    summary = optimizer.stats.summary()
    assert math.isnan(summary["norm"])
    assert summary["group0_norm"] > 0


def trained(steps: int) -> ClippedOptimizer:
    params = new_params()
    optimizer = grouped(params)
    for step in range(steps):
        step_of(params, optimizer, size=10.0 if step % 2 else 1e-3, seed=step)
    return optimizer


def test_state_dict_is_a_copy():
    optimizer = trained(2)
    saved = optimizer.state_dict()["tritonclip"]
    kept = {name: value.clone() for name, value in saved.items()}
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 3.0)
    optimizer.step()
    assert_bits(saved.values(), kept.values())
    assert int(optimizer.stats.steps) == 3


def test_state_dict_comes_back_from_a_checkpoint_and_counts_on():
    saved = trained(3)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loaded = grouped(new_params())
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert_bits(loaded.stats.state_dict().values(), saved.stats.state_dict().values())
    step_of(loaded.param_groups[1]["params"], loaded, size=10.0)
    summary = loaded.stats.summary()
    assert (summary["steps"], summary["clipped_steps"]) == (4, 2)
    assert int(saved.stats.steps) == 3


def test_state_dict_does_not_share_memory_with_what_loads_it():
    saved = trained(3).stats.state_dict()
    kept = {name: value.clone() for name, value in saved.items()}
    loaded = grouped(new_params())
    loaded.stats.load_state_dict(saved)
    loaded.stats.last_norm.zero_()
    loaded.stats.steps.zero_()
    assert_bits(saved.values(), kept.values())


def test_state_dict_keeps_the_norm_of_float64():
    params, twins = new_params(dtype=torch.float64), new_params(dtype=torch.float64)
    saved, loaded = ClippedOptimizer(sgd(params), 1.0), ClippedOptimizer(sgd(twins), 1.0)
    norm = reference.total_norm(step_of(params, saved))
    loaded.load_state_dict(saved.state_dict())
    assert_norm(loaded.stats.last_norm, norm)
    assert loaded.stats.last_norm.dtype == torch.float64


def test_load_without_statistics_starts_them_anew():
    """From a bare optimizer's checkpoint; group entries are those of the run before, too."""
    optimizer = trained(3)
    bare = SGD([{"params": [param]} for param in new_params()], lr=0.1)
    optimizer.load_state_dict(bare.state_dict())
    summary = optimizer.stats.summary()
    assert all(summary[name] == 0 for name in COUNTS)
    assert all(math.isnan(summary[name]) for name in set(summary) - COUNTS)


def test_load_forgets_the_group_entries_of_the_run_before():
    """A checkpoint has none, and those that are there belong to steps that it does not know."""
    optimizer, other = trained(3), trained(1)
    optimizer.load_state_dict(other.state_dict())
    assert math.isnan(optimizer.stats.summary().get("group1_norm", math.nan))


def test_load_of_statistics_that_are_none_changes_nothing():
    optimizer = trained(2)
    before = optimizer.state_dict()
    broken = wrapped(sgd)[1].state_dict()
    broken["param_groups"][0]["lr"] = 7.0
    broken["tritonclip"] = {"steps": torch.zeros(3)}
    with pytest.raises(ValueError, match="steps of a saved state must be a count"):
        optimizer.load_state_dict(broken)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
