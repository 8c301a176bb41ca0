"""Known launches: one call of the driver, handed what Triton's launcher would hand over.

No driver is here: a function of this process takes its place, or a library that does nothing.
"""

import ctypes
import gc
import json
import shutil
import struct
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers.workers import python
from tritonclip.backends.native import loops

triton = pytest.importorskip("triton", reason="tritonclip.kernels needs triton")

from helpers.absent_gpu import absent_gpu  # noqa: E402
from tritonclip.backends.interface import Clip  # noqa: E402
from tritonclip.backends.triton import TritonBatch, TritonLayout  # noqa: E402
from tritonclip.kernels import launch  # noqa: E402
from tritonclip.kernels.tables import lay_out  # noqa: E402

pytestmark = [
    pytest.mark.skipif(loops is None, reason="the extension is not built"),
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing"),
]
NEEDS_COMPILER = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc") or torch.cuda.is_available(),
    reason="needs Linux, a C compiler, and no driver that a GPU uses",
)
DRIVER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


class Driver:
    """Keeps what it is asked to launch, and answers with an error or 0."""

    def __init__(self, widths: str) -> None:
        self.widths, self.error = widths, 0
        self.launched: list[tuple[Any, ...]] = []
        # Without a reference the function would be freed.
        self.function = DRIVER(self.launch)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def launch(self, function, *rest: Any) -> int:
        *sizes, shared, stream, parameters, options = rest
        bits = b"".join(
            ctypes.string_at(parameters[i], struct.calcsize(f"<{w}"))
            for i, w in enumerate(self.widths)
        )
        values = struct.unpack(f"<{self.widths}", bits)
        self.launched.append((function, tuple(sizes), shared, stream, values, options))
        return self.error


def kernel_of(driver: Driver, kinds: bytes, owner: object = None) -> object:
    return loops.kernel(driver.address, 16, 396, 256, 64, kinds, owner)


def test_a_launch_hands_over_sizes_stream_and_parameters():
    """None is no parameter; two null pointers for scratch memory come last."""
    driver = Driver("QQiqqQQ")
    tensor = torch.ones(3)
    arguments = 1 << 63, None, tensor, -5, -(1 << 40), -0.25
    assert loops.launch(kernel_of(driver, b"p-pill"), 7, *arguments)
    bits = struct.unpack("<q", struct.pack("<d", -0.25))[0]
    parameters = 1 << 63, tensor.data_ptr(), -5, -(1 << 40), bits, 0, 0
    assert driver.launched == [(16, (396, 1, 1, 256, 1, 1), 64, 7, parameters, None)]


@pytest.mark.parametrize(
    "arguments",
    [(None, None, 1), (1, 1, 1), (1, None, None), (1, None, 2**31), (1, None, -(2**31) - 1)],
    ids=str,
)
def test_arguments_of_another_kind_launch_nothing(arguments):
    driver = Driver("Qi")
    assert loops.launch(kernel_of(driver, b"p-i"), 0, *arguments) is False
    assert driver.launched == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        *((given, TypeError) for given in ((1, None), (1, None, 1, 1), (1, None, 0.5))),
        *((given, OverflowError) for given in ((1, None, 2**63), (-1, None, 1))),
        (("a", None, 1), AttributeError),
    ],
    ids=str,
)
def test_wrong_arguments_raise_and_launch_nothing(arguments, error):
    driver = Driver("Qi")
    with pytest.raises(error):
        loops.launch(kernel_of(driver, b"p-i"), 0, *arguments)
    with pytest.raises(ValueError, match="Capsule"):
        loops.launch(driver, 0)
    assert driver.launched == []


@pytest.mark.parametrize(
    "arguments",
    [
        *[(0, 1, 1, 1, 0, b"p"), (1, 0, 1, 1, 0, b"p")],
        *[(1, 1, 1, 1, 0, b"f"), (1, 1, 1, 1, 0, b"p" * 31)],
    ],
    ids=str,
)
def test_kernels_that_cannot_be_are_refused(arguments):
    with pytest.raises(ValueError, match="expected"):
        loops.kernel(*arguments, None)


def test_an_error_of_the_driver_is_reported():
    driver = Driver("")
    driver.error = 201
    assert loops.launch(kernel_of(driver, b""), 0) is False
    assert len(driver.launched) == 1


def test_a_kernel_keeps_what_loaded_it():
    """Some versions of Triton unload a kernel whose last reference goes."""
    owner = Started()
    gone = weakref.ref(owner)
    kernel = kernel_of(Driver(""), b"", owner)
    del owner
    gc.collect()
    assert gone() is not None
    del kernel
    assert gone() is None


@pytest.mark.codegen
@NEEDS_COMPILER
@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_kernel_is_handed_what_triton_hands_over(tmp_path, dtype):
    """Parameters, grid, block, shared bytes and stream, by Triton's own launcher and by ours."""
    done = python("-m", "helpers.absent_driver", str(tmp_path), dtype, PYTHONPATH="tests")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["differing"] == []
    assert found["clipped"]
    assert set(found["kernels"]) == {
        *("norm_kernel", "scale_kernel", "scale_each_kernel", "clamp_kernel"),
        *("unit_norms_kernel", "scale_units_kernel"),
    }


def compiled_kernel(**changes: Any) -> Any:
    """What `Runner.start` reads of a compiled kernel; arguments: a pointer, None and an int32."""
    metadata = {"num_warps": 8, "num_ctas": 1, "shared": 64} | dict.fromkeys(UNUSED, 0) | changes
    present = {name: value for name, value in metadata.items() if value is not ABSENT}
    signature = {"a_ptr": "*fp32", "b_ptr": "constexpr", "n": "i32", "DTYPE": "constexpr"}
    signature |= changes.get("signature", {})
    parameters = ".param .u64 .ptr .global .align 1 k_0, .param .u32 k_1, .param .u64 k_2"
    ptx = f".visible .entry kernel(\n{parameters}, .param .u64 k_3\n)\n.reqntid 256\n{{ }}"
    return SimpleNamespace(
        metadata=SimpleNamespace(**present),
        packed_metadata=changes.get("packed_metadata", (8, present.get("num_ctas"), 64)),
        function=changes.get("function", 16),
        src=SimpleNamespace(signature=signature, fn=SimpleNamespace(arg_names=list(signature))),
        asm={"ptx": changes.get("ptx", ptx)},
    )


ABSENT = "absent"
UNUSED = (
    *("launch_pdl", "launch_cooperative_grid"),
    *("global_scratch_size", "profile_scratch_size"),
)


def start_of(compiled: Any, monkeypatch, driver: Driver) -> Any:
    monkeypatch.setattr(launch, "native", loops)
    monkeypatch.setattr(launch, "_cu_launch_kernel", lambda: driver.address)
    return launch.Runner(lambda *_: None, compiled).start(396, 3)


def test_a_plain_kernel_is_launched_by_the_driver(monkeypatch):
    driver = Driver("QiQQ")
    start = start_of(compiled_kernel(), monkeypatch, driver)
    assert start(7, 5, None, 3)
    assert driver.launched == [(16, (396, 1, 1, 256, 1, 1), 64, 7, (5, 3, 0, 0), None)]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
        {"launch_pdl": ABSENT},
        {"num_ctas": ABSENT},
        # Of a Triton that has no such memory, and yet has a parameter for it.
        {"profile_scratch_size": ABSENT},
        {"packed_metadata": (4, 1, 64)},
        {"packed_metadata": None},
        {"function": "capsule"},
        {"signature": {"n": "i64"}},
        {"signature": {"n": "fp64"}},
        {"signature": {"n": "tensordesc<fp32[1]>"}},
        {"signature": {"b_ptr": "*fp32"}},
        {"signature": {"DTYPE": "i32"}},
        {"ptx": ".visible .entry kernel(.param .u64 k_0, .param .u32 k_1, .param .u64 k_2)"},
        {"ptx": "something else"},
    ],
    ids=str,
)
def test_other_kernels_are_left_to_triton(changes, monkeypatch):
    driver = Driver("")
    start = start_of(compiled_kernel(**changes), monkeypatch, driver)
    assert start(7, 5, None, 3) is False
    assert driver.launched == []


@pytest.mark.parametrize("missing", ["extension", "driver", "kernel"])
def test_without_its_parts_a_known_launch_is_left_to_triton(missing, monkeypatch):
    compiled = None if missing == "kernel" else compiled_kernel()
    monkeypatch.setattr(launch, "native", None if missing == "extension" else loops)
    if missing != "driver" or torch.cuda.is_available():
        monkeypatch.setattr(launch, "_cu_launch_kernel", lambda: 0)
    assert launch.Runner(lambda *_: None, compiled).start(396, 3)(7, 5, None, 3) is False


class Started:
    """Stands in for known launches: keeps their arguments, and whether they start."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.starting = True

    def __call__(self, *arguments: Any) -> bool:
        self.seen.append(arguments)
        return self.starting


@pytest.fixture
def by_triton(monkeypatch):
    """Names of the kernels that go through `launch.launch`, and what starts again, on stream 9."""
    seen, started = [], Started()

    def launched(kernel, device, programs, occupancy, arguments, **constants):
        seen.append(kernel.fn.__name__)
        return SimpleNamespace(start=lambda programs, n_arguments: started)

    monkeypatch.setattr(launch, "launch", launched)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "direct_stream", lambda device: 9)
    return seen, started


class Batches:
    """A batch of gradients, and one of units."""

    def __init__(self) -> None:
        self.table = lay_out(torch.device("cpu"), torch.float32, [20000, 3], [16, 32])
        self.gradients = TritonBatch([], self.table, torch.float32)
        row = torch.ones(64, 512)
        self.layout = TritonLayout([row], [row])
        self.units = self.layout.bind([row, row], [16, 32])
        half = TritonLayout([row], [row.half()])
        self.mixed = half.bind([row, row.half()], [16, 32])

    def clip_each(self) -> None:
        norms = self.gradients.norm(2.0, "each")
        self.gradients.scale_(norms, Clip(2.0, 0, 1.0, 1.0, of="each"))

    def clip_units(self, units: Any, *numbers: Any) -> None:
        units.scale_(units.norm(2.0, "rows"), Clip(2.0, 1e-3, *numbers)._replace(of="rows"))


NUMBER = torch.tensor(2.0)
CALLS: dict[str, tuple[int, Callable[[Batches], Any]]] = {
    "clamp": (1, lambda on: on.gradients.clamp_(-1.0, 1.0, 1.0)),
    "clamp, scaled": (1, lambda on: on.gradients.clamp_(-1.0, 1.0, NUMBER)),
    "clip": (2, lambda on: on.gradients.clip_(2.0, 1e-6, 1.0, 1.0)),
    "clip, scaled": (2, lambda on: on.gradients.clip_(2.0, 1e-6, 1.0, NUMBER)),
    "each": (2, lambda on: on.clip_each()),
    "units": (2, lambda on: on.clip_units(on.units, 0.1, 1.0)),
    "units, scaled": (2, lambda on: on.clip_units(on.units, torch.ones(1), NUMBER)),
    "units, weights of another dtype": (3, lambda on: on.clip_units(on.mixed, 0.1, 1.0)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_launch_is_known_from_the_second_call_on(by_triton, call):
    seen, started = by_triton
    on, (n, run) = Batches(), CALLS[call]
    for _ in range(3):
        run(on)
    assert len(seen) == n
    assert [arguments[0] for arguments in started.seen] == [9] * 2 * n
    tables = on.units._table if "units" in call else on.table
    tables = on.mixed._table if "another" in call else tables
    given = tables.addresses if n > 1 or "clamp" in call else ()
    assert all(arguments[1 : 1 + len(given)] == given for arguments in started.seen)


@pytest.mark.parametrize("hooks", [False, True], ids=["does not start", "hooks are told"])
@pytest.mark.parametrize("call", CALLS)
def test_a_known_launch_goes_triton_s_way_where_it(by_triton, monkeypatch, call, hooks):
    """So does one on another device than the current one, as where hooks are told of all."""
    seen, started = by_triton
    if hooks:
        monkeypatch.setattr(launch, "direct_stream", lambda device: None)
    on, (n, run) = Batches(), CALLS[call]
    run(on)
    started.starting = False
    run(on)
    assert len(seen) == 2 * n
    assert not hooks or started.seen == []


def test_other_forms_of_a_launch_are_not_known(by_triton):
    """Each stands for another binary, or another grid."""
    seen, started = by_triton
    on, number, flag = Batches(), torch.tensor(2.0), torch.tensor(True)
    batch, units = on.gradients, on.units
    norms, of_units = torch.empty(3).double(), torch.empty(2, 64).double()
    clips = [Clip(2.0, 0.0, *numbers) for numbers in forms_of_numbers(number)]
    other, last = Clip(1.0, 0.0, 1.0, 1.0), Clip(2.0, 0.0, 1.0, 1.0, flag)
    forms: list[Callable[[], object]] = [
        lambda: batch.norm(2.0, "all"),
        lambda: batch.norm(2.0, "each"),
        lambda: batch.norm(1.0, "all"),
        lambda: batch.clamp_(-1.0, 1.0, 2.0),
        lambda: batch.clamp_(-1.0, 1.0, number),
        lambda: batch.clamp_(-1.0, 1.0, number.double()),
        lambda: batch.combine(norms, 2.0, "all"),
        *(
            partial(batch.scale_, norms, clip)
            for clip in (*clips, other, clips[0]._replace(erase=True))
        ),
        *(partial(batch.scale_, norms, clip._replace(of="each")) for clip in (*clips, other, last)),
        lambda: batch.combine(norms, 2.0, "each"),
        lambda: batch.combine(norms, 2.0, "each", wide=True),
        lambda: batch.scale_(norms.float(), clips[0]),
        lambda: units.norm(2.0, "rows"),
        *(partial(units.scale_, of_units, clip._replace(of="rows")) for clip in (*clips, last)),
        lambda: units.combine(of_units, 2.0, "rows"),
        lambda: units.combine(of_units, 2.0, "rows", wide=True),
    ]
    for form in forms:
        form()
    assert len(seen) == len(forms)
    assert started.seen == []
    for form in forms:
        form()
    assert len(seen) == len(started.seen) == len(forms)


def forms_of_numbers(number: torch.Tensor) -> list[tuple[Any, Any]]:
    """Limits and loss scales: as numbers, and one of them in a tensor of either dtype."""
    tensors = (number, number.double())
    return [(1.0, 1.0), *((x, 1.0) for x in tensors), *((1.0, x) for x in tensors)]


@pytest.mark.parametrize("numbers", [(-1, 1.0, 1.0), (-1.0, 1, 1.0), (-1.0, 1.0, 1)], ids=str)
def test_integers_are_not_taken_for_the_bits_of_floats(by_triton, numbers):
    batch = Batches().gradients
    batch.clamp_(-1.0, 1.0, 1.0)
    batch.clamp_(*numbers)
    ((*_, low, high, scale),) = by_triton[1].seen
    assert (low, high, scale) == numbers
    assert type(low) is type(high) is type(scale) is float


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_leave_no_stream_to_known_launches(monkeypatch, name):
    assert launch.direct_stream(torch.device("cpu")) == 0
    monkeypatch.setattr(triton.knobs.runtime, name, lambda metadata: None)
    assert launch.direct_stream(torch.device("cpu")) is None


@pytest.mark.codegen
def test_launches_on_an_absent_driver_are_triton_s(monkeypatch):
    """Nothing is known where the process has no driver: the second launch is as the first."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    launch._cu_launch_kernel.cache_clear()
    with absent_gpu(90):
        batch, launched = Batches().gradients, Mock(side_effect=launch.launch)
        monkeypatch.setattr(launch, "launch", launched)
        for _ in range(2):
            batch.clamp_(-1.0, 1.0, 1.0)
    assert launched.call_count == (1 if torch.cuda.is_available() else 2)


def test_a_known_launch_starts_on_the_current_stream_of_the_current_device(monkeypatch):
    """A rule may ask for a norm later, under a stream of its own, to which the results belong."""
    started = []
    starts: dict[Any, Any] = {"key": lambda *given: given}
    own = launch.Launches(torch.device("cuda", 1), (), (8,), starts)
    for device, stream in ((1, 5), (1, 6), (0, 5)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        monkeypatch.setattr(launch, "current_stream", lambda device, stream=stream: stream)
        started.append(own.starts_again("key", 3))
    assert started == [(5, 8, 3), (6, 8, 3), False]
