"""Long bfloat16 gradients on a CPU may be written through float32: the bits are the same."""

import pytest
import torch
from cases import grad_of, parameters
from torch import Tensor
from torch.autograd import forward_ad

import tritonclip
from tritonclip import ClipByNorm, ClipByValue
from tritonclip.backends import cpu_pace, cpu_wide
from tritonclip.backends.cpu_backend import CpuLayout
from tritonclip.backends.cpu_pace import Pace
from tritonclip.backends.cpu_wide import _middle_of
from tritonclip.engine.planner import plans

pytestmark = pytest.mark.usefixtures("operators")


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Lists of a size that tests can pay for are large."""
    monkeypatch.setattr(cpu_wide, "LARGE", 5000)
    monkeypatch.setattr(cpu_wide, "LONG", 100)
    monkeypatch.setattr(cpu_wide, "CONVERTED", 999)
    monkeypatch.setattr(cpu_wide, "IN_PLACE", 1200)
    # Pieces after a late one, on a busy machine, fit into scratch too.
    monkeypatch.setattr(cpu_pace, "SERIAL", 500)
    plans.clear()
    yield
    plans.clear()


@pytest.fixture(params=["never converted", "by the clock", "in place", "converted"])
def lists(request, monkeypatch):
    """Every bfloat16 value in gradients of several lengths, and the same again to compare with."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    sizes = [1, 99, 100, 5000, 20_000]
    sizes.append(len(values) - sum(sizes))
    mixed = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    grads = values[mixed].split(sizes)
    if request.param == "never converted":
        monkeypatch.setattr(cpu_wide, "LARGE", 2**40)
    elif request.param != "by the clock":

        def pace_of(*sizes: int) -> Pace:
            pace = Pace(*sizes)
            pace.way = ["in place", "converted"].index(request.param)
            return pace

        monkeypatch.setattr(cpu_pace, "TRIED", 0)
        monkeypatch.setattr(cpu_wide, "Pace", pace_of)
    return [grad.clone() for grad in grads], [grad.clone() for grad in grads]


def assert_same_bits(grads: list[Tensor], expected: list[Tensor]) -> None:
    for grad, other in zip(grads, expected, strict=True):
        assert torch.equal(grad.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("norm", [3.3, 1e3, 7e30])
def test_global_norm_gives_the_bits_of_foreach(lists, norm):
    grads, expected = lists
    tritonclip.clip_grads_with_norm_(parameters(grads), 1.0, torch.tensor(norm))
    torch._foreach_mul_(expected, 1.0 / (torch.tensor(norm) + 1e-6))
    assert_same_bits(grads, expected)


def test_each_norm_gives_the_bits_of_foreach(lists):
    grads, expected = lists
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(1e30, eps=0.0))
    coefficients = (torch.full_like(norms, 1e30) / norms).clamp(max=1.0)
    assert (coefficients < 1).any()
    torch._foreach_mul_(expected, list(coefficients.unbind()))
    assert_same_bits(grads, expected)


def test_value_gives_the_bits_of_clamp(lists):
    grads, expected = lists
    tritonclip.clip_(parameters(grads), ClipByValue(-1e-3, 2.0))
    # Bounds are rounded to the dtype first.
    low = float(torch.tensor(-1e-3, dtype=torch.bfloat16))
    assert_same_bits(grads, [grad.clamp(low, 2.0) for grad in expected])


@pytest.mark.parametrize("faster", [torch.bfloat16, torch.float32], ids=["in place", "converted"])
def test_gradients_are_written_in_the_faster_way_once_both_were_tried(faster, monkeypatch):
    now, written = 0, []
    monkeypatch.setattr(cpu_pace, "perf_counter_ns", lambda: now)

    def write_(piece: Tensor, _: int) -> Tensor:
        nonlocal now
        now += len(piece) * (1 if piece.dtype == faster else 2)
        written.append((piece.dtype, len(piece)))
        return piece.zero_()

    grads = [torch.ones(n, dtype=torch.bfloat16) for n in (1200, 999, 1200, 999, 7, 6000, 6000)]
    cpu_wide.write_widened_(grads, range(len(grads)), write_)
    assert cpu_pace.TRIED == 2
    tried = [(torch.bfloat16, n) for n in (1200, 999)]
    # The second of three is too short to tell.
    tried += [(torch.float32, n) for n in (999, 201, 999)]
    assert written[: len(tried)] == tried
    assert {dtype for dtype, _ in written[len(tried) :]} == {faster}
    assert sum(n for _, n in written) == sum(map(len, grads))
    assert not any(grad.any() for grad in grads)
    if faster == torch.bfloat16:
        assert written[-2:] == [(faster, 6000)] * 2


def test_nan_and_inf_spread_as_they_do_in_place():
    grad = torch.full((6000,), 2.0, dtype=torch.bfloat16)
    grad[0] = torch.inf
    tritonclip.clip_(parameters([grad]), 1.0)
    assert grad[0].isnan()
    assert not grad[1:].any()


def test_value_brings_inf_to_its_bound_and_keeps_nan():
    grad = torch.full((6000,), torch.inf, dtype=torch.bfloat16)
    grad[0] = torch.nan
    tritonclip.clip_(parameters([grad]), ClipByValue(1.0))
    assert grad[0].isnan()
    assert (grad[1:] == 1).all()


def test_versions_of_converted_gradients_count():
    grads = [torch.ones(6000, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)]
    before = [grad._version for grad in grads]
    tritonclip.clip_(parameters(grads), 1.0)
    assert all(grad._version > old for grad, old in zip(grads, before, strict=True))


@pytest.mark.parametrize(
    ("dtype", "sizes", "widened"),
    [
        (torch.bfloat16, [5000, 99, 100], [0, 2]),
        (torch.bfloat16, [2000, 99, 100], []),
        (torch.float16, [5000, 100], []),
        (torch.float32, [5000, 100], []),
    ],
    ids=["long ones", "a short list", "float16", "float32"],
)
def test_long_gradients_of_large_bfloat16_lists_may_be_converted(dtype, sizes, widened):
    grads = [torch.zeros(n, dtype=dtype) for n in sizes]
    assert sorted(CpuLayout(grads, flat=True).widened) == widened


def test_gradients_with_gaps_or_another_sign_are_not_converted():
    grads = [torch.zeros(6000, dtype=torch.bfloat16)]
    assert not CpuLayout(grads, flat=False).widened
    assert not CpuLayout([torch._neg_view(grads[0])], flat=True).widened


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("rule", ["norm", "value"])
def test_tangents_are_written_with_their_gradients(rule):
    with forward_ad.dual_level():
        n = 6000
        (param,) = parameters([torch.zeros(n, dtype=torch.bfloat16)])
        one = torch.ones(n, dtype=torch.bfloat16)
        param.grad = forward_ad.make_dual(one, one.clone())
        if rule == "norm":
            tritonclip.clip_grads_with_norm_([param], 1.0, torch.tensor(2.0), eps=0.0)
        else:
            tritonclip.clip_([param], ClipByValue(0.5))
        primal, tangent = forward_ad.unpack_dual(grad_of(param))
        assert (primal == 0.5).all()
        assert tangent is not None
        assert (tangent == (0.5 if rule == "norm" else 0.0)).all()


@pytest.mark.parametrize("n", [0, 1, 6, 7])
def test_pieces_lie_in_the_middle_of_scratch(n):
    """So two threads, which halve a piece, share no memory but for an element."""
    scratch = torch.arange(7)
    piece = _middle_of(scratch, n)
    assert len(piece) == n
    assert piece.tolist() == scratch[(7 - n) // 2 :][:n].tolist()
    halves = piece.tensor_split(2)
    assert not set(halves[0].tolist()) & {4, 5, 6}
    assert not set(halves[1].tolist()) & {0, 1, 2}
