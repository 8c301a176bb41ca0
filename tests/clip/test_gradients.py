"""Which gradients a call clips: every form of ``parameters``, ties, exclusions, mixed lists."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import (
    CHUNK,
    assert_bits,
    assert_norm,
    check_clip,
    each_rule,
    grad_of,
    normal,
    of_sizes,
    parameter,
    parameters,
    untouched,
)
from tritonclip import ClipByValue

RULES = each_rule(1.0, 1.0)
LOW = each_rule(0.5, 0.1)
FORMS = {
    "list": lambda module: list(module.parameters()),
    "tuple": lambda module: tuple(module.parameters()),
    "generator": lambda module: module.parameters(),
    "iterator": lambda module: iter(list(module.parameters())),
    "dict-values": lambda module: dict(module.named_parameters()).values(),
    "module": lambda module: module,
    "pairs": lambda module: list(module.named_parameters()),
    "pair-generator": lambda module: module.named_parameters(),
    "dict-items": lambda module: dict(module.named_parameters()).items(),
}


def a_module(device):
    """Two layers with gradients, and a parameter without one."""
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)).to(device)
    for seed, one in enumerate(list(module.parameters())[:-1]):
        one.grad = normal(one.shape, device=device, seed=seed)
    return module


@pytest.mark.parametrize("form", FORMS)
def test_clip_takes_every_form_of_parameters(device, form):
    module = a_module(device)
    grads = [one.grad for one in module.parameters() if one.grad is not None]
    check_clip(grads, 0.5, FORMS[form](module))


def test_clip_takes_one_tensor(device):
    one = parameter(torch.tensor([3.0, 4.0], device=device))
    assert_norm(tritonclip.clip_(one, 1.0), 5.0)
    torch.testing.assert_close(grad_of(one).cpu(), torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("make", [list, tuple, torch.nn.ParameterList], ids=lambda m: m.__name__)
def test_clip_of_nothing_gives_zero_without_a_warning(backend, make):
    norm = tritonclip.clip_(make([]), 1.0)
    assert norm.item() == 0.0
    assert norm.shape == ()
    assert norm.dtype == torch.float32


def test_clip_without_gradients_gives_zero_on_the_device_of_the_parameters(device):
    norm = tritonclip.clip_(iter([parameter(None, device)]), 1.0)
    assert norm.item() == 0.0
    assert norm.device.type == device.type


@pytest.mark.parametrize("rule", RULES)
def test_clip_of_an_exhausted_generator_warns(backend, rule):
    used = (one for one in [parameter(torch.ones(2, device=backend.device))])
    list(used)
    with pytest.warns(tritonclip.ClippingWarning, match="`parameters` is an empty gen") as caught:
        tritonclip.clip_(used, rule)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "make",
    [lambda one: (p for p in [one]), lambda one: [one], lambda one: filter(None, [])],
    ids=["generator", "list", "filter"],
)
def test_clip_without_a_gradient_does_not_warn(device, make):
    for _ in range(4):
        tritonclip.clip_(make(parameter(None, device)), 1.0)


@pytest.mark.parametrize("alias", ["same", "view_as", "detach"])
def test_clip_counts_a_gradient_of_two_parameters_once(device, alias):
    grad = torch.tensor([3.0, 4.0], device=device)
    other = {"same": grad, "view_as": grad.view_as(grad), "detach": grad.detach()}[alias]
    assert_norm(tritonclip.clip_(parameters([grad, other]), 1.0), 5.0)
    torch.testing.assert_close(grad.cpu(), torch.tensor([0.6, 0.8]))


def test_clip_counts_different_parts_of_one_buffer_each(device):
    """As FSDP and flat buffers make them: one storage, no element twice."""
    buffer = normal(2 * CHUNK, device=device)
    params = parameters([buffer[:9], buffer[9 : CHUNK + 2], buffer[CHUNK + 2 :]])
    check_clip([buffer], 0.5, params)


GRIDS = {
    "transposed": lambda grid: grid.t(),
    "unsqueezed": lambda grid: grid.unsqueeze(1),
    "unflattened": lambda grid: grid.unflatten(0, (2, 2)),
}


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@pytest.mark.parametrize("rule", LOW)
@pytest.mark.parametrize("again", GRIDS)
def test_clip_counts_the_same_elements_with_gaps_once(device, again, rule):
    grad, other = normal((4, 5), device=device)[:, :3], normal(3, device=device)
    check_clip([grad, other], rule, parameters([grad, GRIDS[again](grad), other]))


PARTS = {
    "halves that meet": lambda buffer: (buffer[:21], buffer[20:]),
    "one inside the other": lambda buffer: (buffer, buffer[7:9]),
    "another dtype": lambda buffer: (buffer, buffer.view(torch.complex64)),
    # As many elements, or half as many bytes.
    "another dtype of one size": lambda x: (x.view(torch.int32).view(torch.bfloat16), x),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", LOW)
@pytest.mark.parametrize("parts", PARTS)
def test_clip_refuses_gradients_that_share_a_part_of_their_memory(device, parts, rule):
    """The part would count and be scaled twice."""
    buffer, other = normal(40, device=device), normal(5, device=device)
    params = parameters([other, *PARTS[parts](buffer)])
    for _ in range(2):
        refused = pytest.raises(ValueError, match=r"parameters\[1\] and parameters\[2\] overlap")
        with untouched([buffer, other]), refused:
            tritonclip.clip_(params, rule)


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@pytest.mark.parametrize("rule", LOW)
def test_clip_takes_gradients_that_lie_between_one_another(device, rule):
    buffer = normal((8, 6), device=device)
    grads = [buffer[:4, 1:3], buffer[:4, 3:], buffer[:4, :1], buffer[4::2], buffer[5::2]]
    check_clip(grads, rule)


@pytest.mark.parametrize("clip", [0.5, ClipByValue(0.1)], ids=["norm", "value"])
def test_clip_writes_an_element_of_a_row_and_a_column_once(device, clip):
    grid = normal((8, 5), device=device)
    check_clip([grid[:, 3], grid[2]], clip)


@pytest.mark.parametrize("rule", LOW)
def test_clip_of_interleaved_columns(device, rule):
    grid = normal((3, 60), device=device)
    check_clip(list(grid.unbind(1)), rule)


def test_clip_of_interleaved_columns_takes_linear_time():
    """In lines of the library that run, for a list that is planned anew."""

    def n_lines(n: int) -> int:
        lines = 0

        def count(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if "tritonclip" not in frame.f_code.co_filename:
                return None
            lines += event == "line"
            return count

        params = parameters(list(normal((2, n)).unbind(1)))
        before = sys.gettrace()
        sys.settrace(count)
        try:
            tritonclip.clip_(params, 1.0)
        finally:
            sys.settrace(before)
        return lines

    assert n_lines(2000) < 2.1 * n_lines(1000)


@pytest.mark.parametrize("rule", RULES)
def test_clip_leaves_out_parameters_that_need_no_clip(device, rule):
    grads = [torch.tensor(values, device=device) for values in ([3.0, 4.0], [9.0, torch.nan])]
    kept, left_out = parameters(grads)
    left_out.need_clip = False  # type: ignore[attr-defined]
    kept.need_clip = True  # type: ignore[attr-defined]
    with untouched(grads[1:]):
        measured = tritonclip.clip_([left_out, kept], rule, nonfinite="error")
    assert grads[0][1].item() < 4.0
    if measured is not None:
        assert_norm(measured.reshape(()), 5.0)


@pytest.mark.parametrize("rule", RULES)
def test_clip_takes_empty_and_0d_gradients(device, rule):
    empty = [torch.zeros(shape, device=device) for shape in (0, (3, 0, 2))]
    grad = torch.tensor(-8.0, device=device)
    tritonclip.clip_(parameters([empty[0], grad, empty[1]]), rule)
    assert grad.shape == ()
    assert grad.item() == pytest.approx(-1.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_gradient_has_no_clipping_by_value(device, dtype):
    grads = [torch.full((3,), 8.0, device=device), normal(3, dtype, device)]
    with untouched(grads), pytest.raises(TypeError, match="complex"):
        tritonclip.clip_(parameters(grads), ClipByValue(1.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_float8_is_refused(device, dtype):
    grads = of_sizes((40, 3), torch.float32, device)
    grads[1] = grads[1].to(dtype)
    message = f"gradient of parameters.1. has dtype {dtype}; clip in float32 or bfloat16, before"
    for rule in (1.0, tritonclip.ClipByValue(0.5)):
        with untouched(grads[:1]), pytest.raises(TypeError, match=message):
            tritonclip.clip_([parameter(grad) for grad in grads], rule)


@pytest.mark.parametrize("rule", LOW)
def test_clip_in_inference_mode(device, rule):
    grads = of_sizes((3, 4097), torch.float32, device)
    again = [grad.clone() for grad in grads]
    tritonclip.clip_(parameters(again), rule)
    with torch.inference_mode():
        params = parameters([grads[0], grads[1].clone()])
        tritonclip.clip_(params, rule)
        assert_bits(map(grad_of, params), again)


def test_parameters_before_their_first_backward_get_no_warning():
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2), False)]
    assert tritonclip.clip_(params, 1.0) == 0


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (lambda model: model.parameters, r"got method; call it: parameters\(\)"),
        (lambda model: dict(model.named_parameters()), r"got dict; pass its items\(\)"),
        (lambda model: torch.optim.SGD(model.parameters()), "got SGD; pass the parameters of the"),
        (lambda model: [model], r"\[0\] must be a tensor, got Linear; .*: pass the model that"),
    ],
    ids=["method", "dict", "optimizer", "models"],
)
def test_argument_that_has_parameters_is_refused_with_a_remedy(wrong, remedy):
    with pytest.raises(TypeError, match=remedy):
        tritonclip.clip_(wrong(torch.nn.Linear(2, 2)), 1.0)
