"""Counts of steps, most of which the device does before they are read."""

from __future__ import annotations

import copy
import io
import math
import pickle
from threading import Thread

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.cases import CalledFunctions
from tritonclip.monitor import stats
from tritonclip.monitor.stats import COUNTS, KEPT, StepCounts, Verdict

CPU = torch.device("cpu")


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
def test_add_counts_a_step_as_clipped_once_where_any_coefficient_is_below_1(coefficients, clipped):
    counts = StepCounts(CPU)
    counts.add(coefficients)
    well = clipped * (coefficients != [1 - 2**-40])
    # Reading adds nothing.
    for _ in range(2):
        assert_counts(
            counts, steps=1, measured_steps=1, clipped_steps=clipped, well_clipped_steps=well
        )


def test_add_without_coefficients_counts_no_measured_step():
    counts = StepCounts(CPU)
    counts.add([])
    assert_counts(counts, steps=1)


@pytest.mark.parametrize("n", [1, KEPT - 1, KEPT, KEPT + 1, 3 * KEPT + 7])
def test_add_counts_as_many_coefficients_as_there_are(n):
    counts = StepCounts(CPU)
    for i in range(n):
        dtype = torch.float64 if i % 5 == 0 else torch.float32
        own = tensors(0.5 if i % 3 == 0 else 1.0, dtype=dtype)
        counts.add(own if i % 7 else [*own, 1.0])
    clipped = len(range(0, n, 3))
    assert_counts(
        counts, steps=n, measured_steps=n, clipped_steps=clipped, well_clipped_steps=clipped
    )


def test_add_keeps_a_bounded_number_of_coefficients():
    counts = StepCounts(CPU)
    longest = 0
    for _ in range(3 * KEPT):
        counts.add(tensors(0.5))
        longest = max(longest, len(counts._kept))
    assert longest == KEPT - 1


@pytest.mark.parametrize("coefficients", [[0.5], tensors(0.5)], ids=["number", "tensor"])
def test_add_calls_no_operator(coefficients):
    counts = StepCounts(CPU)
    with CalledFunctions() as functions:
        counts.add(coefficients)
    # To read an attribute and to move to the own device run none.
    assert {*functions.names} <= {"to"}


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
    counts = StepCounts(CPU)
    with _Recorder() as recorder:
        counts.add(coefficients)
    recorder.replay()
    recorder.replay()
    assert_counts(counts, **dict.fromkeys(names, 3))


def test_counts_cannot_be_read_while_a_graph_is_captured(monkeypatch):
    """Its replays would count the steps before it again."""
    counts = StepCounts(CPU)
    counts.add([0.5])
    with monkeypatch.context() as patch:
        patch.setattr(stats, "is_captured", lambda device: True)
        with pytest.raises(RuntimeError, match="read them after the capture"):
            counts.read()
    assert_clipped(counts, 1)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("coefficients", [[0.5], tensors(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize("skip", [True, flag(True)], ids=["skip", "flag"])
def test_threads_may_read_while_steps_are_counted(coefficients, skip):
    counts, n = StepCounts(CPU), 2000
    skipped = Verdict(skip, False, skip)
    done = False

    def read():
        while not done:
            counts.read()

    threads = [Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(n):
        counts.add(*((coefficients,) if i % 8 else ([], skipped)))
    done = True
    for thread in threads:
        thread.join()
    assert_clipped(counts, n - n // 8, skipped_steps=n // 8)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_steps_stay_where_a_read_fails(error, monkeypatch):
    counts = StepCounts(CPU)
    for number in (0.5, 1.0, 0.5):
        counts.add(tensors(number))

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", fail)
        with pytest.raises(error):
            counts.read()
    assert_counts(counts, steps=3, measured_steps=3, clipped_steps=2, well_clipped_steps=2)


def test_counts_loaded_to_another_device_are_there():
    file = io.BytesIO()
    torch.save(StepCounts(CPU), file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=False)
    assert loaded.device.type == loaded.consecutive_skips.device.type == "meta"


@pytest.mark.parametrize(
    ("left_out", "overflow", "skip", "names", "in_a_row"),
    [
        (flag(False), flag(False), False, CLIPPED, 0),
        (flag(True), flag(True), False, {"overflowed_steps"}, 0),
        (flag(True), False, flag(True), {"skipped_steps"}, 1),
        (flag(True), flag(True), flag(True), {"overflowed_steps"}, 0),
        (flag(True), flag(False), flag(False), set(), 0),
    ],
    ids=["no", "overflow", "skip", "both", "neither"],
)
def test_add_with_flags_counts_by_them(left_out, overflow, skip, names, in_a_row):
    counts = StepCounts(CPU)
    counts.add([0.5], Verdict(left_out, overflow, skip))
    assert_counts(counts, **dict.fromkeys(names, 1))
    assert int(counts.consecutive_skips) == in_a_row


def test_add_with_flags_runs_two_operators():
    """Each is a launch on a GPU: the sums wait for the 64th step."""
    counts = StepCounts(CPU)
    coefficients, verdict = tensors(0.5), Verdict(flag(True), False, flag(True))
    with CalledFunctions() as functions:
        counts.add(coefficients, verdict)
    assert {*functions.names} - {"to", "reshape"} == {"add_", "mul_"}


def test_many_steps_of_every_kind_are_counted():
    """More than are kept, so that some are counted on the way."""
    counts, n = StepCounts(CPU), 90
    for i in range(n):
        left_out, overflow = i % 3 == 0, i % 6 == 0
        counts.add(tensors(0.5), Verdict(flag(left_out), flag(overflow), flag(left_out)))
        counts.add([1.0])
        counts.add([], Verdict(flag(False), flag(False), False))
    taken = n - n // 3
    # In the order of COUNTS.
    expected = [taken + 2 * n, taken + n, taken, taken, n // 6, n // 6]
    assert counts.read().tolist() == expected


def test_consecutive_skips_end_with_a_step():
    counts = StepCounts(CPU)
    counts.add([], Verdict(left_out=True, skip=True))
    counts.add([], Verdict(left_out=True, overflow=True))
    counts.add([0.5], Verdict(flag(True), skip=flag(True)))
    assert int(counts.consecutive_skips) == 2
    counts.add([0.5])
    assert int(counts.consecutive_skips) == 0
    assert_clipped(counts, 1, skipped_steps=2, overflowed_steps=1)


@pytest.mark.parametrize("change", ["move", "copy", "load"])
def test_steps_that_were_not_read_yet_are_kept(change):
    counts = StepCounts(CPU)
    counts.add([0.5])
    counts.add(tensors(0.5))
    if change == "move":
        counts.move_(CPU)
        assert not counts._kept
    elif change == "copy":
        counts = copy.deepcopy(counts)
    else:
        counts.load({"steps": 2, "measured_steps": 2, "clipped_steps": 2})
    assert_clipped(counts, 2)


class Stream:
    """Stands in for a CUDA stream: keeps those that it waited for, and addresses of its tensors."""

    def __init__(self, name):
        self.name, self.waited, self.recorded = name, [], set()

    def wait_stream(self, other):
        self.waited.append(other.name)


class OnGpu(torch.Tensor):
    """A tensor of a CPU that says it lies on a GPU."""

    is_cuda = True

    def record_stream(self, stream):
        stream.recorded.add(self.data_ptr())


def on_gpu(tensor):
    return tensor.as_subclass(OnGpu)


@pytest.fixture
def streams(monkeypatch):
    """Two streams, and a function that makes one of them the current one."""
    both = Stream("a"), Stream("b")

    def use(stream):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    use(both[0])
    return *both, use


def counts_on_gpu():
    counts = StepCounts(CPU)
    for name in ("_counts", "_in_a_row", "_bounds"):
        setattr(counts, name, on_gpu(getattr(counts, name)))
    return counts


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda counts: counts.read(), id="counts"),
        pytest.param(lambda counts: counts.consecutive_skips, id="skips in a row"),
        pytest.param(lambda counts: counts.load({}), id="load"),
        pytest.param(lambda counts: counts.move_(CPU), id="move"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(pickle.dumps, id="pickle"),
    ],
)
def test_a_stream_that_reads_waits_for_the_one_that_counts(streams, read):
    a, b, use = streams
    counts, coefficient = counts_on_gpu(), on_gpu(torch.tensor(0.5))
    counts.add([coefficient])
    use(b)
    read(counts)
    assert (a.waited, b.waited) == ([], ["a"])


@pytest.mark.parametrize("step", ["coefficient", "flag", "skip"])
def test_a_stream_that_counts_waits_for_the_one_that_read(streams, step):
    a, b, use = streams
    counts, yes = counts_on_gpu(), on_gpu(torch.tensor(True))
    given = {
        "coefficient": ([on_gpu(torch.tensor(0.5))],),
        "flag": ((), Verdict(yes, False, yes)),
        "skip": ((), Verdict(True, False, True)),
    }[step]
    for stream in (a, a, b, a):
        use(stream)
        counts.add(*given) if stream is a else counts.read()
    assert (a.waited, b.waited) == (["b"], ["a"])


def test_memory_of_steps_is_kept_until_another_stream_has_counted_them(streams):
    a, b, use = streams
    counts, yes = counts_on_gpu(), on_gpu(torch.tensor(True))
    coefficients = [on_gpu(torch.tensor(number)) for number in (0.5, 1.0)]
    counts.add(coefficients[:1])
    counts.add(coefficients[1:], Verdict(yes, False, yes))
    use(b)
    assert counts.read().tolist() == [1, 1, 1, 1, 1, 0]
    kept = (*coefficients, yes, counts._counts, counts._in_a_row, counts._bounds)
    assert b.recorded >= {one.data_ptr() for one in kept}
    assert not a.recorded


def test_a_graph_that_is_captured_waits_for_no_stream(streams, monkeypatch):
    a, b, use = streams
    counts = counts_on_gpu()
    counts.add([0.5])
    use(b)
    monkeypatch.setattr(stats, "is_captured", lambda device: True)
    counts.add([0.5])
    assert b.waited == []
    monkeypatch.setattr(stats, "is_captured", lambda device: False)
    use(a)
    assert counts.read()[0] == 2
    assert a.waited == []


def test_copies_keep_no_stream(streams):
    counts = counts_on_gpu()
    counts.add([0.5])
    assert "_stream" in vars(counts)
    assert "_stream" not in counts.__getstate__()
