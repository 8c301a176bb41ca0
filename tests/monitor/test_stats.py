"""Statistics of a run beside what tests/optim/test_runs.py compares: devices, dtypes, a warning.

Counts of steps are numbers where the host decides, else a tensor that the device adds to.
"""

import copy
import io
import math
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.optim import SGD

from helpers.cases import Operators
from helpers.serving import decided_on_device
from helpers.training import give_grads, new_params, sgd, step_on, wrapped
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByQuantile,
    ClipByValue,
    ClippedOptimizer,
    ClippingWarning,
)
from tritonclip.monitor.stats import COUNTS, Clipped, ClipStats, StepCounts, Verdict


def test_statistics_follow_parameters_to_and_from_meta():
    """As trainers move models after the optimizer was made; no value comes from there."""
    _, optimizer = wrapped(sgd, device="meta")
    stats = optimizer.stats = ClipStats(torch.device("cpu"))
    for device in ("meta", "cpu"):
        params = new_params(device=device)
        optimizer.param_groups[0]["params"][:] = params
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert {value.device.type for value in stats.state_dict().values()} == {device}
        assert {stats.last_norm.device.type, stats.last_coefficient.device.type} == {device}
        assert repr(stats) == f"<ClipStats on {device}; summary() reads it>"
        if device == "meta":
            with pytest.raises(
                RuntimeError, match=r"device meta.*make the optimizer after model\."
            ):
                stats.summary()
    assert stats.summary()["steps"] == 1


def test_statistics_of_parameters_that_got_memory_start_with_its_values():
    """`to_empty` gives parameters memory in place where the user asked for it."""
    layer = torch.nn.Linear(2, 1, bias=False, device="meta")
    optimizer = ClippedOptimizer(sgd(layer.parameters()), 1.0)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()
    assert (optimizer.stats.summary()["norm"], optimizer.stats.summary()["steps"]) == (5, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_last_values_are_of_the_dtype_of_norms(backend, dtype):
    """Whatever the default."""
    params = new_params(device=backend.device, dtype=dtype)
    optimizer = ClippedOptimizer(sgd(params), 1.0)
    give_grads(params)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype != torch.float64 else torch.float32)
    try:
        fresh = wrapped(sgd)[1]
        fresh.load_state_dict(fresh.optimizer.state_dict())
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    wide, stats = torch.float64 if dtype == torch.float64 else torch.float32, optimizer.stats
    values = (stats.last_norm, stats.last_coefficient, stats.steps, stats.clipped_steps)
    assert [value.dtype for value in values] == [wide, wide, torch.int64, torch.int64]
    assert {(value.shape, value.device.type) for value in values} == {((), backend.device.type)}
    assert fresh.stats.last_norm.dtype == fresh.stats.last_coefficient.dtype == torch.float32


def after_norms(
    rule: Any, norms: Sequence[float], before: float = torch.inf, **options: Any
) -> ClipStats:
    """Statistics of steps on gradients of these norms; `before` is the limit of another clip."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = ClippedOptimizer(SGD([weight], lr=0.1, **options), rule, nonfinite="skip")
    for norm in norms:
        weight.grad = torch.tensor([norm])
        torch.nn.utils.clip_grad_norm_(weight, before)
        optimizer.step()
    return optimizer.stats


ABOVE = [2.0 + step / 40 for step in range(40)]
AT_TIMES = [1.0 if step % 20 == 7 else 0.3 for step in range(100)]
# Rule, norms, the limit of another clip, the steps that are clipped, and whether it warns.
WARNINGS: dict[str, tuple[Any, list[float], float, int, bool]] = {
    "other": (1.0, ABOVE, 1.0, 40, True),
    "other, small": (0.1, ABOVE, 0.1, 40, True),
    "none": (1.0, ABOVE, torch.inf, 40, False),
    "sometimes": (2.5, ABOVE, torch.inf, 20, False),
    "never": (50.0, ABOVE, torch.inf, 0, False),
    "looser": (2.0, ABOVE, 2.5, 40, False),
    "tighter": (3.0, ABOVE, 2.0, 0, False),
    "by chance": (1.0, AT_TIMES, torch.inf, 5, False),
    "follows": (ClipByQuantile(0.9, 10), [1 + 1e-6 * n for n in range(99)], torch.inf, 98, False),
    "at the limit": (ClipByGlobalNorm(5.0, eps=0.0), [5.0] * 20, torch.inf, 0, False),
}


@pytest.mark.parametrize("case", WARNINGS)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_or_a_summary_warns_once_where_something_clips_first(case, fused):
    """On a device, which no step waits for, a summary."""
    rule, norms, before, n_clipped, warns = WARNINGS[case]
    message = "steps had a norm at the limit, and none .* something else clips to the same limit"

    def warning_if(warns: bool) -> Any:
        return pytest.warns(ClippingWarning, match=message) if warns else nullcontext()

    with decided_on_device() if fused else nullcontext(), warning_if(warns and not fused) as early:
        stats = after_norms(rule, norms, before, fused=fused)
    with warning_if(warns and fused) as late:
        assert stats.summary()["clipped_steps"] == n_clipped
    assert [warning.filename for warning in (early or late or ())] == [__file__] * warns
    # Nor after a checkpoint.
    stats.load_state_dict(stats.state_dict())
    stats.summary()


def test_summary_does_not_warn_of_statistics_of_an_earlier_version():
    saved = after_norms(1.0, ABOVE).state_dict()
    del saved["well_clipped_steps"]
    stats = ClipStats(torch.device("cpu"))
    stats.load_state_dict(saved)
    assert stats.summary()["clipped_steps"] == 40


def test_share_is_of_the_steps_that_measured_a_norm():
    params, optimizer = wrapped(sgd)
    for optimizer.clip in (1.0, 1e9, ClipByValue(0.1), ClipByValue(0.1)):
        step_on(params, optimizer, size=100.0)
    stats = optimizer.stats
    assert (int(stats.steps), int(stats.measured_steps), int(stats.clipped_steps)) == (4, 2, 1)
    assert stats.summary()["clipped_share"] == 0.5


def test_steps_by_value_make_no_norm():
    """A fill would be a second launch on a GPU."""
    stats = ClipStats(torch.device("cpu"))
    with torch.profiler.profile() as profiler:
        stats.record_({None: None})
    assert not profiler.events()
    assert math.isnan(stats.last_norm)


def test_a_group_without_its_rule_keeps_its_last_norm_at_a_step_that_the_device_leaves_out():
    stats = ClipStats(torch.device("cpu"))
    stats.record_({None: None, 1: Clipped(torch.tensor(2.0), 0.5, 1.0)})
    overflow = torch.tensor(True)
    stats.record_({None: None}, Verdict(overflow, overflow))
    assert stats.summary()["group1_norm"] == 2.0
    assert stats.group_coefficients[1] == 0.5


@pytest.mark.parametrize("rule", [1.0, ClipByNorm(1.0)], ids=["global", "each"])
def test_counts_stay_where_the_last_coefficient_is_written_to(rule):
    """As by an all-reduce that logs it; over 1,000 gradients it is a tensor on a CPU too."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(1000)]
    optimizer = ClippedOptimizer(sgd(params), rule)
    for _ in range(3):
        step_on(params, optimizer, size=9.0)
        optimizer.stats.last_coefficient.fill_(1.0)
    assert int(optimizer.stats.clipped_steps) == 3
    assert float(optimizer.stats.last_coefficient) < 1


def test_statistics_are_copied_and_share_nothing_with_what_loads_them():
    stats = after_norms(1.0, ABOVE)
    saved, summary = stats.state_dict(), stats.summary()
    assert pickle.loads(pickle.dumps(copy.deepcopy(stats))).summary() == summary
    loaded = ClipStats(torch.device("cpu"))
    loaded.load_state_dict(saved)
    loaded.last_norm.zero_()
    assert float(saved["last_norm"]) == summary["norm"]
    with pytest.raises(AttributeError, match=r"no attribute '_private'$"):
        _ = stats._private  # type: ignore[attr-defined]


def test_a_bare_checkpoint_starts_statistics_anew():
    params, optimizer = wrapped(sgd)
    fresh = optimizer.stats.summary()
    step_on(params, optimizer)
    optimizer.load_state_dict(sgd(new_params()).state_dict())
    assert repr(optimizer.stats.summary()) == repr(fresh)


CPU = torch.device("cpu")


@pytest.fixture(params=["host", "device"])
def counts(request):
    """Counts that the host adds to, and counts that only operators add to."""
    if request.param == "host":
        return StepCounts(CPU)
    with decided_on_device():
        return StepCounts(CPU)


CLIPPED = {"steps", "measured_steps", "clipped_steps", "well_clipped_steps"}


def assert_counts(counts, **expected):
    """Counts that are not named are 0."""
    named = dict(zip(COUNTS, counts.read().tolist(), strict=True))
    assert named == dict.fromkeys(COUNTS, 0) | expected


def tensors(*numbers, dtype=torch.float32):
    return [torch.tensor(number, dtype=dtype) for number in numbers]


@pytest.mark.parametrize(
    ("coefficients", "clipped"),
    [
        pytest.param([0.5], 1, id="number"),
        pytest.param([1.0], 0, id="number_1"),
        pytest.param([math.nan], 0, id="number_nan"),
        pytest.param([0.0], 1, id="number_0"),
        pytest.param(tensors(0.5), 1, id="tensor"),
        pytest.param(tensors(1.0), 0, id="tensor_1"),
        pytest.param(tensors(math.nan), 0, id="tensor_nan"),
        pytest.param(tensors(1 - 2**-40, dtype=torch.float64), 1, id="tensor_float64"),
        pytest.param([1.0, math.nan, 0.5], 1, id="numbers"),
        pytest.param(tensors(math.nan, 0.5), 1, id="tensors_nan_first"),
        pytest.param(tensors(0.5, math.nan), 1, id="tensors_nan_last"),
        pytest.param(tensors(1.0, math.nan), 0, id="tensors_none"),
        pytest.param([*tensors(1.0), 0.5], 1, id="mixed_number"),
        pytest.param([0.5, *tensors(1.0)], 1, id="mixed_number_first"),
        pytest.param([1.0, *tensors(0.5)], 1, id="mixed_tensor"),
        pytest.param([1.0, *tensors(1.0)], 0, id="mixed_none"),
    ],
)
def test_add_counts_a_step_as_clipped_once_where_any_coefficient_is_below_1(
    coefficients, clipped, counts
):
    counts.add(coefficients)
    well = clipped * (coefficients != [1 - 2**-40])
    # Reading adds nothing.
    for _ in range(2):
        assert_counts(
            counts, steps=1, measured_steps=1, clipped_steps=clipped, well_clipped_steps=well
        )


@pytest.mark.parametrize(
    ("coefficients", "names"),
    [
        pytest.param([], {"steps"}, id="none"),
        pytest.param([0.5], CLIPPED, id="number"),
        pytest.param(tensors(0.5), CLIPPED, id="tensor"),
        pytest.param(tensors(1 - 1e-6), CLIPPED - {"well_clipped_steps"}, id="tensor_at_the_limit"),
        pytest.param(tensors(1.0), {"steps", "measured_steps"}, id="tensor_1"),
    ],
)
def test_recorded_steps_count_at_every_replay(coefficients, names):
    """As in a CUDA graph, whose replays run operators and no Python."""
    with decided_on_device():
        counts = StepCounts(CPU)
    with Operators() as operators:
        counts.add(coefficients)
    for write, args, kwargs in 2 * operators.written():
        write(*args, **kwargs)
    assert_counts(counts, **dict.fromkeys(names, 3))


def test_counts_loaded_to_another_device_are_there():
    file = io.BytesIO()
    with decided_on_device():
        torch.save(StepCounts(CPU), file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=False)
    assert loaded.device.type == loaded.read().device.type == "meta"
