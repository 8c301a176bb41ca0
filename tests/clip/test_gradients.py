"""Which gradients a call clips: every form of ``parameters``, ties, exclusions, mixed lists.

Those of a module come in torch's order, and marks on modules are refused; `clip_tensors_` clips
tensors themselves.
"""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tritonclip
from helpers import reference
from helpers.cases import (
    assert_bits,
    assert_norm,
    check_clip,
    each_rule,
    grad_of,
    normal,
    of_sizes,
    parameter,
    parameters,
    same_parameters,
    untouched,
)
from tritonclip import (
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByUnitNorm,
    ClipByValue,
    ClipState,
    clip_tensors_,
)

RULES, UNIT = each_rule(1.0, 1.0), ClipByUnitNorm()
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


NOTHING: dict[str, Any] = {
    "list": lambda _: [],
    "tuple": lambda _: (),
    "module": lambda _: torch.nn.ParameterList(),
    "filter": lambda _: filter(None, []),
    "parameter": lambda one: [one],
    "generator": lambda one: (p for p in [one]),
}


@pytest.mark.parametrize(("rule", "shape"), [(1.0, ()), (ClipByNorm(1.0), (0,)), (UNIT, (0,))])
@pytest.mark.parametrize("name", NOTHING)
def test_clip_without_gradients_gives_zero_without_a_warning(device, name, rule, shape):
    """On the device of the parameters, where there are any."""
    for _ in range(4):
        norm = tritonclip.clip_(NOTHING[name](parameter(None, device)), rule)
    assert (norm.shape, norm.dtype, norm.sum().item()) == (shape, torch.float32, 0.0)
    assert norm.device.type == (device.type if name in ("parameter", "generator") else "cpu")


@pytest.mark.parametrize("rule", RULES)
def test_clip_of_an_exhausted_generator_warns(backend, rule):
    used = (one for one in [parameter(torch.ones(2, device=backend.device))])
    list(used)
    with pytest.warns(tritonclip.ClippingWarning, match="`parameters` is an empty gen") as caught:
        tritonclip.clip_(used, rule)
    assert caught[0].filename == __file__


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
@pytest.mark.parametrize(("n_rows", "row", "column"), [(8, 2, 3), (2, 0, 0)])
def test_clip_writes_an_element_of_a_row_and_a_column_once(device, clip, n_rows, row, column):
    grid = normal((n_rows, 5), device=device)
    check_clip([grid[:, column], grid[row]], clip)


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_float8_is_refused(device, dtype):
    grads = of_sizes((40, 3), torch.float32, device)
    grads[1] = grads[1].to(dtype)
    message = f"gradient of parameters.1. has dtype {dtype}; clip in float32 or bfloat16, before"
    for rule in (1.0, tritonclip.ClipByValue(0.5)):
        with untouched(grads[:1]), pytest.raises(TypeError, match=message):
            tritonclip.clip_([parameter(grad) for grad in grads], rule)


def test_clip_tensors_mixes_what_lists_of_gradients_mix(device):
    at, values = torch.tensor([[0, 3, 3]]), torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(at, values, (5,), device=device)
    tensors: list[Any] = [
        torch.full((2,), 3.0, dtype=torch.bfloat16, device=device),
        torch.full((2,), 2.0 + 1.0j, device=device),
        torch.tensor(4.0, device=device, dtype=torch.float64),
        sparse,
    ]
    dense = [x.to_dense() if x is sparse else x.clone() for x in tensors]
    norm = clip_tensors_(iter([None, *tensors, tensors[0]]), 1.0)
    assert norm.item() == pytest.approx(reference.total_norm(dense), rel=1e-6)
    for one, was in zip(tensors, dense, strict=True):
        expected = (was * (1.0 / norm.item())).to(one.dtype)
        found = one.to_dense() if one is sparse else one
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_clip_tensors_leaves_the_grad_of_a_tensor_as_it_is(device):
    tensor = torch.full((4,), 3.0, device=device)
    tensor.grad = torch.full((4,), 7.0, device=device)
    with untouched([tensor.grad]):
        clip_tensors_(tensor, 1.0)
    assert_norm(tensor.norm(), 1.0)


def test_clip_tensors_clips_detached_weights():
    weight = torch.nn.Parameter(torch.full((4,), 3.0))
    clip_tensors_([weight.detach()], 1.0)
    assert_norm(weight.detach().norm(), 1.0)


@pytest.mark.parametrize("given", [[], [None, None], iter([]), (t for t in [None])])
def test_clip_tensors_of_nothing_does_not_warn(given):
    assert clip_tensors_(given, ClipByNorm(1.0)).shape == (0,)


@pytest.mark.parametrize("rule", [ClipByQuantile(0.5), ClipByOwnHistory(1.05, warmup=1)])
def test_clip_tensors_follows_a_state_as_clip_does(device, rule):
    states = [ClipState(), ClipState()]
    for step in range(4):
        grads = [normal(5, device=device, seed=step) * (step + 1), normal(3, device=device)]
        params = same_parameters(grad.clone() for grad in grads)
        expected = tritonclip.clip_(params, rule, state=states[0])
        # New tensors at every step, as pseudo-gradients are.
        assert_bits([clip_tensors_(grads, rule, state=states[1])], [expected])
        assert_bits(grads, [p.grad for p in params if p.grad is not None])


class Renamed(nn.Module):
    """Has other parameters than its modules say."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield "weight", self.inner.weight


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    return model


def shared() -> nn.Module:
    layer = nn.Linear(2, 2)
    return nn.ModuleDict({"a": nn.Sequential(layer, nn.ReLU()), "b": layer, "c": nn.Linear(2, 1)})


def cyclic() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    object.__getattribute__(model, "_modules")["loop"] = model
    return model


MODELS: dict[str, Any] = {
    "empty": nn.Module,
    "nested": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    ),
    "tied": tied,
    "shared": shared,
    "cyclic": cyclic,
    "lists": lambda: nn.ParameterList([nn.Parameter(torch.zeros(i)) for i in range(3)]),
    "absent": lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False)),
    "renamed": Renamed,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_parameters_of_a_module_are_those_of_torch_in_order(make):
    model = make()
    for i, one in enumerate(model.parameters()):
        one.grad = torch.full_like(one, i + 1)
    norms = tritonclip.clip_(model, ClipByNorm(torch.inf))
    expected = tritonclip.clip_(list(model.parameters()), ClipByNorm(torch.inf))
    assert torch.equal(norms, expected)


def marked(name: str) -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    model.get_submodule(name).need_clip = False
    return model


CALLS: dict[str, Any] = {
    "clip_": lambda m: tritonclip.clip_(m, 1.0),
    "clip_grad_norm_": lambda m: tritonclip.clip_grad_norm_(m, 1.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"module \(a Sequential\) has need_clip = False"),
        ("1.0", r"for p in module\.1\.0\.parameters\(\): p\.need_clip = False"),
    ],
    ids=["itself", "inner"],
)
def test_marks_on_modules_are_refused(call, name, message):
    model = marked(name)
    with untouched(map(grad_of, model.parameters())), pytest.raises(ValueError, match=message):
        call(model)


def test_marks_are_found_when_the_plan_is_known():
    """True is as no mark."""
    model = marked("1")
    model[1].need_clip = True
    tritonclip.clip_(model, 0.0)
    assert not any(grad_of(p).any() for p in model.parameters())
    model[1].need_clip = False
    with pytest.raises(ValueError, match="need_clip = False"):
        tritonclip.clip_(model, 1.0)


def test_a_call_leaves_the_module_as_it_was():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model[1][0].bias.need_clip = False
    before = [{*vars(module)} for module in model.modules()]
    tritonclip.clip_(model, 1.0)
    assert [{*vars(module)} for module in model.modules()] == before
