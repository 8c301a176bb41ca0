"""How many kernels a call launches, and what the tables say that reach them.

Every launch goes through one function: here it is wrapped in one that remembers. Tables depend on
sizes and addresses alone, so those of gradients too large for this machine are checked too.
"""

import gc
import weakref
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonclip
from helpers.absent_gpu import kernel_module
from helpers.cases import CHUNK, DOZENS, normal, of_sizes, parameters
from helpers.graphs import captured_second_gpu
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

pytest.importorskip("triton", reason="tritonclip.kernels needs triton")

TABLES = kernel_module("tables")


def names(launches) -> list[str]:
    return [launch.kernel for launch in launches]


def tables_of(launch):
    """Addresses, lengths, the first chunk of each gradient, and the owner of each chunk."""
    return launch.arguments[:4]


def of_dtypes(device):
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    return [normal(9, dtype, device) for dtype in dtypes]


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


@pytest.mark.parametrize("scale", [None, 8.0], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("count", [1, DOZENS])
@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_clip_launches_do_not_grow_with_the_list(device, launches, rule, expected, count, scale):
    grads = of_sizes((index % 7 for index in range(count)), torch.float32, device)
    scale = scale and torch.tensor(scale, device=device)
    tritonclip.clip_(parameters(grads), rule, grad_scale=scale)
    assert names(launches) == expected


@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_clip_launches_once_more_for_every_dtype(device, launches, rule, expected):
    tritonclip.clip_(parameters(of_dtypes(device) * 5), rule)
    assert names(launches) == [kernel for kernel in expected for _ in range(4)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    # Every norm is known before the first gradient is written.
    [*RULES[:3], pytest.param(ClipByNorm(0.1), [*EACH, "scale_each_kernel"], id="by-norm")],
)
def test_clip_launches_to_write_zeros(device, launches, rule, expected):
    grads = [torch.full((9,), torch.nan, device=device), torch.ones(3, device=device)]
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert names(launches) == expected
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize(("rule", "expected"), [RULES[0], RULES[3], RULES[5]])
def test_norms_by_name_of_a_step_take_another_reading(tmp_path, device, launches, rule, expected):
    """Beside the norm that the rule measures, or the global norm that a row has."""
    params = parameters(of_sizes((9, CHUNK + 1, 0), torch.float32, device))
    sgd, path = torch.optim.SGD(params, lr=0.1), tmp_path / "run.csv"
    with tritonclip.record(path, each=True) as recorder:
        tritonclip.ClippedOptimizer(sgd, rule, recorder=recorder).step()
    own = "scale_each_kernel" if rule.per_gradient else "scale_kernel"
    each = ["norm_kernel", "scale_each_kernel"]
    assert names(launches) == ["norm_kernel", own, *each, expected[-1]]


def test_two_calls_launch_one_kernel_more_than_one(device, launches):
    grads = of_sizes(range(50), torch.float32, device)
    tritonclip.get_total_norm(grads)
    assert names(launches) == GLOBAL
    tritonclip.clip_grads_with_norm_(parameters(grads), 1.0, torch.tensor(7.0, device=device))
    assert names(launches) == [*GLOBAL, "scale_kernel"]


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(0.1), ClipByNorm(0.1), ClipByValue(0.1)])
def test_tables_say_where_the_gradients_are(device, launches, rule):
    sizes = (3, 0, CHUNK, CHUNK + 1, 1)
    grads = of_sizes(sizes, torch.float32, device)
    tritonclip.clip_(parameters(grads), rule)
    for launch in launches:
        tables = tables_of(launch)
        addresses, lengths, first_chunks, owners = (table.tolist() for table in tables)
        assert addresses == [grad.data_ptr() for grad in grads]
        assert lengths == list(sizes)
        assert first_chunks == [0, 1, 2, 3, 5]
        assert owners == [0, 1, 2, 3, 3, 4]
        assert next(a for a in launch.arguments if isinstance(a, int)) == 6
        assert [table.dtype for table in tables] == [*[torch.int64] * 3, torch.int32]
        assert all(table.is_contiguous() and table.device.type == device.type for table in tables)


def test_grid_is_one_wave_at_most(device, launches):
    wave = kernel_module("launch").wave(device, kernel_module("access").OCCUPANCY_2X128)
    for n_chunks in (1, wave, wave + 1):
        launches.clear()
        grads = [torch.ones(1, device=device) for _ in range(n_chunks)]
        tritonclip.clip_(parameters(grads), ClipByValue(9.0))
        assert launches[0].programs == min(n_chunks, wave)


def test_kernels_and_calls_share_their_tables(device, launches):
    given = parameters(of_sizes((3, 5), torch.float32, device))
    for _ in range(2):
        tritonclip.clip_(given, 0.1)
    first, *others = map(tables_of, launches)
    assert len(others) == 3
    assert all(a is b for tables in others for a, b in zip(first, tables, strict=True))


def test_next_call_sees_a_new_gradient(device, launches):
    """Between optimizer.zero_grad() and backward(), gradients move."""
    old = of_sizes((3, 5), torch.float32, device)
    given = parameters(old)
    tritonclip.clip_(given, 0.1)
    new = torch.full((5,), 7.0, device=device)
    given[1].grad = new
    tritonclip.clip_(given, 0.1)
    assert tables_of(launches[0])[0].tolist() == [grad.data_ptr() for grad in old]
    assert tables_of(launches[2])[0].tolist() == [old[0].data_ptr(), new.data_ptr()]
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
    table = TABLES.lay_out(torch.device("cpu"), torch.float32, sizes, addresses)
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
def tables(device, one_multiprocessor):
    """The tables of two gradients, none made yet."""
    return TABLES.ChunkTables(device, torch.float32, SIZES)


def test_tables_of_the_same_addresses_are_the_same(tables, current):
    """Else a CUDA graph captured after one call would upload its tables at every replay."""
    table = tables.table(ADDRESSES)
    assert tables.table(list(ADDRESSES)) is table
    current["capturing"] = True
    assert tables.table(ADDRESSES) is table


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
    for address in range(256, 256 + 64 * 3 * TABLES.KEPT, 64):
        tables.table([64, address])
    for table, parts in zip(held, before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(table.arguments, parts, strict=True))


def test_gradients_that_come_back_to_addresses_find_their_table(tables):
    """As in training, where memory that one step leaves goes to the next."""
    kept = TABLES.KEPT
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
    assert len(seen) <= 2 + TABLES.KEPT


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


def test_streams_write_no_addresses_of_one_another(tables, current):
    """What one of them has queued reads its own, however far the others are."""
    held: dict[int, set[int]] = {0: set(), 7: set()}
    for address in range(256, 256 + 64 * 50, 64):
        for current["stream"], own in held.items():
            own.add(tables.table([64, address]).addresses[0])
    assert not held[0] & held[7]


def test_memory_of_forgotten_streams_is_forgotten(tables, current):
    memory = []
    for current["stream"] in range(1 + TABLES.STREAMS):
        for address in (256, 320):
            row = tables.table([64, address]).row
        memory.append(weakref.ref(row.memory.tensor))
        del row
    gc.collect()
    assert [one() is None for one in memory] == [True] + [False] * TABLES.STREAMS


@pytest.mark.parametrize("places", [1, 30], ids=["there and back", "on and on"])
def test_a_stream_whose_gradients_move_is_not_forgotten(tables, current, places):
    first = tables.table(ADDRESSES)
    for other in range(1, 30):
        current["stream"] = other
        tables.table(ADDRESSES)
        current["stream"] = 0
        for address in (128, 256 + 64 * (other % places)):
            assert tables.table([64, address]).arguments[1] is first.arguments[1]


def test_addresses_of_inference_mode_are_written_outside_of_it(tables):
    tables.table(ADDRESSES)
    for address in range(256, 256 + 64 * 30, 64):
        with torch.inference_mode(address < 1000):
            assert tables.table([64, address]).arguments[0].tolist() == [64, address]


def test_tables_of_a_stream_are_not_found_on_another(tables, current):
    """What was uploaded on one stream is not yet there for another."""
    first = tables.table(ADDRESSES)
    current["stream"] = 7
    second = tables.table(ADDRESSES)
    assert all(a is not b for a, b in zip(first.arguments, second.arguments, strict=True))
    current["stream"] = 0
    assert tables.table(ADDRESSES) is first


@pytest.fixture
def uploads(monkeypatch):
    """The end of each eager upload, in order; none is reached yet."""
    made: list[Any] = []

    def recorded(device):
        made.append(Mock(query=Mock(return_value=False)))
        return made[-1]

    monkeypatch.setattr(TABLES, "_recorded", recorded)
    return made


@pytest.fixture
def landed(tables, uploads, current):
    """A table whose upload is known to have ended."""
    table = tables.table(ADDRESSES)
    uploads[0].query.return_value = True
    tables.table(list(ADDRESSES))
    return table


@pytest.fixture
def current(monkeypatch):
    """The current stream, and whether it is captured, for a test to change."""
    state = {"stream": 0, "capturing": False}
    now = lambda device: (state["stream"], state["capturing"])  # noqa: E731
    monkeypatch.setattr(TABLES, "_current_stream", now)
    monkeypatch.setattr(TABLES, "pinned_memory", TABLES.PinnedMemory())
    return state


def is_uploaded(table, other) -> bool:
    return bool(table.addresses != other.addresses)


def test_tables_that_have_landed_serve_captures_on_every_stream(tables, landed, uploads, current):
    """torch.cuda.graph captures on another stream than the warm-up."""
    for stream in (2, 3):
        current |= {"stream": stream, "capturing": True}
        assert not is_uploaded(tables.table(list(ADDRESSES)), landed)
    assert is_uploaded(tables.table([64, 256]), landed)
    assert len(uploads) == 1


def test_tables_that_are_not_known_to_have_landed_serve_their_stream_alone(
    tables, uploads, current
):
    table = tables.table(ADDRESSES)
    # Seen before the end of the upload.
    tables.table(ADDRESSES)
    uploads[0].query.return_value = True
    current |= {"stream": 2, "capturing": True}
    assert is_uploaded(tables.table(ADDRESSES), table)
    current["stream"] = 0
    assert not is_uploaded(tables.table(ADDRESSES), table)


def test_a_capture_asks_for_no_event(tables, uploads, current):
    """A query is not permitted while a stream is captured."""
    tables.table(ADDRESSES)
    query = uploads[0].query
    query.return_value = True
    for stream in (0, 2):
        current |= {"stream": stream, "capturing": True}
        tables.table(ADDRESSES)
    assert query.call_count == 0
    current |= {"stream": 0, "capturing": False}
    for _ in range(3):
        tables.table(ADDRESSES)
    assert query.call_count == 1


def test_tables_that_have_landed_serve_no_eager_call_on_another_stream(tables, landed, current):
    """What its stream frees may be written again while others still read."""
    current["stream"] = 2
    assert is_uploaded(tables.table(ADDRESSES), landed)


def test_moved_gradients_have_to_land_anew(tables, landed, current):
    moved = tables.table([64, 256])
    current |= {"stream": 2, "capturing": True}
    assert is_uploaded(tables.table([64, 256]), moved)


def test_captures_of_one_table_keep_it_once(tables, landed, current):
    current["capturing"] = True
    for current["stream"] in range(8):
        tables.table(list(ADDRESSES))
    assert sorted(TABLES.pinned_memory.captured) == sorted(map(id, landed.arguments))


def test_tables_outlive_the_graphs_that_read_them(tables, uploads, current):
    """Other calls may drop every plan and every table that an eager call finds."""
    kept = [tables.table(ADDRESSES)]
    uploads[0].query.return_value = True
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
    if known:
        tables.table([64, 256])
    upload = Mock(side_effect=TABLES.upload)
    monkeypatch.setattr(TABLES, "upload", upload)
    table = tables.table(ADDRESSES)
    ((given, *_), _) = upload.call_args
    assert upload.call_count == 1
    assert given.nbytes == (16 if known else 3 * 16 + 4 * table.n_chunks)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("own", [0, 1])
def test_capture_is_asked_of_the_device_of_the_gradients(own, current, monkeypatch):
    """A graph is captured on the second of two devices, whichever is the current one."""
    entered = captured_second_gpu(current, monkeypatch)
    monkeypatch.setattr(kernel_module("launch"), "current_stream", lambda device: 10 + device.index)
    stream = TABLES._current_stream(torch.device("cuda", own))
    assert stream == (10 + own, own == 1)
    assert entered == [current]


def test_tables_made_in_a_capture_are_found_by_no_eager_call(tables, current):
    """They hold nothing before the graph is replayed, and its replays read them for ever."""
    tables.table(ADDRESSES)
    current["capturing"] = True
    captured = tables.table([64, 256])
    current["capturing"] = False
    assert all(TABLES.pinned_memory.captured[id(one)] is one for one in captured.arguments)
    assert tables.table([64, 256]) is not captured


def test_pinned_memory_is_not_allocated_in_a_capture(monkeypatch):
    allocate = Mock(side_effect=torch.empty)
    monkeypatch.setattr(TABLES, "_pinned", allocate)
    pinned = TABLES.PinnedMemory()
    with pytest.raises(RuntimeError, match="call the same clip function once, eagerly"):
        pinned.block(100, capturing=True)
    pinned.block(100, capturing=False)
    assert allocate.call_args_list == [call(128)] * 2
    pinned.block(100, capturing=True)
    assert allocate.call_count == 2
    pinned.refill()
    assert allocate.call_args_list == [call(128)] * 3
    pinned.block(100, capturing=True)
    assert allocate.call_count == 3


@pytest.mark.parametrize("n_bytes", [0, 1, 64, 65, 128, 129])
def test_pinned_memory_holds_what_is_uploaded(n_bytes, monkeypatch):
    monkeypatch.setattr(TABLES, "_pinned", torch.empty)
    pinned = TABLES.PinnedMemory()
    assert n_bytes <= len(pinned.block(n_bytes, capturing=False)) <= max(64, 2 * n_bytes)
    assert n_bytes <= len(pinned.block(n_bytes, capturing=True))


def test_eager_call_replaces_the_pinned_memory_of_captures(
    monkeypatch, current, one_multiprocessor
):
    monkeypatch.setattr(TABLES, "_pinned", torch.empty)
    pinned = TABLES.pinned_memory
    pinned.block(100, capturing=False)
    pinned.block(100, capturing=True)
    tables = TABLES.ChunkTables(torch.device("cpu"), torch.float32, SIZES)
    current["capturing"] = True
    tables.table(ADDRESSES)
    # As what a patch lets torch serve.
    with pytest.raises(NotImplementedError, match="pinned memory while a CUDA graph is captured"):
        pinned.block(100, capturing=True)
    current["capturing"] = False
    tables.table(ADDRESSES)
    pinned.block(100, capturing=True)
