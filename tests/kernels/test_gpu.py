"""What only a GPU can show: no sync, graphs, streams, offsets over 2**31, several devices."""

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.absent_gpu import kernel_module, launches, replaced_launch
from helpers.cases import (
    CHUNK,
    assert_bits,
    assert_norm,
    check_clip,
    copies,
    each_rule,
    grad_of,
    no_sync,
    normal,
    of_sizes,
    parameters,
)
from helpers.graphs import captured
from helpers.units import make
from helpers.workers import run_in_threads
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false"
    ),
]
RULES = [*each_rule(0.5, 0.1), pytest.param(ClipByGlobalNorm(0.5, norm_type=3.0), id="global-p3")]
SIZES = (3, 4097, 2 * CHUNK + 5)
MIXED = (torch.float32, torch.bfloat16, torch.float16, torch.float32)


def mixed(device, seed=0):
    return [normal(300 + at, dtype, device, seed + at) for at, dtype in enumerate(MIXED)]


def fill(grads, values):
    for grad, value in zip(grads, values, strict=True):
        grad.copy_(value)


def assert_clipped(norm, grads, before):
    """By the global norm, to 0.5."""
    assert_norm(norm, reference.total_norm(before))
    by = reference.coefficient(norm, 0.5)
    assert_bits(grads, [reference.scaled(grad, by) for grad in before])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
def test_default_path_does_not_sync(cuda_backend, rule, policy, scale):
    """Not on a first call, not when gradients moved, not when the list changed."""
    lists = [mixed("cuda", seed) for seed in range(3)] + [of_sizes(SIZES, torch.float32, "cuda")]
    params = [parameters(grads) for grads in lists]
    with no_sync():
        for given in params:
            tritonclip.clip_(given, rule, nonfinite=policy, grad_scale=scale)


@pytest.mark.parametrize("rule", RULES)
def test_scale_on_the_device_does_not_sync(cuda_backend, rule):
    params = parameters(mixed("cuda"))
    scale = torch.full((), 1024.0, device="cuda")
    with no_sync():
        tritonclip.clip_(params, rule, grad_scale=scale)


def test_torch_signatures_do_not_sync(cuda_backend):
    params = parameters(mixed("cuda"))
    grads = [grad_of(one) for one in params]
    with no_sync():
        tritonclip.clip_grad_norm_(params, 0.5)
        tritonclip.clip_grad_value_(params, 0.1)
        tritonclip.clip_grads_with_norm_(params, 0.5, tritonclip.get_total_norm(grads))


@pytest.mark.parametrize("rule", RULES)
def test_graph_replays_on_new_values(cuda_backend, rule):
    grads = [*of_sizes(SIZES, torch.float32, "cuda"), normal(9, torch.bfloat16, "cuda")]
    params = parameters(grads)
    graph, measured = captured(lambda: tritonclip.clip_(params, rule))
    for step, factor in enumerate((1.0, 1e-5, 30.0)):
        values = [normal(g.shape, g.dtype, "cuda", 50 + step) * factor for g in grads]
        fill(grads, values)
        graph.replay()
        expected = tritonclip.clip_(parameters(values), rule)
        assert_bits(grads, values)
        if measured is not None:
            assert torch.equal(measured, expected)


def test_graph_outlives_other_calls(cuda_backend):
    """Tables that the graph reads must not be freed or refilled by later calls."""
    grads = of_sizes(SIZES, torch.float32, "cuda")
    params = parameters(grads)
    tritonclip.clip_(params, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = tritonclip.clip_(params, 0.5)
    for seed in range(40):
        other = of_sizes((seed + 1, 999, 5 * seed + 2), torch.float32, "cuda")
        tritonclip.clip_(parameters(other), 0.5)
        tritonclip.clip_(parameters([grad.clone() for grad in grads]), 0.5)
    values = of_sizes(SIZES, torch.float32, "cuda")
    fill(grads, values)
    graph.replay()
    assert_clipped(norm, grads, values)


def test_one_gradient_of_over_two_to_the_31_elements(cuda_backend):
    """bfloat16, 4 GiB; what lies beyond the offsets of an int32 is counted and clipped."""
    size = 2**31 + 2**14 + 3
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free GPU memory")
    grad = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    grad[:4] = 1.0
    grad[-4:] = 3.0
    holder = torch.nn.Parameter(torch.zeros_like(grad))
    holder.grad = grad
    assert_norm(tritonclip.clip_([holder], torch.inf), 40**0.5)
    norm = tritonclip.clip_([holder], 1.0)
    by = reference.coefficient(norm, 1.0)
    expected = [reference.scaled(torch.full((4,), v, dtype=torch.bfloat16), by) for v in (1.0, 3.0)]
    assert_bits([grad[:4], grad[-4:]], expected)
    tritonclip.clip_([holder], ClipByValue(0.25))
    assert grad[-4:].tolist() == [0.25] * 4
    grad.fill_(0.5)
    assert_norm(tritonclip.clip_([holder], torch.inf), 0.5 * size**0.5)


@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["auto", "torch"])
def test_cpu_and_cuda_gradients_share_one_norm(first, name):
    second = "cuda" if first == "cpu" else "cpu"
    devices = (first, second, first)
    grads = [normal(40 + at, device=device, seed=at) for at, device in enumerate(devices)]
    with tritonclip.use_backend(name):
        assert check_clip(grads, 0.5).device.type == first


@pytest.mark.parametrize("rule", each_rule(1.0, 1.0))
@pytest.mark.parametrize("bad", ["cpu", "cuda"])
def test_zero_reaches_every_device(rule, bad):
    grads = [normal(9, device="cpu"), normal(9, device="cuda")]
    grads[0 if bad == "cpu" else 1][3] = torch.nan
    tritonclip.clip_(parameters(grads), rule, nonfinite="zero")
    assert all(not grad.any() for grad in grads)


def test_norms_by_gradient_of_both_devices_keep_the_order():
    grads = [normal(40 + at, device="cuda" if at % 2 else "cpu", seed=at) for at in range(6)]
    assert check_clip(grads, ClipByNorm(0.5)).device.type == "cpu"


def test_two_streams_do_not_disturb_each_other(cuda_backend):
    """Tables are uploaded asynchronously: a call on one stream must not refill another's."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    lists = [
        of_sizes(sizes, torch.float32, "cuda")
        for _ in range(20)
        for sizes in (SIZES, (70, 4097, 9))
    ]
    before, norms = [copies(grads) for grads in lists], []
    torch.cuda.synchronize()
    for at, grads in enumerate(lists):
        with torch.cuda.stream(streams[at % 2]):
            norms.append(tritonclip.clip_(parameters(grads), 0.5))
    torch.cuda.synchronize()
    for result in zip(norms, lists, before, strict=True):
        assert_clipped(*result)


def test_pointers_of_a_queued_call_are_not_overwritten(cuda_backend):
    """The host runs far ahead: the stream is busy while 50 calls upload their tables."""
    busy = torch.randn(4096, 4096, device="cuda")
    lists = [of_sizes((33, 4097), torch.float32, "cuda") for _ in range(50)]
    for seed, grads in enumerate(lists):
        grads[0].fill_(float(seed))
    before = [copies(grads) for grads in lists]
    params = [parameters(grads) for grads in lists]
    torch.cuda.synchronize()
    for _ in range(30):
        busy = busy @ busy * 1e-4
    norms = [tritonclip.clip_(given, torch.inf) for given in params]
    for norm, old in zip(norms, before, strict=True):
        assert_norm(norm, reference.total_norm(old))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("rule", RULES)
def test_gradients_on_a_device_that_is_not_current(cuda_backend, rule):
    values = [of_sizes(SIZES, torch.float32, f"cuda:{at}") for at in range(2)]
    here, there = ([grad.clone() for grad in grads] for grads in values)
    with torch.cuda.device(0):
        # From the second call on, launches are known.
        for _ in range(3):
            fill((*here, *there), (*values[0], *values[1]))
            expected = tritonclip.clip_(parameters(here), rule)
            measured = tritonclip.clip_(parameters(there), rule)
        assert torch.cuda.current_device() == 0
    assert_bits(there, copies(here))
    if measured is not None:
        assert measured.device.index == 1
        assert torch.equal(measured.cpu(), expected.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_on_two_gpus_share_one_norm(cuda_backend):
    grads = [normal(40 + at, device=f"cuda:{at % 2}", seed=at) for at in range(4)]
    assert check_clip(grads, 0.5).device.index == 0


@pytest.mark.parametrize("rule", RULES)
def test_clip_waits_for_gradients_of_the_current_stream(cuda_backend, rule):
    """The call runs on the stream that is current, behind the work that makes the gradients."""
    grads = of_sizes(SIZES, torch.float32, "cuda")
    again = [grad.clone() for grad in grads]
    expected = tritonclip.clip_(parameters([grad * 3 for grad in again]), rule)
    params = parameters(grads)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        for grad in grads:
            grad.mul_(3)
        measured = tritonclip.clip_(params, rule)
        torch.cuda.current_stream().synchronize()
    if measured is not None:
        assert torch.equal(measured, expected)


@pytest.mark.parametrize("rule", RULES)
def test_compiled_launches_give_the_bits_of_the_jit(rule):
    launch = kernel_module("launch")

    def jit(kernel, device, programs, occupancy, arguments, **constants):
        kernel[(programs,)](*arguments, **constants, **launch.options_of(occupancy))

    first, second = (of_sizes(SIZES, torch.bfloat16, "cuda") for _ in range(2))
    tritonclip.clip_(parameters(first), rule)
    with replaced_launch(jit):
        tritonclip.clip_(parameters(second), rule)
    assert_bits(first, second)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
def test_known_launches_give_the_bits_of_the_first(rule, scale):
    """From the second call on, launches pass Triton by; also in a thread that is new to CUDA."""
    before = mixed("cuda")
    grads = [grad.clone() for grad in before]
    params = parameters(grads)
    results: list[list[torch.Tensor]] = []

    def clip() -> None:
        fill(grads, before)
        norm = tritonclip.clip_(params, rule, grad_scale=scale)
        results.append([*copies(grads), *([] if norm is None else [norm])])

    for _ in range(3):
        clip()
    run_in_threads(lambda thread: clip(), 1)
    torch.cuda.synchronize()
    for result in results[1:]:
        assert_bits(result, results[0])


def test_known_launches_run_on_the_current_stream(cuda_backend):
    """Known on one stream, they wait for the work of another, too."""
    grads = of_sizes(SIZES, torch.float32, "cuda")
    params, values = parameters(grads), [grad.clone() for grad in grads]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.cuda._sleep(1_000_000)
                fill(grads, values)
                norm = tritonclip.clip_(params, 0.5)
        torch.cuda.synchronize()
        assert_clipped(norm, grads, values)


@pytest.mark.parametrize("same_stream", [True, False], ids=["warm-up's", "torch's"])
def test_graph_after_a_warm_up_uploads_nothing(cuda_backend, same_stream):
    pinned = kernel_module("tables").pinned_memory
    params = parameters(of_sizes(SIZES, torch.float32, "cuda"))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            tritonclip.clip_(params, 0.5)
            side.synchronize()
    assert not pinned.taken
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side if same_stream else None):
        tritonclip.clip_(params, 0.5)
    assert not pinned.taken


def test_no_kernel_spills():
    """As the driver of this GPU loads it."""
    for one in launches():
        compiled = one.compiled()
        compiled._init_handles()
        assert compiled.n_spills == 0


UNIT_SHAPES = [(3, 4), (70, 9), (4, 1000), (2, CHUNK + 5), (5000,), ()]


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
def test_clip_by_unit_does_not_sync(cuda_backend, policy, scaled):
    """Not on a first call, not when gradients moved, not when the list changed."""
    scale = torch.full((), 1024.0, device="cuda") if scaled else None
    lists = [make(shapes, device="cuda") for shapes in (UNIT_SHAPES, UNIT_SHAPES, UNIT_SHAPES[1:4])]
    with no_sync():
        for parameters in lists:
            tritonclip.clip_(parameters, ClipByUnitNorm(), nonfinite=policy, grad_scale=scale)


def test_graph_of_clip_by_unit_replays_on_new_values(cuda_backend):
    parameters, rule = make(UNIT_SHAPES, device="cuda"), ClipByUnitNorm()
    graph, measured = captured(lambda: tritonclip.clip_(parameters, rule))
    others = make(UNIT_SHAPES, device="cuda")
    for step, factor in enumerate((1.0, 1e-5, 30.0)):
        for one, other in zip(parameters, others, strict=True):
            value = normal(one.shape, one.dtype, "cuda", 50 + step) * factor
            grad_of(one).copy_(value)
            grad_of(other).copy_(value)
        graph.replay()
        assert torch.equal(measured, tritonclip.clip_(others, rule))
        assert_bits(map(grad_of, parameters), map(grad_of, others))


def test_clip_by_unit_of_over_two_to_the_31_elements(cuda_backend):
    """bfloat16, 4 GiB; the rows beyond the offsets of an int32 are measured and clipped."""
    rows, length = 2**17 + 1, 2**14 + 16
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    weight = torch.nn.Parameter(torch.ones(rows, length, dtype=torch.bfloat16, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    weight.grad[0, :4] = 1.0
    weight.grad[-1, -4:] = 3.0
    assert_norm(tritonclip.clip_([weight], ClipByUnitNorm(1.0 / 128)), [40**0.5])
    # Rows of norm 2 and 6, for a limit of sqrt(16400) / 128 = 1.0005.
    clipped = [*weight.grad[-1, -4:].tolist(), *weight.grad[0, :4].tolist()]
    assert clipped == pytest.approx([0.5] * 8, rel=0.01)
