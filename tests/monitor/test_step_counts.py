"""Counts of steps: numbers where the host decides, else a tensor that the device adds to."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.serving import decided_on_device
from tritonclip.monitor.stats import COUNTS, StepCounts, Verdict

CPU = torch.device("cpu")


@pytest.fixture(params=["host", "device"])
def counts(request):
    """Counts that the host adds to, and counts that only operators add to."""
    if request.param == "host":
        return StepCounts(CPU)
    with decided_on_device():
        return StepCounts(CPU)


class _Recorder(TorchDispatchMode):
    """Keeps the operators that write, and runs them again."""

    def __init__(self):
        super().__init__()
        self.written = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator._schema.is_mutable:
            self.written.append((operator, args, kwargs or {}))
        return operator(*args, **(kwargs or {}))

    def replay(self):
        for operator, args, kwargs in self.written:
            operator(*args, **kwargs)


CLIPPED = {"steps", "measured_steps", "clipped_steps", "well_clipped_steps"}


def assert_counts(counts, **expected):
    """Counts that are not named are 0."""
    named = dict(zip(COUNTS, counts.read().tolist(), strict=True))
    assert named == dict.fromkeys(COUNTS, 0) | expected


def assert_clipped(counts, n, **others):
    assert_counts(counts, **dict.fromkeys(CLIPPED, n), **others)


def tensors(*numbers, dtype=torch.float32):
    return [torch.tensor(number, dtype=dtype) for number in numbers]


flag = torch.tensor


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


def test_add_without_coefficients_counts_no_measured_step(counts):
    counts.add([])
    assert_counts(counts, steps=1)


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
    with _Recorder() as recorder:
        counts.add(coefficients)
    recorder.replay()
    recorder.replay()
    assert_counts(counts, **dict.fromkeys(names, 3))


def test_counts_loaded_to_another_device_are_there():
    file = io.BytesIO()
    with decided_on_device():
        torch.save(StepCounts(CPU), file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=False)
    assert loaded.device.type == loaded.read().device.type == "meta"


@pytest.mark.parametrize(
    ("left_out", "overflow", "skip", "names", "in_a_row"),
    [
        (flag(False), flag(False), False, CLIPPED, 0),
        (flag(True), flag(True), False, {"overflowed_steps"}, 0),
        (flag(True), False, flag(True), {"skipped_steps"}, 1),
        (flag(True), flag(True), flag(True), {"overflowed_steps"}, 0),
    ],
    ids=["no", "overflow", "skip", "both"],
)
def test_add_with_flags_counts_by_them(left_out, overflow, skip, names, in_a_row, counts):
    counts.add([0.5], Verdict(left_out, overflow, skip))
    assert_counts(counts, **dict.fromkeys(names, 1), consecutive_skips=in_a_row)


def test_consecutive_skips_end_with_a_step(counts):
    counts.add([], Verdict(left_out=True, skip=True))
    counts.add([], Verdict(left_out=True, overflow=True))
    counts.add([0.5], Verdict(flag(True), skip=flag(True)))
    assert_counts(counts, skipped_steps=2, overflowed_steps=1, consecutive_skips=2)
    counts.add([0.5])
    assert_clipped(counts, 1, skipped_steps=2, overflowed_steps=1)
