"""Plans serve only lists of the form that they were made for; their cache forgets in turn.

Only one group of gradients is clipped directly, and all of several have every norm.
"""

import contextlib
import platform
import runpy
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    Operators,
    assert_bits,
    copies,
    each_rule,
    grad_of,
    normal,
    of_sizes,
    parameter,
    parameters,
)
from helpers.serving import forget_plans
from helpers.workers import python
from tritonclip.backends.torch import TorchBatch
from tritonclip.engine import execute, plan_cache
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import _join
from tritonclip.engine.plan_cache import CAPACITY, PlanCache

SIZES = (5, 1, 24)


def contiguous() -> list[Tensor]:
    return [normal(n) for n in SIZES]


def mixed() -> list[Tensor]:
    return [normal(3), normal(4, dtype=torch.bfloat16), normal(3), normal(2, dtype=torch.float64)]


def channels_last() -> list[Tensor]:
    dense = normal(96).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return [normal(3), dense, normal(4, dtype=torch.float64), normal(15).view(3, 5).t()]


def negated() -> list[Tensor]:
    return [torch._neg_view(normal(3)), normal(3)]


def gaps() -> list[Tensor]:
    return [normal(6)[::2], normal(3)]


def complex_pairs() -> list[Tensor]:
    return [normal(3, dtype=torch.complex64), normal(3), normal(4, dtype=torch.complex64).conj()]


def partly_inference() -> list[Tensor]:
    with torch.inference_mode():
        last = normal(4)
    return [normal(3), normal(5), last]


LISTS = [
    pytest.param(make, id=make.__name__)
    for make in (contiguous, mixed, channels_last, negated, gaps, complex_pairs, partly_inference)
]


def planned(grads: list[Tensor], plans: PlanCache) -> Gradients:
    return Gradients(grads[0].device, "tensors[{}]".format).take_(list(grads), plans)


def described(gradients: Gradients) -> list[tuple[object, ...]]:
    assert gradients.plan is not None
    result: list[tuple[object, ...]] = []
    for group in gradients.plan.groups:
        tensors, addresses = gradients.of_group(group.indices)
        indices = range(len(tensors)) if group.indices is None else group.indices
        # Each call makes its own copies of staged gradients.
        read = [
            (0 if i in gradients.copies else t.data_ptr(), t.shape, t.stride(), t.is_neg(), t.dtype)
            for i, t in zip(indices, tensors, strict=True)
        ]
        assert addresses is None or addresses == [t.data_ptr() for t in tensors]
        result.append((read, group.device, group.dtype, group.pairs))
    return result


@pytest.mark.parametrize("make", LISTS)
@pytest.mark.parametrize("again", [True, False], ids=["the same", "others"])
def test_a_plan_serves_lists_of_the_form_it_was_built_for(plans, built, make, again):
    grads = make()
    first = planned(grads, plans)
    other = grads if again else make()
    second = planned(other, plans)
    assert second.plan is first.plan
    assert len(built) == 1
    assert described(second) == described(planned(other, PlanCache()))


CHANGES: dict[str, Any] = {
    "size": lambda g: normal((6, 2)),
    "shape": lambda g: g.view(2, 5),
    "dtype": lambda g: g.double(),
    "strides": lambda g: normal((10, 2))[::2],
    "resized in place": lambda g: g.resize_(2),
    "transposed in place": lambda g: g.t_(),
    "emptied in place": lambda g: g.set_(),
    "negated": torch._neg_view,
    "requires-grad": lambda g: g.clone().requires_grad_(),
    "sparse": lambda g: g.to_sparse(),
    "type": torch.nn.Parameter,
    "device": lambda g: torch.empty_like(g, device="meta"),
    "inference": torch.inference_mode()(torch.clone),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("place", [0, 2])
def test_a_changed_gradient_has_no_plan(plans, built, changed, place):
    grads = [normal((5, 2)) for _ in range(3)]
    planned(grads, plans)
    grads[place] = changed(grads[place])
    planned(grads, plans)
    assert len(built) == 2


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_plan_serves_the_backend_it_was_built_for(plans, built, backend):
    grads = contiguous()
    planned(grads, plans)
    with tritonclip.use_backend(backend):
        planned(grads, plans)
    assert len(built) == (1 if backend == "auto" else 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda grads: [grad.bfloat16() for grad in grads],
        lambda grads: [normal(3), *grads[1:]],
        lambda grads: [*grads[:2], normal(3)],
    ],
    ids=["dtype", "first", "last"],
)
def test_lists_of_one_length_keep_both_plans(plans, built, other):
    lists = [contiguous(), other(contiguous())]
    for grads in lists * 3:
        planned(grads, plans)
    assert len(built) == 2


def test_a_sparse_gradient_is_read_anew_at_every_call(plans, built):
    grads = [normal(3).to_sparse()]
    planned(grads, plans)
    planned(grads, plans)
    assert len(built) == 2


@pytest.mark.parametrize("missing", ["class", "module"])
def test_guards_in_python_take_the_place_of_missing_ones(missing, monkeypatch):
    if missing == "class":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        monkeypatch.setitem(sys.modules, "torch._C._dynamo", None)
    assert runpy.run_path(plan_cache.__file__)["TensorGuards"] is None


def test_torch_has_the_guards():
    """Without them calls are slower: a PyTorch that moved them should be noticed here."""
    assert plan_cache.TensorGuards is not None


def test_a_list_that_cannot_be_recognised_has_no_plan_kept(plans):
    """A gradient, and another tensor of its memory."""
    grads = [normal(4), normal(5)]
    planned([*grads, grads[0].detach()], plans)
    assert not len(plans)


@pytest.mark.parametrize("make", LISTS)
def test_a_list_with_a_gradient_listed_twice_has_a_plan(plans, built, make):
    grads = make()
    alone = planned(grads, plans)
    for tied in ([*grads, grads[0]], [grads[0], *grads], [g for g in grads for _ in range(2)]):
        for _ in range(2):
            found = planned(tied, plans)
            assert found.plan is alone.plan
            assert described(found) == described(alone)
            assert found.label(1) == f"tensors[{[g is grads[1] for g in tied].index(True)}]"
    assert len(built) == 1


def test_a_gradient_listed_twice_and_one_of_its_memory_count_once(plans):
    grads = [normal(4), normal(5)]
    found = planned([grads[0], grads[0], grads[0].detach(), grads[1]], plans)
    assert [tensor.data_ptr() for tensor in found.tensors] == [g.data_ptr() for g in grads]
    assert found.label(1) == "tensors[3]"


def test_an_empty_gradient_listed_twice_counts_once_in_a_known_form(guards):
    forget_plans()
    two = [torch.empty(0), normal(3), torch.empty(0)]
    for _ in range(2):
        assert len(tritonclip.clip_([parameter(g) for g in two], tritonclip.ClipByNorm(1.0))) == 3
        one = parameter(torch.empty(0))
        given = [one, parameter(normal(3)), one]
        assert len(tritonclip.clip_(given, tritonclip.ClipByNorm(1.0))) == 2


def test_several_empty_gradients_have_a_plan_but_none_beside_one_that_was_freed(plans, built):
    for _ in range(3):
        grads = [normal(4), torch.empty(0), normal(5), torch.empty(0)]
        planned(grads, plans)
    assert len(built) == 1
    grads[2].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        planned(grads, plans)


def test_no_plan_is_kept_of_a_list_met_under_a_dispatch_mode(plans):
    """Such a mode may hand out other tensors than asked for, as scratch too."""
    grads = contiguous()
    with Operators():
        planned(grads, plans)
    assert not len(plans)
    planned(grads, plans)
    assert len(plans) == 1


def test_a_kept_plan_is_not_filled_under_a_dispatch_mode(device):
    """Scratch of such a mode would serve every later call."""
    forget_plans()
    params = [parameter(normal(n, device=device)) for n in SIZES]
    tritonclip.clip_(params, tritonclip.ClipByValue(100.0))
    with contextlib.suppress(RuntimeError), FakeTensorMode(allow_non_fake_inputs=True):
        tritonclip.clip_(params, 1e9)
    expected = tritonclip.get_total_norm([normal(n, device=device) for n in SIZES])
    assert tritonclip.clip_(params, 1e9) == expected


@torch.library.custom_op("inside::clip", mutates_args={"a", "b"})
def clip_inside(a: Tensor, b: Tensor) -> Tensor:
    return tritonclip.clip_([parameter(a), parameter(b)], 1.0)


def test_a_list_met_inside_a_custom_operator_says_nothing_of_inference_mode(guards):
    """Inside, a normal tensor has the dispatch keys of one made in inference mode."""
    forget_plans()
    for _ in range(2):
        clip_inside(torch.ones(5), torch.ones(5))
    with torch.inference_mode():
        grads = [torch.full((5,), 2.0) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="made in inference mode"):
            tritonclip.clip_([parameter(grad) for grad in grads], 1.0)
    assert all((grad == 2).all() for grad in grads)
    clip_inside(torch.ones(5), torch.ones(5))


def test_no_gradient_is_kept_alive(plans):
    grads = contiguous()
    planned(grads, plans)
    planned(grads, plans)
    alive = [weakref.ref(grad) for grad in grads]
    del grads
    assert len(plans) == 1
    assert not any(ref() is not None for ref in alive)


def test_the_list_not_met_for_longest_is_forgotten(plans, built):
    lists = [[normal(n)] for n in range(1, CAPACITY + 2)]
    for grads in lists[:-1]:
        planned(grads, plans)
    planned(lists[0], plans)
    planned(lists[-1], plans)
    assert len(plans) == CAPACITY
    assert len(built) == len(lists)
    planned(lists[0], plans)
    assert len(built) == len(lists)
    planned(lists[1], plans)
    assert len(built) == len(lists) + 1


def test_plans_over_the_budget_are_forgotten(plans, built, monkeypatch):
    """Those not met for longest; the last one stays, however large it is."""
    lists = [[normal(n) for _ in range(10)] for n in (1, 2, 3)]
    largest = [normal(n) for n in range(100)]
    kept = [planned(grads, plans).plan for grads in lists]
    monkeypatch.setattr(plan_cache, "BUDGET", sum(plan.n_bytes for plan in kept if plan))
    planned(lists[0], plans)
    assert (len(plans), len(built)) == (3, 3)
    lists.append([normal(4)])
    planned(lists[3], plans)
    planned(lists[0], plans)
    assert (len(plans), len(built)) == (3, 4)
    planned(lists[1], plans)
    assert len(built) == 5
    for _ in range(2):
        planned(largest, plans)
        assert (len(plans), len(built)) == (1, 6)


# Every byte comes from malloc, which counts them.
MEASURE = """
import ctypes, gc, torch, tritonclip
from tritonclip.engine.plan_cache import plans

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
# What is imported by now is not looked through again.
gc.freeze()

def taken():
    gc.collect()
    info = libc.mallinfo2()
    return info.e + info.h

def params_of(last, n, shape, dtype, **form):
    params = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in [shape] * n + [last]]
    for param in params:
        param.grad = param.detach().clone(**form)
    return params

def measure(*arguments, **form):
    lists = [params_of(last, *arguments, **form) for last in (1, 2)]
    before = taken()
    for params in lists:
        for _ in range(2):
            tritonclip.clip_(params, tritonclip.ClipByNorm(0.1))
    print(taken() - before, sum(plan.n_bytes for plan in plans._plans.values()))
    plans.clear()

for backend in ("native", "torch"):
    with tritonclip.use_backend(backend):
        measure(5, (7,), torch.float32)
        measure(1000, (7,), torch.float32)
        measure(600, (2, 3, 2, 2), torch.float32)
        measure(600, (8, 3), torch.bfloat16)
        measure(600, (7,), torch.complex64)
        measure(500, (7,), torch.float64)
        measure(500, (2, 3, 4, 5), torch.float32)
        measure(200, (2000,), torch.float32)
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.33"), reason="glibc 2.33 has mallinfo2")
def test_plans_take_no_more_than_they_count():
    done = python("-c", MEASURE, PYTHONMALLOC="malloc")
    assert done.returncode == 0, done.stderr
    sizes = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(sizes) == 16
    # The first call of a backend fills other caches.
    for taken, counted in sizes[1:8] + sizes[9:]:
        # Forms differ, so that one number a gradient fits none exactly.
        assert 0.4 * counted < taken <= counted


@pytest.mark.parametrize("is_last", [True, False], ids=["last list", "earlier list"])
def test_a_plan_forgotten_while_it_is_found_serves_the_call(plans, built, is_last):
    """Another thread may drop it between the look-up and the note that it was used."""
    grads = contiguous()
    first = planned(grads, plans).plan
    assert first is not None
    check = first.guards.check
    if not is_last:
        planned([normal(3)], plans)

    class Forgetting:
        def check(self, *tensors):
            plans.clear()
            return check(*tensors)

    first.guards = Forgetting()
    assert planned(grads, plans).plan is first
    n_built = len(built)
    planned(grads, plans)
    assert len(built) == n_built + is_last


RULES = [*each_rule(0.5, 0.1), pytest.param(tritonclip.ClipByNorm(0.5, norm_type=3.0), id="p=3")]


@pytest.fixture
def only_directly(monkeypatch):
    """Refuses to measure first and write then, as for other lists."""

    def refused(*_, **__):
        raise AssertionError("measured before it was written")

    with monkeypatch.context() as patch:
        patch.setattr(execute, "measure", refused)
        patch.setattr(execute, "write_", refused)
        yield patch


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_direct_clipping_gives_the_bits_of_measuring_first(
    device, dtype, scale, rule, only_directly
):
    grads = of_sizes((5, 40, 1, CHUNK + 1), dtype, device)
    direct, measured = parameters(grads), parameters([grad.clone() for grad in grads])
    norm = tritonclip.clip_(direct, rule, grad_scale=scale)
    only_directly.undo()
    same = tritonclip.clip_(measured, rule, nonfinite="error", grad_scale=scale)
    assert_bits(map(grad_of, direct), map(grad_of, measured))
    assert norm is same is None or torch.equal(norm, same)


@pytest.mark.parametrize("rule", RULES)
def test_calls_that_are_verified_measure_first(device, rule, monkeypatch):
    params = parameters(of_sizes((5, 40), torch.float32, device))
    written, write_ = [], execute.write_

    def noted(gradients, *args, **kwargs):
        written.append(gradients.tensors[0])
        return write_(gradients, *args, **kwargs)

    monkeypatch.setattr(execute, "write_", noted)
    with tritonclip.verify():
        tritonclip.clip_(params, rule)
    # The check itself clips copies.
    assert sum(grad is params[0].grad for grad in written) == 1


def test_lists_of_two_groups_are_measured_first(device, only_directly):
    grads = [*of_sizes((5,), torch.float32, device), *of_sizes((5,), torch.float64, device)]
    with pytest.raises(AssertionError, match="measured before"):
        tritonclip.clip_(parameters(grads), 0.5)


def test_rules_that_clamp_one_list_in_turn_each_have_their_bounds(device, verbs):
    """Also rules that are equal, as those with -0.0 and 0.0 are."""
    grads = of_sizes((5, 40), torch.float32, device)
    held, fresh = parameters(grads), copies(grads)
    bounds = [(-0.5, 0.5), (-0.1, 0.2), (-0.0, 0.3), (0.0, 0.3), (-0.1, 0.2)]
    rules = [tritonclip.ClipByValue(*pair) for pair in bounds]
    for rule, pair in [*zip(rules, bounds, strict=True)] * 2:
        for grad, values in zip(grads, fresh, strict=True):
            grad.copy_(values)
        tritonclip.clip_(held, rule)
        expected = [reference.clamped(values, *pair) for values in fresh]
        if verbs is TorchBatch and device.type == "cuda":
            # PyTorch's foreach functions gave 0.0 for a bound of -0.0 here, on an H200.
            torch.testing.assert_close(copies(grads), expected, rtol=0, atol=0)
        else:
            assert_bits(grads, expected)


# No tensor lies on the second, but it is another device to whoever asks.
FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0)


def test_every_group_gets_the_norms_of_all_in_one_order():
    partials = [torch.tensor([1.0, 2.0]), [4.0], torch.tensor([3.0])]
    joined = _join(partials, [FIRST, FIRST, SECOND])
    assert [norms.tolist() for norms in joined] == [[1.0, 2.0, 4.0, 3.0]] * 3
    # Those of the host alone stay numbers.
    assert _join([[1.0], [2.0, 3.0]], [FIRST, FIRST]) == [[1.0, 2.0, 3.0]] * 2


def test_weights_of_a_plan_count_once_in_the_budget():
    """Also where layouts are made again, for weights that lie in another way."""
    grads = [normal((4, 6)), normal((3, 5))]
    params = parameters(grads)
    cache = plan_cache.plans
    cache.clear()
    tritonclip.clip_(params, 1.0)
    (plan,) = cache._plans.values()
    taken = [plan.n_bytes]
    for weights in ([torch.ones(4, 6), torch.ones(3, 5)], [torch.ones(6, 4).mT, torch.ones(3, 5)]):
        for one, weight in zip(params, weights, strict=True):
            one.data = weight
        tritonclip.clip_(params, tritonclip.ClipByUnitNorm(0.1))
        taken.append(plan.n_bytes)
    assert cache._plans.popitem()[1] is plan
    assert taken[0] < taken[1] == taken[2]
