"""What gradients become in cases that random lists do not meet, and with which bits every time."""

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    FLOATS,
    INTERPRETED,
    LARGE,
    MANY,
    SIZES,
    assert_bits,
    check_clip,
    each_rule,
    normal,
    of_sizes,
    parameter,
    parameters,
    unchanged,
)
from helpers.workers import NEEDS_FORK, run_in_fork
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue


@pytest.mark.parametrize("rule", each_rule(4.0, 0.5))
def test_clip_of_many_tensors(device, rule):
    check_clip(of_sizes((1 + seed % 40 for seed in range(MANY)), torch.float32, device), rule)


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_below_the_limit_changes_no_bit(device, dtype):
    grads = of_sizes(SIZES, dtype, device)
    grads[2][0] = -0.0
    with unchanged(grads):
        check_clip(grads, 1e3)


def test_clip_without_eps_leaves_a_norm_equal_to_the_limit(device):
    grad = torch.tensor([3.0, -4.0], device=device)
    tritonclip.clip_([parameter(grad)], ClipByGlobalNorm(5.0, eps=0.0))
    assert grad.tolist() == [3.0, -4.0]


@pytest.mark.parametrize("limit", [1, 0.25], ids=["int", "float"])
def test_clip_with_a_number_is_by_global_norm(device, limit):
    grads = of_sizes((7, 4097), torch.float32, device)
    again = [grad.clone() for grad in grads]
    norm = tritonclip.clip_(parameters(grads), limit)
    other = check_clip(again, ClipByGlobalNorm(limit, norm_type=2.0, eps=1e-6))
    assert_bits([*grads, norm], [*again, other])
    assert reference.total_norm(grads) == pytest.approx(limit, rel=1e-5)


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read gradients that are dense")
@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_norm_keeps_apart_what_is_measured_in_different_ways(device, dtype):
    """Rows of 128, gathered up to 8,192 elements; zeros, gaps and tiny values go other ways."""
    grads = of_sizes((127, 128, 129, 8191, 8192, 8193, 9000, 40_000), dtype, device)
    grads[1].zero_()
    grads[3] = normal((50, 80), dtype, device)[:, :70]
    grads[5] *= 2.0**-14
    grads[6][100:] = 0
    norms = check_clip(grads, ClipByNorm(0.75))
    assert norms[1] == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_value_within_bounds_changes_no_bit(device, dtype):
    grads = of_sizes((5, 4097, CHUNK + 1), dtype, device)
    grads[0][:3] = torch.tensor([-0.0, torch.finfo(dtype).tiny / 2, 5.0])
    with unchanged(grads):
        tritonclip.clip_(parameters(grads), ClipByValue(-5.0, 5.0))


@NEEDS_FORK
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("rule", [ClipByGlobalNorm, ClipByNorm, ClipByValue])
def test_clip_below_the_limit_does_not_write(backend, rule, tmp_path):
    """The gradient lies in read-only memory, where a store of the same value is fatal too."""
    if backend.device.type != "cpu":
        pytest.skip("device memory cannot be made read-only")
    if backend.deferred:
        pytest.skip("operators multiply by 1 where the host does not decide")
    if (backend.name, rule) == ("torch", ClipByValue):
        pytest.skip("on a CPU a look at the elements costs as much as to clamp them")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "grad"
    path.write_bytes(normal(CHUNK + 5).numpy().tobytes())
    grad = torch.from_numpy(numpy.memmap(path, dtype="float32", mode="r"))
    # A store ends the process.
    run_in_fork(lambda: tritonclip.clip_(parameter(grad), rule(1e4)))


RULES = [*each_rule(0.5, 0.1), pytest.param(ClipByGlobalNorm(0.5, norm_type=3.0), id="global-p3")]


def run(rule, dtype, device):
    """One call on fresh copies of the same values."""
    grads = of_sizes((3, LARGE, CHUNK - 1), dtype, device)
    measured = tritonclip.clip_(parameters(grads), rule)
    return grads if measured is None else [*grads, measured]


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_clip_gives_equal_bits_on_every_run(device, rule, dtype):
    first = run(rule, dtype, device)
    for _ in range(1 if INTERPRETED else 4):
        assert_bits(run(rule, dtype, device), first)


@pytest.mark.covering(2)
@pytest.mark.skipif(INTERPRETED, reason="kernels do not run in the threads of torch")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_threads_of_torch_change_no_bit(device, set_threads, rule, dtype):
    alone = run(rule, dtype, device)
    for n_threads in (2, 3):
        set_threads(n_threads)
        assert_bits(run(rule, dtype, device), alone)


def test_clip_is_not_disturbed_by_calls_in_between(device):
    """Tables and scratch memory are kept between calls; what they held must not show."""
    rule = ClipByGlobalNorm(0.5)
    first = run(rule, torch.float32, device)
    for value in (torch.nan, torch.inf, 0.0):
        grads = [torch.full((size,), value, device=device) for size in (3, LARGE, CHUNK - 1)]
        tritonclip.clip_(parameters(grads), rule)
        assert_bits(run(rule, torch.float32, device), first)


def test_norms_of_earlier_calls_stay(device):
    """What is returned is not scratch memory that the next call fills again."""
    rules = (ClipByGlobalNorm(1.0), ClipByNorm(1.0))
    first = parameter(normal(CHUNK + 1, device=device))
    other = parameter(torch.full((CHUNK + 1,), 9.0, device=device))
    with unchanged([tritonclip.clip_([first], rule) for rule in rules]):
        for rule in rules:
            tritonclip.clip_([other], rule)
