"""Log of the calls of torch's functions under `patch_torch`, for `python -m tritonclip run`.

To compare them, torch's function and ours take turns on the run's own gradients. Each call clips
once, and the run goes on with its result. We time single calls between the run's other work, so
that gradients lie in the cache, or not, as they do in the run.

All processes of a mesh have to call the same collectives, and replicas have to be clipped alike.
So a turn depends only on facts that all these processes see: not on other lists, which one process
may clip alone, and not on when tensors are freed.
"""

import math
import os
import statistics
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from tritonclip import torch_compat
from tritonclip.integrations.patching import Call, original_of
from tritonclip.messages import warn_user
from tritonclip.modes import is_captured
from tritonclip.monitor.gradient_lists import GradientLists

# The functions that return a norm.
_MEASURING = ("clip_grad_norm_", "get_total_norm")
# Two calls in 17 measure the norm by both functions, and are not timed.
_CHECKED_IN = 17
# Its multiples modulo 1 are spread evenly, and so is every second, third, ... of them. So both
# functions get as many turns, even where lists of equal size alternate.
_GOLDEN = (math.sqrt(5) - 1) / 2
# The timed calls of each function that judging a list takes, and the most times that are kept.
_LEAST, _MOST = 3, 100_000
# The most kinds of calls whose turns are counted, and the elements that are sampled of a gradient.
_MOST_TURNS, _SAMPLED = 100_000, 16
# Variables that launchers set for each process: its rank, and the number of processes.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def launched() -> tuple[int, float]:
    """The rank of this process and the number of processes, as its launcher says.

    They are 0 and 1 without a launcher; the number is inf if the launcher says only the rank.
    """
    for rank, size in _LAUNCHERS:
        if (found := os.environ.get(rank, "")).isdecimal():
            n = os.environ.get(size, "")
            return int(found), int(n) if n.isdecimal() else math.inf
    return 0, 1


@dataclass
class _List:
    """Calls of one function on one list; times in microseconds."""

    name: str
    n_gradients: int
    n_elements: int
    device: torch.device
    changes: bool = False
    n_calls: int = 0
    # By torch, and by tritonclip.
    n_served: list[int] = field(default_factory=lambda: [0, 0])
    walls: tuple[deque[float], deque[float]] = field(
        default_factory=lambda: (deque(maxlen=_MOST), deque(maxlen=_MOST))
    )
    # The largest relative difference of the norms; inf if only one of them was finite.
    difference: float | None = None

    @property
    def is_judged(self) -> bool:
        """Whether there are enough times of both functions."""
        return min(map(len, self.walls)) >= _LEAST

    def add(self, is_ours: bool, wall: float | None) -> None:
        """Counts a call; the first of each function is not timed, as it plans and loads code."""
        if self.n_served[is_ours] and wall is not None:
            self.walls[is_ours].append(wall)
        self.n_served[is_ours] += 1

    def total(self, is_ours: bool) -> tuple[float, float, float]:
        """Estimates the time of all calls by one function: lower bound, median and upper bound.

        The 95% bounds are order statistics, by the normal limit of the binomial distribution.
        """
        ordered, n = sorted(self.walls[is_ours]), len(self.walls[is_ours])
        low = max(int(n / 2 - math.sqrt(n)), 0)
        of_one = ordered[low], statistics.median(ordered), ordered[n - 1 - low]
        least, middle, most = (self.n_calls * time for time in of_one)
        return least, middle, most

    def add_difference(self, a: float, b: float) -> None:
        """Keeps the largest difference of two norms."""
        if a == b or (math.isnan(a) and math.isnan(b)):
            found = 0.0
        elif math.isfinite(a) and math.isfinite(b):
            found = abs(a - b) / max(a, b)
        else:
            found = math.inf
        self.difference = max(found, self.difference or 0.0)


class CallLog:
    """Counts the calls of patched functions; to compare them, torch's and ours take turns."""

    def __init__(self, *, compares: bool) -> None:
        self.compares = compares
        self.counts: Counter[str] = Counter()
        # Read before the script runs, which may set the variables for processes that it starts.
        _, self._n_launched = launched()
        # Why torch serves all calls, if it does; known once torch.distributed is initialized.
        self._objection: str | None = None
        self._is_decided = False
        self._found = GradientLists()
        self._lists: dict[tuple[object, ...], _List] = {}
        self._turns: Counter[int] = Counter()
        # The microseconds spent outside of clipping, and the time at which the last call returned.
        self._outside, self._left = 0.0, 0

    def __call__(self, call: Call) -> tuple[Callable[..., Any], Callable[[Any], None] | None]:
        """Returns the function that serves a call, and the function that logs its result."""
        arrived = perf_counter_ns()
        if not self._is_decided:
            self._objection = self._find_objection()
        self.counts[call.name] += 1
        if self._objection is not None:
            return call.original, None
        tensors = _tensors_of(call) if self.compares else None
        if not tensors or is_captured(tensors[0].device):
            return call.ours, None
        device = tensors[0].device
        if device.type == "cuda":
            # The backward pass is not part of the call.
            _synchronize(device)
            arrived = perf_counter_ns()
        if self._left:
            # The difference is below 0 where calls of several threads overlap.
            self._outside += max(arrived - self._left, 0) / 1e3
        calls = self._list_of(call, tensors)
        calls.n_calls += 1
        n = self._turn_of(call, tensors)
        is_ours = n * _GOLDEN % 1 < 0.5
        other = None
        is_checked = n % _CHECKED_IN < 2
        if is_checked and call.name in _MEASURING:
            other = _norm_by(not is_ours, tensors, call.arguments.get("norm_type", 2.0))
            _synchronize(device)

        def done(result: Any) -> None:
            _synchronize(device)
            wall = (perf_counter_ns() - start) / 1e3
            calls.add(is_ours, None if is_checked else wall)
            if other is not None:
                calls.add_difference(_number(result), other)
            self._left = perf_counter_ns()

        self._left = start = perf_counter_ns()
        return call.ours if is_ours else call.original, done

    def _list_of(self, call: Call, tensors: Sequence[Tensor]) -> _List:
        """The record of a function's calls on a list; lists whose members change share one."""
        found = self._found.find(_given_to(call) or tensors)
        device, changes = tensors[0].device, found is None or found.changes
        key = (call.name, call.arguments.get("norm_type"), device, None if changes else found)
        if key not in self._lists:
            n_elements = sum(tensor.numel() for tensor in tensors)
            self._lists[key] = _List(call.name, len(tensors), n_elements, device, changes)
        return self._lists[key]

    def _turn_of(self, call: Call, tensors: Sequence[Tensor]) -> int:
        """The number of a call, which is the same on all processes that have to serve it alike."""
        meshes = {id(mesh): mesh for t in tensors if (mesh := getattr(t, "device_mesh", None))}
        kind: list[object] = [call.name, len(tensors), sum(t.numel() for t in tensors)]
        kind += [
            call.arguments.get("norm_type"),
            sorted(str(mesh.mesh.tolist()) for mesh in meshes.values()),
        ]
        if not meshes and max(self._n_launched, _world_size()) > 1:
            # The processes may be replicas, which have equal gradients. A sample tells these from
            # the gradients of a list that one process has alone.
            limit = call.arguments.get("max_norm", call.arguments.get("clip_value"))
            kind += [None if isinstance(limit, Tensor) else limit, _sample(tensors)]
        number = zlib.crc32(repr(kind).encode())
        if len(self._turns) > _MOST_TURNS:
            self._turns.clear()
        self._turns[number] += 1
        return number + self._turns[number]

    def _find_objection(self) -> str | None:
        """Why torch has to serve all calls: unpatched replicas would be clipped differently."""
        n = _world_size()
        self._is_decided = n > 0
        # This holds in a fork as well, which has the patch: the other processes may be no forks.
        if n <= self._n_launched:
            return None
        text = (
            f"the script started its other {n - 1} of {n} processes itself, which clip by torch's "
            "functions; so does this one, so that replicas stay equal. Expected all of them to be "
            f"started by torchrun --nproc-per-node {n} -m tritonclip run, or with RANK set"
        )
        warn_user(text)
        return text

    def report(self, served_by_torch: Counter[str], *, failed: bool) -> str:
        """The text of the counts, the reasons for which torch served calls, and the comparison."""
        if not self.counts:
            return _NONE if failed else f"{_NONE}, so that no call was replaced.\n{_REMEDIES}"
        counted = ", ".join(f"{n:,} of {name}" for name, n in self.counts.items())
        n_calls = self.counts.total()
        lines = [f"calls of torch's functions: {counted}"]
        if self._objection is not None:
            return "\n".join([*lines, self._objection])
        if n := served_by_torch.total():
            lines += [f"torch served {n:,} of these {n_calls:,} calls, which tritonclip refuses:"]
            lines += [f"  {n:,}: {reason}" for reason, n in served_by_torch.most_common()]
        elif not self.compares:
            lines[0] += "; all by tritonclip"
        if self.compares:
            lines += self._comparison()
        return "\n".join(lines)

    def _comparison(self) -> list[str]:
        judged = [calls for calls in self._lists.values() if calls.is_judged]
        judged.sort(key=lambda calls: -calls.total(False)[1])
        if not judged:
            return [
                f"too few calls to compare; expected {_LEAST} or more that are timed by each "
                "function, some 12 on the same gradients"
            ]
        whole = [self._outside + _sum(judged, i)[1] for i in (False, True)]
        lines = [line for calls in judged[:_MOST_LISTS] for line in _lines(calls, whole)]
        if (more := len(judged) - _MOST_LISTS) > 0:
            lines.append(f"and {more} lists of gradients that take less time")
        if (more := len(self._lists) - len(judged)) > 0:
            lines.append(f"and {more} lists of too few calls to compare")
        on_gpu = any(calls.device.type == "cuda" for calls in judged)
        lines.append(_LEGEND + _WAITS * on_gpu)
        if math.inf in (calls.difference for calls in judged):
            lines.append(_ONE_FINITE)
        return [*lines, _verdict(judged, self._outside)]


_MOST_LISTS = 6
# The share of a run that matters, and the relative difference below which times count as the same.
_MATTERS, _SAME = 0.01, 0.05
_LEGEND = """\
Calls take turns, and each clips once: median and quartiles of a call, and its share of
the time from the first call to the last. Two calls in 17 are not timed: they measure
the norm both ways."""
_WAITS = """
Each call waited for the GPU before and after, which a run without --compare does not."""
_ONE_FINITE = """\
A norm was finite by one function and inf or NaN by the other. torch's overflows where
squares do in the dtype of the gradients; tritonclip's does not."""
_NONE = "no call of torch's functions that clip was seen"
_REMEDIES = """\
Not seen: calls under torch.compile; processes that the script itself starts, which
torchrun -m tritonclip run starts in its place; kernels of notebooks, whose first cell is then
%load_ext tritonclip. Not reached: DeepSpeed, whose engine clips
by "gradient_clipping" of its configuration; Megatron and apex; the method clip_grad_norm_
of FSDP1, for which call tritonclip.clip_ with process_group=. Or the script calls tritonclip
itself: give ClippedOptimizer a recorder, or add norms to one. Or clipping is turned off: look
for max_grad_norm, gradient_clip_val or clip_grad in the script's settings, or clip by inf, which
only measures: torch.nn.utils.clip_grad_norm_(parameters, float("inf")), after backward."""


def _given_to(call: Call) -> list[Tensor] | None:
    """The tensors that were passed to a call; None if something else was passed."""
    given = call.arguments.get("parameters", call.arguments.get("tensors"))
    if isinstance(given, Tensor):
        return [given]
    # An iterator could not be read twice.
    if not (isinstance(given, Sized) and isinstance(given, Iterable)):
        return None
    tensors = [*given]
    return tensors if all(isinstance(x, Tensor) for x in tensors) else None


def _tensors_of(call: Call) -> list[Tensor] | None:
    """The gradients of a call, or the tensors to measure; None if something else was passed."""
    given = _given_to(call)
    if given is None or call.name == "get_total_norm":
        return given
    return [x.grad for x in given if x.grad is not None]


def _sample(tensors: Sequence[Tensor]) -> list[Any]:
    """Some elements of a list, which differ from step to step."""
    found: list[Any] = []
    try:
        for tensor in tensors[:: max(1, len(tensors) // 2)]:
            flat = tensor.detach().flatten()
            found += flat[:: max(1, len(flat) // _SAMPLED)].tolist()
    except RuntimeError:
        # Sparse gradients, for example, cannot be sampled on any of the replicas.
        return []
    return found


def _world_size() -> int:
    """The number of processes; 0 where torch.distributed is not initialized."""
    distributed = torch.distributed
    is_initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_initialized else 0


def _norm_by(ours: bool, tensors: Sequence[Tensor], norm_type: float) -> float | None:
    """The norm by our function or torch's; None if the function refuses."""
    torchs = original_of(torch.nn.utils.get_total_norm)
    measure: Callable[..., Any] = torch_compat.get_total_norm if ours else torchs
    try:
        return _number(measure(tensors, norm_type))
    except (TypeError, ValueError, RuntimeError):
        return None


def _synchronize(device: torch.device) -> None:
    """Waits for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_text(us: float) -> str:
    """Formats a time in microseconds with a unit."""
    return (
        f"{us:,.1f} us" if us < 100 else f"{us:,.0f} us" if us < 10_000 else f"{us / 1e3:,.1f} ms"
    )


def _number(norm: Any) -> float:
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _sum(lists: Sequence[_List], is_ours: bool) -> list[float]:
    """Adds up the totals of several lists, which are bounds and medians."""
    return [sum(times) for times in zip(*(calls.total(is_ours) for calls in lists), strict=True)]


def _lines(calls: _List, whole: Sequence[float]) -> list[str]:
    """Describes the calls on one list; `whole` is the time of the run by each function."""
    times = []
    for i, walls in enumerate(calls.walls):
        low, middle, high = map(_time_text, statistics.quantiles(walls, n=4))
        share = calls.total(i > 0)[1] / whole[i]
        times.append(f"{middle} ({low} to {high}), {share:.1%} of the time")
    torchs, ours = map(statistics.median, calls.walls)
    ratio = f"  {torchs / ours:.2f}x"
    if calls.difference is not None:
        ratio += f"; largest relative difference of the norms: {calls.difference:.0e}"
    of = f"{calls.n_gradients:,} gradients with {calls.n_elements:,} elements"
    if calls.changes:
        of = "lists that change from call to call"
    return [
        f"{calls.name} of {of}, {calls.n_calls:,} calls",
        f"  torch       {times[0]}",
        f"  tritonclip  {times[1]}",
        ratio,
    ]


def _verdict(lists: Sequence[_List], outside: float) -> str:
    """Says whether tritonclip speeds up this run, which spent `outside` on other work."""
    n_calls = sum(calls.n_calls for calls in lists)
    (low, torchs, high), (least, ours, most) = (_sum(lists, i) for i in (False, True))
    saved, ratio = (torchs - ours) / (torchs + outside), torchs / ours
    text = (
        f"a call takes {_time_text(ours / n_calls)} in place of {_time_text(torchs / n_calls)}"
        f"{' in the mean of the lists' * (len(lists) > 1)}"
    )
    again = "Run for more steps, or on a machine that does nothing else."
    if low <= most and least <= high:
        if abs(ratio - 1) < _SAME:
            return (
                f"It is not clear whether tritonclip helps: both take about the same time. {again}"
            )
        return (
            f"It is not clear whether tritonclip helps: {text}, {ratio:.2f}x, but times vary so "
            f"much, or are so few, that this may be chance. {again}"
        )
    if ours > torchs:
        return f"tritonclip does not help the speed of this run: {text}."
    if saved < _MATTERS:
        return (
            f"tritonclip is faster, but it hardly matters here: {text}, which saves {saved:.2%} of "
            f"the time of this run, less than {_MATTERS:.0%}."
        )
    return (
        f"tritonclip helps: {text}, which saves {saved:.1%} of the time of this run, "
        f"{_MATTERS:.0%} or more."
    )
