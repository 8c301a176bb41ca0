"""Plain tensors, which the loops in C read and clip in one call, against the other ways."""

import math
import weakref
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tritonclip
from helpers.cases import FLOATS, FUNCTIONS, Operators, assert_bits, normal, parameters, unchanged
from helpers.lists import make, mixed, transposed
from helpers.native_lists import BLOCK, LENGTHS, amid_canaries, assert_canaries
from helpers.wrong_arguments import check_wrong_arguments
from tritonclip import ClipByGlobalNorm, ClipByNorm, functional
from tritonclip.backends.native import loops
from tritonclip.functional import c_loops

if loops is None:
    pytest.skip("tritonclip was installed without its C extension", allow_module_level=True)

RESULTS: dict[str, Any] = {
    **FUNCTIONS,
    "norm of all": lambda x, _: [functional.global_norm(x)],
    "norm beside": lambda x, limit: [functional.clip_by_global_norm(x, limit)[1]],
    "known beside": lambda x, limit: [functional.clip_by_global_norm(x, limit, 3.0)[1]],
}
REAL = [name for name in FUNCTIONS if name != "value"]
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture(params=["dlpack", "attributes"])
def reading(request):
    """Tensors are read by DLPack where PyTorch has its functions for C, and by attributes else."""
    if request.param == "attributes":
        c_loops.introduce(None)
    elif not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no functions of DLPack for C")
    yield
    c_loops.introduce()


def mixed_wide(dtype):
    return [*mixed(dtype), normal((5,), torch.float64)]


def repeated(dtype):
    """One tensor twice, and one of shared elements, which operators serve."""
    tensors = make(dtype)
    return [*tensors, tensors[0], tensors[4].expand(3)]


@pytest.fixture
def by_others(monkeypatch):
    """Runs a function without the loops of a whole call."""

    def run(function, *arguments):
        with monkeypatch.context() as patched:
            patched.setattr(c_loops, "serve", lambda: False)
            return function(*arguments)

    return run


@pytest.fixture
def count(monkeypatch):
    """The results of loops, in the order of calls; None for those that they left to others."""
    results = []

    def call(function, *arguments):
        results.append(function(*arguments))
        return results[-1]

    for name in ("clamped", "clipped", "clipped_each"):
        monkeypatch.setattr(loops, name, partial(call, getattr(loops, name)))
    return results


@pytest.mark.usefixtures("reading")
@pytest.mark.covering(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("limit", [0.5, 1e6, 0.0, -0.0, math.inf, 2])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
@pytest.mark.parametrize("some", [make, repeated, transposed, mixed, mixed_wide])
def test_results_have_the_bits_of_the_other_ways(name, limit, dtype, some, by_others):
    if dtype.is_complex and name == "value":
        pytest.skip("complex numbers have no order")
    tensors = some(dtype)
    with unchanged(tensors):
        ours, theirs = FUNCTIONS[name](tensors, limit), by_others(FUNCTIONS[name], tensors, limit)
    assert_bits(ours, theirs)
    assert [x.stride() for x in ours] == [x.stride() for x in theirs]
    # In memory that no other tensor has.
    given, own = ([x.data_ptr() for x in list_ if x.numel()] for list_ in (tensors, ours))
    assert len({*given, *own}) == len({*given}) + len(own)


@pytest.mark.covering(2)
@pytest.mark.parametrize("function", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "value", [0.5, math.nan, math.inf, -0.0, 1e30, 1e-30, 1e200, 1e-200], ids=str
)
@pytest.mark.parametrize("some", [make, mixed, mixed_wide])
def test_extremes_have_the_bits_of_the_other_ways(function, some, value, dtype, by_others):
    tensors = [*some(dtype), torch.full((3,), value, dtype=torch.float64).to(dtype)]
    assert_bits(function(tensors, 0.5), by_others(function, tensors, 0.5))


@pytest.mark.parametrize("wide", [[], [torch.float64]], ids=["narrow", "wide"])
def test_tiny_coefficients_have_the_bits_of_clip(wide):
    dtypes = (torch.float32, torch.bfloat16, *wide)
    tensors = [normal(9, seed=i).to(dtype) for i, dtype in enumerate(dtypes)]
    for clip, rule in (
        (lambda x: functional.clip_by_global_norm(x, 1e-40)[0], ClipByGlobalNorm),
        (lambda x: functional.clip_by_norm(x, 1e-40), ClipByNorm),
    ):
        ours, theirs = clip(tensors), [x.clone() for x in tensors]
        tritonclip.clip_(parameters(theirs), rule(1e-40, eps=0.0))
        assert_bits(ours, theirs)


def test_a_given_norm_of_zero_and_a_limit_of_zero_give_zero():
    (clipped,), _ = functional.clip_by_global_norm([normal(3)], 0.0, 0.0)
    assert clipped.tolist() == [0.0, 0.0, 0.0]


BOUNDS = (-math.inf, -1e300, -70000.0, -1, -0.3, -0.0, 0, 0.3, 1e-50, 2**53 + 1, 1e39, math.inf)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("low", [None, *BOUNDS])
def test_bounds_have_the_bits_of_the_other_ways(low, dtype, by_others):
    x = torch.cat([normal(70), torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])]).to(dtype)
    for high in (None, *BOUNDS):
        if (low, high) == (None, None) or (None not in (low, high) and low > high):
            continue
        clamp = partial(functional.clip_by_value, min=low, max=high)
        assert_bits([clamp(x)], [by_others(clamp, x)])


OTHERS = {
    "gaps": lambda: normal((6, 5))[:, ::2],
    "expanded": lambda: normal((1, 5)).expand(3, 5),
    "negated": lambda: torch._neg_view(normal(5)),
    "conjugate": lambda: normal(5, torch.complex64).conj(),
    "recorded": lambda: normal(5).requires_grad_(),
}


@pytest.mark.covering(2)
@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_left_to_operators(name, kind, count, by_others):
    if kind == "conjugate" and name == "value":
        pytest.skip("complex numbers have no order")
    tensors = [normal(3), OTHERS[kind](), normal(7, seed=1)]
    ours, theirs = FUNCTIONS[name](tensors, 0.5), by_others(FUNCTIONS[name], tensors, 0.5)
    assert count[0] is None
    for x, y in zip(ours, theirs, strict=True):
        assert_bits([x.detach()], [y.detach()])


@functions
def test_tensors_that_require_gradients_are_plain_where_none_is_recorded(function, count):
    x = [normal(9).requires_grad_(), torch.nn.Parameter(normal(4))]
    with torch.no_grad():
        made = function(x, 0.5)
    assert count[-1] is not None
    assert not any(y.requires_grad for y in made)
    assert_bits(made, function([y.detach() for y in x], 0.5))


@pytest.mark.parametrize("name", [name for name in REAL if name != "known"])
def test_memory_that_was_freed_is_refused(name):
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"tensors\[1\] has 1000 elements and no memory"):
        FUNCTIONS[name]([torch.ones(3), freed], 1.0)


@functions
def test_modes_see_operators(function, by_others):
    seen = []
    for run in (lambda f, *a: f(*a), by_others):
        with Operators() as operators:
            run(function, make(torch.float32), 0.5)
        seen.append([operator._schema.name for operator, *_ in operators.calls])
    assert seen[0] == seen[1]
    assert seen[0]


@pytest.mark.filterwarnings("ignore:.*Converting a tensor")
@pytest.mark.parametrize(
    "trace",
    [lambda call, x: make_fx(call, pre_dispatch=True)(x), lambda call, x: torch.jit.trace(call, x)],
    ids=["make_fx", "jit"],
)
@functions
def test_traces_see_operators(function, trace):
    """Tracers may count as no mode."""
    graph = trace(lambda x: function([x], 0.5)[0], normal(9))
    other = normal(9, seed=1) * 4
    torch.testing.assert_close(graph(other), function([other], 0.5)[0])


@functions
def test_backends_that_were_chosen_serve(function, count):
    x = make(torch.float32)
    expected = function(x, 0.5)
    assert len(count) == 1
    with tritonclip.use_backend("native"):
        assert_bits(function(x, 0.5), expected)
    assert len(count) == 2
    with tritonclip.use_backend("torch"):
        torch.testing.assert_close(function(x, 0.5), expected)
    with tritonclip.verify():
        assert_bits(function(x, 0.5), expected)
    assert len(count) == 2


def test_variables_choose_a_backend(monkeypatch, count):
    for name, value, n in (("BACKEND", "torch", 0), ("BACKEND", "native", 1), ("VERIFY", "1", 1)):
        with monkeypatch.context() as patched:
            patched.setenv(f"TRITONCLIP_{name}", value)
            functional.clip_by_value(normal(3), -1.0, 1.0)
        assert len(count) == n


def test_new_tensors_with_gaps_are_left_to_operators():
    memory = normal(9)
    x = memory[4:5].expand(4)
    assert loops.clamped([x], lambda x: x, -0.1, 0.1) is None
    assert_bits([memory], [normal(9)])


@functions
def test_many_tensors_and_threads_change_no_bit(function, set_threads, by_others):
    tensors = [normal(n, seed=n) for n in (*range(70), 3 * loops.SHARED + 5, BLOCK, 0)]
    expected = by_others(function, tensors, 0.5)
    for threads in (1, 2):
        set_threads(threads)
        assert_bits(function(tensors, 0.5), expected)


@pytest.mark.plain_empty
@functions
def test_lists_may_change_meanwhile(function, monkeypatch):
    """While tensors are made, as other threads may, or code that runs when an object is dropped."""
    tensors, create = [normal(2000, seed=i) for i in range(5)], torch.empty_like
    alive, expected = weakref.ref(tensors[4]), function(tensors, 0.5)

    def empty_like(x):
        tensors.clear()
        assert alive() is not None
        return create(x)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    assert_bits(function(tensors, 0.5), expected)


@pytest.mark.plain_empty
@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("name", ["value", "norm", "global"])
@pytest.mark.parametrize("of_all", [True, False])
@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.to("meta"),
        lambda x: x.new_empty((*x.shape, 2)),
        lambda x: x.double(),
        lambda x: x.new_empty(1).expand(x.shape) if x.dim() else x.to("meta"),
        lambda x: x.to_sparse() if x.dim() else x.to("meta"),
    ],
    ids=["device", "size", "dtype", "expanded", "sparse"],
)
def test_modes_may_make_other_tensors(name, of_all, other):
    """Such ones are not written to."""
    made = lambda x: other(x) if of_all or not x.dim() else torch.empty_like(x)  # noqa: E731
    verbs: dict[str, Any] = {
        "value": lambda x: loops.clamped(x, made, -0.5, 0.5),
        "norm": lambda x: loops.clipped_each(x, made, 0.5, 2.0, 0.0),
        "global": lambda x: loops.clipped(x, made, 0.5, None),
    }
    assert (verbs[name]([normal(9)]) is None) == (of_all or name == "global")


@pytest.mark.plain_empty
@functions
def test_interrupts_end_a_call(function):
    interrupted = patch.object(torch, "empty_like", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        function([normal(3)], 0.5)


@pytest.mark.plain_empty
@pytest.mark.usefixtures("both_forms")
@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["value", "norm"])
def test_every_length_and_alignment_is_written_and_no_more(
    name, length, offset, dtype, monkeypatch, by_others
):
    x = normal(length + offset, dtype)[offset:]
    expected = by_others(FUNCTIONS[name], [x], 0.5)
    own, memory = amid_canaries(torch.full_like(x, math.nan), offset)
    monkeypatch.setattr(torch, "empty_like", lambda _: own)
    assert_bits(FUNCTIONS[name]([x], 0.5), expected)
    assert_canaries(memory, own)


VERBS = {
    "clamped": "leaves, like, bound, any",
    "clipped": "leaves, like, limit, any",
    "clipped_each": "leaves, like, limit, order, number",
    "measured": "leaves, like",
}


def test_wrong_arguments_raise_and_change_nothing():
    check_wrong_arguments(VERBS, "from tritonclip.functional import c_loops; c_loops.introduce()")
