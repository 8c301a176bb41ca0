"""How many kernels a call launches, and what the tables say that reach them.

Every launch goes through one function: here it is wrapped in one that remembers. Tables depend on
sizes and addresses alone, so those of gradients too large for this machine are checked too.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonclip
from helpers.absent_gpu import kernel_module, replaced_launch
from helpers.cases import CHUNK, DOZENS, of_sizes, parameters
from helpers.graphs import captured_second_gpu
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByValue,
    ClipByZScore,
    ClipState,
)

pytest.importorskip("triton", reason="tritonclip.kernels needs triton")


@dataclass
class Launch:
    """One launch: the kernel's name, its grid and the tables among its arguments."""

    kernel: str
    programs: int
    tables: tuple[torch.Tensor, ...]
    n_chunks: int


@pytest.fixture
def launches(backend):
    """Every launch of the test, in order; the kernels run as usual."""
    if backend.name != "triton":
        pytest.skip("the torch backend launches no kernels of ours")
    module = kernel_module("launch")
    real = module.launch
    seen = []

    def launch(kernel, device, programs, occupancy, arguments, **constants):
        name = kernel.fn.__name__
        numbers = [a for a in arguments if isinstance(a, int)]
        seen.append(Launch(name, programs, tuple(arguments[:4]), numbers[0]))
        real(kernel, device, programs, occupancy, arguments, **constants)

    with replaced_launch(launch):
        yield seen


def names(launches: Sequence[Launch]) -> list[str]:
    return [launch.kernel for launch in launches]


GLOBAL = ["norm_kernel", "scale_kernel"]
EACH = ["norm_kernel", "scale_each_kernel"]
VALUE = ["clamp_kernel"]
# Limits that the gradients are far beyond, and limits that they are far within.
RULES = [
    pytest.param(ClipByGlobalNorm(0.1), GLOBAL, id="global-clipped"),
    pytest.param(ClipByGlobalNorm(1e9), GLOBAL, id="global-within"),
    pytest.param(ClipByGlobalNorm(0.1, norm_type=3.0), GLOBAL, id="global-p3"),
    pytest.param(ClipByNorm(0.1), EACH, id="by-norm-clipped"),
    pytest.param(ClipByNorm(1e9), EACH, id="by-norm-within"),
    pytest.param(ClipByValue(0.1), VALUE, id="by-value-clipped"),
    pytest.param(ClipByValue(1e9), VALUE, id="by-value-within"),
]


@pytest.mark.parametrize("count", [1, DOZENS])
@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_clip_launches_do_not_grow_with_the_list(device, launches, rule, expected, count):
    grads = of_sizes((index % 7 for index in range(count)), torch.float32, device)
    tritonclip.clip_(parameters(grads), rule)
    assert names(launches) == expected


@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_clip_launches_once_more_for_every_dtype(device, launches, rule, expected):
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16) * 5
    grads = [of_sizes((9,), dtype, device)[0] for dtype in dtypes]
    tritonclip.clip_(parameters(grads), rule)
    assert names(launches) == [kernel for kernel in expected for _ in range(4)]


@pytest.mark.parametrize(("rule", "expected"), RULES[:3])
def test_clip_launches_no_more_to_write_zeros(device, launches, rule, expected):
    grads = [torch.full((9,), torch.nan, device=device)]
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert names(launches) == expected
    assert not grads[0].any()


def test_clip_by_norm_launches_once_more_to_write_zeros(device, launches):
    """Every norm is known before the first gradient is written."""
    grads = [torch.full((9,), torch.nan, device=device), torch.ones(3, device=device)]
    tritonclip.clip_(parameters(grads), ClipByNorm(0.1), nonfinite="zero")
    assert names(launches) == [*EACH, "scale_each_kernel"]
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_clip_launches_no_more_to_unscale(device, launches, rule, expected):
    grads = of_sizes((9, 5), torch.float32, device)
    tritonclip.clip_(parameters(grads), rule, grad_scale=torch.tensor(8.0, device=device))
    assert names(launches) == expected


def test_accumulate_launches_as_clip_does(device, launches):
    sizes = (9, CHUNK + 1, 0)
    params = [torch.zeros(n, device=device, requires_grad=True) for n in sizes]
    for step in range(2):
        with tritonclip.accumulate_(params, 0.1):
            for param in params:
                param.grad = torch.ones_like(param) * (step + 1)
    assert names(launches) == [*GLOBAL, *GLOBAL]


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize(("rule", "expected"), [RULES[0], RULES[3], RULES[5]])
def test_norms_by_name_of_a_step_launch_twice_for_each_number(
    tmp_path, device, launches, rule, expected, statistics
):
    """What the rule measures for each gradient serves the recorder too."""
    params = parameters(of_sizes((9, CHUNK + 1, 0), torch.float32, device))
    path = tmp_path / "run.csv"
    with tritonclip.record(path, each=True, statistics=statistics) as recorder:
        optimizer = torch.optim.SGD(params, lr=0.1)
        tritonclip.ClippedOptimizer(optimizer, rule, recorder=recorder).step()
    n = 3 if statistics else 1
    measured = ["norm_kernel"] * n, ["scale_each_kernel"] * (n + 1)
    if rule.norm_type == 2.0 and not rule.per_gradient:
        measured = ["norm_kernel"] * (n + 1), ["scale_kernel"] + ["scale_each_kernel"] * n
    assert names(launches) == [*measured[0], *measured[1], expected[-1]]


STATES = [
    pytest.param(ClipByQuantile(0.9, 50), ["norm_kernel", "advance_kernel", "scale_kernel"]),
    pytest.param(ClipByZScore(), ["norm_kernel", "advance_kernel", "scale_kernel"]),
    # The norm of each gradient is put together first.
    pytest.param(
        ClipByOwnHistory(),
        ["norm_kernel", "scale_each_kernel", "advance_each_kernel", "scale_each_kernel"],
    ),
]


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize(("rule", "expected"), STATES, ids=["quantile", "zscore", "own-history"])
def test_an_adaptive_limit_launches_once_more(device, launches, rule, expected, count):
    given, state = parameters(of_sizes(range(1, count + 1), torch.float32, device)), ClipState()
    for _ in range(2):
        launches.clear()
        tritonclip.clip_(given, rule, state=state)
        assert names(launches) == expected


@pytest.mark.parametrize(("rule", "expected"), STATES[:2], ids=["quantile", "zscore"])
def test_an_adaptive_limit_launches_once_for_all_dtypes(device, launches, rule, expected):
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    grads = [of_sizes((9,), dtype, device)[0] for dtype in dtypes]
    tritonclip.clip_(parameters(grads), rule, state=ClipState())
    norm, advance, scale = expected
    assert names(launches) == [*[norm] * 4, advance, *[scale] * 4]


def test_get_total_norm_launches_two_kernels(device, launches):
    tritonclip.get_total_norm(of_sizes(range(50), torch.float32, device))
    assert names(launches) == GLOBAL


def test_clip_grads_with_norm_launches_one_kernel(device, launches):
    grads = of_sizes(range(50), torch.float32, device)
    tritonclip.clip_grads_with_norm_(parameters(grads), 1.0, torch.tensor(7.0, device=device))
    assert names(launches) == ["scale_kernel"]


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.1), ClipByNorm(0.1), ClipByValue(0.1)])
def test_tables_say_where_the_gradients_are(device, launches, rule):
    sizes = (3, 0, CHUNK, CHUNK + 1, 1)
    grads = of_sizes(sizes, torch.float32, device)
    tritonclip.clip_(parameters(grads), rule)
    for launch in launches:
        addresses, lengths, first_chunks, owners = (t.cpu().tolist() for t in launch.tables)
        assert addresses == [grad.data_ptr() for grad in grads]
        assert lengths == list(sizes)
        assert first_chunks == [0, 1, 2, 3, 5]
        assert owners == [0, 1, 2, 3, 3, 4]
        assert launch.n_chunks == 6


def test_tables_have_the_dtypes_that_kernels_read(device, launches):
    tritonclip.clip_(parameters(of_sizes((3, 5), torch.float32, device)), 0.1)
    dtypes = [torch.int64, torch.int64, torch.int64, torch.int32]
    for launch in launches:
        assert [table.dtype for table in launch.tables] == dtypes
        assert all(
            table.is_contiguous() and table.device.type == device.type for table in launch.tables
        )


def test_grid_is_one_wave_at_most(device, launches):
    wave = kernel_module("launch").wave(device, kernel_module("access").OCCUPANCY_2X128)
    for n_chunks in (1, wave, wave + 1):
        launches.clear()
        grads = [torch.ones(1, device=device) for _ in range(n_chunks)]
        tritonclip.clip_(parameters(grads), ClipByValue(9.0))
        assert launches[0].programs == min(n_chunks, wave)


def test_kernels_of_a_call_share_their_tables(device, launches):
    tritonclip.clip_(parameters(of_sizes((3, 5), torch.float32, device)), 0.1)
    norm, scale = launches
    assert all(a is b for a, b in zip(norm.tables, scale.tables, strict=True))


def test_next_call_uses_the_same_tables(device, launches):
    given = parameters(of_sizes((3, 5), torch.float32, device))
    tritonclip.clip_(given, 0.1)
    tritonclip.clip_(given, 0.1)
    first, second = launches[0], launches[2]
    assert all(a is b for a, b in zip(first.tables, second.tables, strict=True))


def test_next_call_sees_a_new_gradient(device, launches):
    """Between optimizer.zero_grad() and backward(), gradients move."""
    old = of_sizes((3, 5), torch.float32, device)
    given = parameters(old)
    tritonclip.clip_(given, 0.1)
    new = torch.full((5,), 7.0, device=device)
    given[1].grad = new
    tritonclip.clip_(given, 0.1)
    assert launches[0].tables[0].tolist() == [grad.data_ptr() for grad in old]
    assert launches[2].tables[0].tolist() == [old[0].data_ptr(), new.data_ptr()]
    assert (new < 7.0).all()


LENGTHS = st.one_of(
    st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1]),
    st.integers(0, 4 * CHUNK),
    st.integers(2**31 - 1, 2**31 + 2),
)


@pytest.mark.covering(1)
@given(sizes=st.lists(LENGTHS, min_size=1, max_size=12))
def test_chunk_table_covers_every_element_once(device, one_multiprocessor, sizes):
    """No such gradients exist here: sizes and addresses are all that the layout is made from."""
    addresses = [16 * (index + 1) for index in range(len(sizes))]
    table = kernel_module("tables").lay_out(torch.device("cpu"), torch.float32, sizes, addresses)
    pointers, lengths, first_chunks, owners = table.arguments

    chunk = torch.arange(table.n_chunks)
    start = (chunk - first_chunks[owners]) * CHUNK
    length = (lengths[owners] - start).clamp_max(CHUNK)
    assert pointers.tolist() == addresses
    assert lengths.tolist() == sizes
    assert table.n_chunks == len(owners)
    for owner, size in enumerate(sizes):
        own = owners == owner
        stop = (start + length)[own]
        assert int(start[own][0]) == 0
        assert torch.equal(start[own][1:], stop[:-1])
        assert int(stop[-1]) == size
        assert size == 0 or int(length[own].min()) > 0


SIZES = (3, CHUNK + 1)
ADDRESSES = [64, 128]


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """A number of multiprocessors, which a CPU does not have."""
    monkeypatch.setattr(kernel_module("launch"), "multiprocessors", lambda device: 1)


@pytest.fixture
def tables(device, one_multiprocessor):
    """The tables of two gradients, none made yet."""
    return kernel_module("tables").ChunkTables(device, torch.float32, SIZES)


@pytest.fixture
def stream(monkeypatch):
    """The current stream of the device, for a test to change."""
    current = [0]
    monkeypatch.setattr(
        kernel_module("tables"), "_current_stream", lambda device: (current[0], False)
    )
    return current


def test_tables_of_the_same_addresses_are_the_same(tables):
    table = tables.table(ADDRESSES)
    assert tables.table(ADDRESSES) is table
    assert tables.table(list(ADDRESSES)) is table


def test_tables_keep_the_layout_of_gradients_that_moved(tables):
    table = tables.table(ADDRESSES)
    moved = tables.table([64, 256])
    assert moved is not table
    assert moved.arguments[0].tolist() == [64, 256]
    assert all(a is b for a, b in zip(moved.arguments[1:], table.arguments[1:], strict=True))
    assert moved.n_chunks == table.n_chunks == 3


def test_tables_never_change_while_a_call_has_them(tables):
    """Another thread may have called meanwhile."""
    held = [tables.table(ADDRESSES), tables.table([64, 192])]
    before = [[part.clone() for part in table.arguments] for table in held]
    for address in range(256, 256 + 64 * 3 * kernel_module("tables").KEPT, 64):
        tables.table([64, address])
    for table, parts in zip(held, before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(table.arguments, parts, strict=True))


def test_gradients_that_come_back_to_addresses_find_their_table(tables):
    """As in training, where memory that one step leaves goes to the next."""
    kept = kernel_module("tables").KEPT
    places = [[64, 256 + 64 * step] for step in range(kept)]
    made = [tables.table(place) for place in places]
    for place, table in 2 * [*zip(places, made, strict=True)]:
        assert tables.table(list(place)) is table
    tables.table(ADDRESSES)
    assert tables.table(places[1]) is made[1]
    assert tables.table(places[0]) is not made[0]


def test_addresses_go_to_memory_that_was_theirs_before(tables):
    """Else a gradient takes what an older table leaves, moves, and is uploaded again."""
    seen = set()
    for address in range(256, 256 + 64 * 50, 64):
        seen.add(tables.table([64, address]).addresses[0])
    # The table that was laid out has memory of its own.
    assert len(seen) <= 2 + kernel_module("tables").KEPT


def test_addresses_that_a_graph_reads_stay_where_they_are(tables, current):
    tables.table(ADDRESSES)
    tables.table([64, 256])
    current["capturing"] = True
    addresses = tables.table([64, 256]).arguments[0]
    current["capturing"] = False
    for address in range(320, 320 + 64 * 50, 64):
        tables.table([64, address])
    assert addresses.tolist() == [64, 256]


def test_addresses_that_a_graph_uploads_have_memory_of_their_own(tables, current):
    """That of a graph's pool may serve no eager call, nor the other way round."""
    tables.table(ADDRESSES)
    tables.table([64, 256])
    (spare,) = (one.spare for one in tables._streams.values())
    before = [*spare]
    current["capturing"] = True
    assert tables.table([64, 320]).row is None
    assert spare == before


def test_streams_write_no_addresses_of_one_another(tables, stream):
    """What one of them has queued reads its own, however far the others are."""
    held: dict[int, set[int]] = {0: set(), 7: set()}
    for address in range(256, 256 + 64 * 50, 64):
        for stream[0], own in held.items():
            own.add(tables.table([64, address]).addresses[0])
    assert not held[0] & held[7]


def test_memory_of_forgotten_streams_is_forgotten(tables, stream):
    memory = []
    for stream[0] in range(1 + kernel_module("tables").STREAMS):
        for address in (256, 320):
            row = tables.table([64, address]).row
        memory.append(weakref.ref(row.memory.tensor))
        del row
    gc.collect()
    assert [one() is None for one in memory] == [True] + [False] * kernel_module("tables").STREAMS


@pytest.mark.parametrize("places", [1, 30], ids=["there and back", "on and on"])
def test_a_stream_whose_gradients_move_is_not_forgotten(tables, stream, places):
    first = tables.table(ADDRESSES)
    for other in range(1, 30):
        stream[0] = other
        tables.table(ADDRESSES)
        stream[0] = 0
        for address in (128, 256 + 64 * (other % places)):
            assert tables.table([64, address]).arguments[1] is first.arguments[1]


def test_addresses_of_inference_mode_are_written_outside_of_it(tables):
    tables.table(ADDRESSES)
    for address in range(256, 256 + 64 * 30, 64):
        with torch.inference_mode(address < 1000):
            assert tables.table([64, address]).arguments[0].tolist() == [64, address]


def test_tables_of_a_stream_are_not_found_on_another(tables, stream):
    """What was uploaded on one stream is not yet there for another."""
    first = tables.table(ADDRESSES)
    stream[0] = 7
    second = tables.table(ADDRESSES)
    assert all(a is not b for a, b in zip(first.arguments, second.arguments, strict=True))
    stream[0] = 0
    assert tables.table(ADDRESSES) is first


def test_tables_of_the_oldest_streams_are_forgotten(tables, stream):
    kept = kernel_module("tables").STREAMS
    first = tables.table(ADDRESSES)
    for stream[0] in range(1, kept + 1):
        tables.table(ADDRESSES)
    assert len(tables._streams) == kept
    stream[0] = 0
    assert tables.table(ADDRESSES) is not first


def test_capture_finds_the_tables_of_one_eager_call(tables, monkeypatch):
    """Else a CUDA graph captured after one call would upload its tables at every replay."""
    table = tables.table(ADDRESSES)
    monkeypatch.setattr(kernel_module("tables"), "_current_stream", lambda device: (0, True))
    assert tables.table(ADDRESSES) is table


class Upload:
    """Stands in for the event at the end of an upload."""

    def __init__(self) -> None:
        self.reached, self.asked = False, 0

    def query(self) -> bool:
        self.asked += 1
        return self.reached


@pytest.fixture
def uploads(monkeypatch):
    """The end of each eager upload, in order; none is reached yet."""
    made: list[Upload] = []

    def recorded(device):
        made.append(Upload())
        return made[-1]

    monkeypatch.setattr(kernel_module("tables"), "_recorded", recorded)
    return made


@pytest.fixture
def current(monkeypatch):
    """The current stream, and whether it is captured, for a test to change."""
    state = {"stream": 1, "capturing": False}
    now = lambda device: (state["stream"], state["capturing"])  # noqa: E731
    monkeypatch.setattr(kernel_module("tables"), "_current_stream", now)
    pinned = kernel_module("tables").PinnedMemory()
    monkeypatch.setattr(kernel_module("tables"), "pinned_memory", pinned)
    return state


def is_uploaded(table, other) -> bool:
    return bool(table.addresses != other.addresses)


def test_tables_that_have_landed_serve_captures_on_every_stream(tables, uploads, current):
    """torch.cuda.graph captures on another stream than the warm-up."""
    table = tables.table(ADDRESSES)
    uploads[0].reached = True
    tables.table(list(ADDRESSES))
    for stream in (2, 3):
        current |= {"stream": stream, "capturing": True}
        assert not is_uploaded(tables.table(list(ADDRESSES)), table)
    assert is_uploaded(tables.table([64, 256]), table)
    assert len(uploads) == 1


def test_tables_that_are_not_known_to_have_landed_serve_their_stream_alone(
    tables, uploads, current
):
    table = tables.table(ADDRESSES)
    # Seen before the end of the upload.
    tables.table(ADDRESSES)
    uploads[0].reached = True
    current |= {"stream": 2, "capturing": True}
    assert is_uploaded(tables.table(ADDRESSES), table)
    current["stream"] = 1
    assert not is_uploaded(tables.table(ADDRESSES), table)


def test_a_capture_asks_for_no_event(tables, uploads, current):
    """A query is not permitted while a stream is captured."""
    tables.table(ADDRESSES)
    uploads[0].reached = True
    for stream in (1, 2):
        current |= {"stream": stream, "capturing": True}
        tables.table(ADDRESSES)
    assert uploads[0].asked == 0
    current |= {"stream": 1, "capturing": False}
    for _ in range(3):
        tables.table(ADDRESSES)
    assert uploads[0].asked == 1


def test_tables_that_have_landed_serve_no_eager_call_on_another_stream(tables, uploads, current):
    """What its stream frees may be written again while others still read."""
    table = tables.table(ADDRESSES)
    uploads[0].reached = True
    tables.table(ADDRESSES)
    current["stream"] = 2
    assert is_uploaded(tables.table(ADDRESSES), table)


def test_moved_gradients_have_to_land_anew(tables, uploads, current):
    tables.table(ADDRESSES)
    uploads[0].reached = True
    tables.table(ADDRESSES)
    moved = tables.table([64, 256])
    current |= {"stream": 2, "capturing": True}
    assert is_uploaded(tables.table([64, 256]), moved)


def test_captures_of_one_table_keep_it_once(tables, uploads, current):
    pinned = kernel_module("tables").pinned_memory
    table = tables.table(ADDRESSES)
    uploads[0].reached = True
    tables.table(ADDRESSES)
    current["capturing"] = True
    for current["stream"] in range(1, 9):
        tables.table(list(ADDRESSES))
    assert sorted(pinned.captured) == sorted(map(id, table.arguments))


def test_tables_outlive_the_graphs_that_read_them(tables, uploads, current):
    """Other calls may drop every plan and every table that an eager call finds."""
    kept = [tables.table(ADDRESSES)]
    uploads[0].reached = True
    tables.table(ADDRESSES)
    for addresses in (ADDRESSES, [64, 256]):
        current |= {"stream": 2, "capturing": True}
        kept.append(tables.table(addresses))
    arguments = [weakref.ref(one) for table in kept for one in table.arguments]
    kept.clear()
    tables._streams.clear()
    gc.collect()
    assert all(one() is not None for one in arguments)


@pytest.mark.parametrize("known", [False, True])
def test_tables_take_one_upload(tables, monkeypatch, known):
    """A graph that uploads them copies once at each replay."""
    module, sizes = kernel_module("tables"), []
    real = module.upload

    def upload(table, *rest):
        sizes.append(table.nbytes)
        return real(table, *rest)

    if known:
        tables.table([64, 256])
    monkeypatch.setattr(module, "upload", upload)
    table = tables.table(ADDRESSES)
    assert sizes == [16 if known else 3 * 16 + 4 * table.n_chunks]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("own", [0, 1])
def test_capture_is_asked_of_the_device_of_the_gradients(own, current, monkeypatch):
    """A graph is captured on the second of two devices, whichever is the current one."""
    entered = captured_second_gpu(current, monkeypatch)
    module = kernel_module("tables")
    monkeypatch.setattr(kernel_module("launch"), "current_stream", lambda device: 10 + device.index)
    stream = module._current_stream(torch.device("cuda", own))
    assert stream == (10 + own, own == 1)
    assert entered == [current]


def test_tables_made_in_a_capture_are_found_by_no_eager_call(tables, monkeypatch):
    """They hold nothing before the graph is replayed, and its replays read them for ever."""
    module = kernel_module("tables")
    pinned = module.PinnedMemory()
    monkeypatch.setattr(module, "pinned_memory", pinned)
    tables.table(ADDRESSES)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_current_stream", lambda device: (0, True))
        captured = tables.table([64, 256])
    assert all(pinned.captured[id(one)] is one for one in captured.arguments)
    assert tables.table([64, 256]) is not captured


def test_pinned_memory_is_not_allocated_in_a_capture(monkeypatch):
    module = kernel_module("tables")
    made = []

    def allocate(n_bytes):
        made.append(n_bytes)
        return torch.empty(n_bytes)

    monkeypatch.setattr(module, "_pinned", allocate)
    pinned = module.PinnedMemory()
    with pytest.raises(RuntimeError, match="call the same clip function once, eagerly"):
        pinned.block(100, capturing=True)
    pinned.block(100, capturing=False)
    assert made == [128, 128]
    pinned.block(100, capturing=True)
    assert len(made) == 2
    pinned.refill()
    assert made == [128] * 3
    pinned.block(100, capturing=True)
    assert len(made) == 3


@pytest.mark.parametrize("n_bytes", [0, 1, 64, 65, 128, 129])
def test_pinned_memory_holds_what_is_uploaded(n_bytes, monkeypatch):
    module = kernel_module("tables")
    monkeypatch.setattr(module, "_pinned", torch.empty)
    pinned = module.PinnedMemory()
    assert n_bytes <= len(pinned.block(n_bytes, capturing=False)) <= max(64, 2 * n_bytes)
    assert n_bytes <= len(pinned.block(n_bytes, capturing=True))


def test_eager_call_replaces_the_pinned_memory_of_captures(monkeypatch, one_multiprocessor):
    module = kernel_module("tables")
    monkeypatch.setattr(module, "_pinned", torch.empty)
    monkeypatch.setattr(module, "pinned_memory", pinned := module.PinnedMemory())
    pinned.block(100, capturing=False)
    pinned.block(100, capturing=True)
    tables = module.ChunkTables(torch.device("cpu"), torch.float32, SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_current_stream", lambda device: (0, True))
        tables.table(ADDRESSES)
    with pytest.raises(RuntimeError, match="pinned memory while a CUDA graph is captured"):
        pinned.block(100, capturing=True)
    tables.table(ADDRESSES)
    pinned.block(100, capturing=True)
