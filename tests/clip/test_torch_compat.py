"""The four functions with torch's signatures, against torch.nn.utils on the same inputs."""

import inspect
import warnings

import pytest
import torch
from torch.nn import utils

import tritonclip
from helpers import reference
from helpers.cases import assert_bits, copies, named, normal, parameter, parameters, untouched

FUNCTIONS = ["clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_"]
# Where torch's own result is right: moderate sizes, of these dtypes.
RIGHT = pytest.mark.parametrize("dtype", named((torch.float32, torch.float64)))
TYPES = pytest.mark.parametrize("p", [1, 1.5, 2.0, 3.0, torch.inf, "inf", "2"], ids=repr)
FOREACH = pytest.mark.parametrize("foreach", [None, True, False], ids="foreach={}".format)


def two_lists(device, dtype=torch.float32):
    """The same gradients twice, one of a kind for torch."""
    grads = [normal(shape, dtype, device) for shape in ((3, 5), (70,), ())]
    return parameters(grads), parameters([grad.clone() for grad in grads])


def assert_close(ours, theirs, **options):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0, **options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_is_torchs(name):
    """Our own options follow, by keyword only."""
    ours = inspect.signature(getattr(tritonclip, name)).parameters.values()
    theirs = inspect.signature(getattr(utils, name)).parameters.values()
    same = [one for one in ours if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [(one.name, one.kind, one.default) for one in same] == [
        (one.name, one.kind, one.default) for one in theirs
    ]


@pytest.mark.parametrize("p", [0, 0.5, -1.0, -torch.inf, "-inf"], ids=repr)
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
def test_orders_below_1_are_torchs_own(device, p, error_if_nonfinite):
    ours, theirs = two_lists(device)
    theirs_norm = utils.clip_grad_norm_(theirs, 0.5, p)
    total = tritonclip.get_total_norm([one.grad for one in ours], p)
    norm = tritonclip.clip_grad_norm_(ours, 0.5, p, error_if_nonfinite)
    assert_bits([norm, total], [theirs_norm] * 2)
    assert_bits([one.grad for one in ours], [one.grad for one in theirs])


def test_orders_below_1_leave_out_what_needs_no_clipping(device):
    ours, _ = two_lists(device)
    ours[0].need_clip = False
    before = copies([one.grad for one in ours])
    norm = tritonclip.clip_grad_norm_([("a", ours[0]), ("b", ours[1]), ("c", ours[2])], 1e-3, 0.5)
    assert_bits([norm], [utils.get_total_norm(before[1:], 0.5)])
    assert_bits([ours[0].grad], before[:1])


@pytest.mark.parametrize("function", ["clip_grad_norm_", "get_total_norm"])
def test_orders_below_1_are_refused_over_processes(device, function):
    ours, _ = two_lists(device)
    arguments = (ours, 1.0, 0.5) if function == "clip_grad_norm_" else ([x.grad for x in ours], 0.5)
    with pytest.raises(ValueError, match="norm_type must be from 1 to inf with process_group"):
        getattr(tritonclip, function)(*arguments, copies={})


@pytest.mark.covering(2)
@pytest.mark.parametrize("max_norm", [0, 0.5, 1000, torch.tensor(0.5)], ids=repr)
@RIGHT
@TYPES
@FOREACH
def test_clip_grad_norm_gives_torchs_result(device, dtype, p, max_norm, foreach):
    ours, theirs = two_lists(device, dtype)
    norm = tritonclip.clip_grad_norm_(ours, max_norm, p, foreach=foreach)
    expected = utils.clip_grad_norm_(theirs, max_norm, p, foreach=foreach)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert_close(ours, theirs)


@pytest.mark.covering(2)
@RIGHT
@FOREACH
@pytest.mark.parametrize("clip_value", [0, 0.5, 9, torch.tensor(0.5), torch.inf], ids=repr)
def test_clip_grad_value_gives_torchs_result(device, dtype, clip_value, foreach):
    ours, theirs = two_lists(device, dtype)
    tritonclip.clip_grad_value_(ours, clip_value, foreach)
    utils.clip_grad_value_(theirs, clip_value, foreach)
    assert_close(ours, theirs)


@pytest.mark.covering(2)
@RIGHT
@TYPES
@FOREACH
def test_get_total_norm_gives_torchs_result(device, dtype, p, foreach):
    grads = [one.grad for one in two_lists(device, dtype)[0]]
    norm = tritonclip.get_total_norm(grads, p, False, foreach)
    expected = utils.get_total_norm(grads, p, False, foreach)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


@pytest.mark.covering(2)
@RIGHT
@FOREACH
@pytest.mark.parametrize("total", [0.0, 0.3, 40.0, torch.inf, torch.nan])
def test_clip_grads_with_norm_gives_torchs_result(device, dtype, total, foreach):
    ours, theirs = two_lists(device, dtype)
    total_norm = torch.tensor(total, dtype=dtype, device=device)
    tritonclip.clip_grads_with_norm_(ours, 0.5, total_norm, foreach)
    utils.clip_grads_with_norm_(theirs, 0.5, total_norm, foreach)
    assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("total", [0.0, 3.0, 4.0])
def test_clip_grads_with_norm_adds_eps(device, total, eps):
    grads = [normal(shape, device=device) for shape in ((3, 5), (70,))]
    before = copies(grads)
    total_norm = torch.tensor(total, device=device)
    with tritonclip.verify():
        tritonclip.clip_grads_with_norm_(parameters(grads), 3.0, total_norm, eps=eps)
    by = reference.coefficient(total_norm, 3.0, eps)
    assert_bits(grads, [reference.scaled(grad, by) for grad in before])


@pytest.mark.parametrize("as_given", [iter, tuple, lambda ps: (p for p in ps), lambda ps: ps[0]])
def test_functions_take_torchs_forms_of_parameters(device, as_given):
    total_norm = torch.tensor(9.0, device=device)
    for name, *more in ((FUNCTIONS[0],), (FUNCTIONS[1],), (FUNCTIONS[3], total_norm)):
        ours, theirs = two_lists(device)
        getattr(tritonclip, name)(as_given(ours), 0.5, *more)
        given = as_given(theirs)
        # torch's clip_grads_with_norm_ takes no tensor.
        getattr(utils, name)([given] if more and given is theirs[0] else given, 0.5, *more)
        assert_close(ours, theirs)


def test_get_total_norm_takes_one_tensor_and_a_generator(device):
    grad = torch.tensor([3.0, 4.0], device=device)
    assert tritonclip.get_total_norm(grad).item() == 5.0
    assert tritonclip.get_total_norm(one for one in [grad]).item() == 5.0


def test_get_total_norm_measures_parameters_themselves(device):
    """What it is given are the tensors to measure, and not owners of gradients."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0], device=device))
    weight.grad = torch.ones(2, device=device)
    assert tritonclip.get_total_norm([weight]).item() == 5.0
    assert not tritonclip.get_total_norm([weight]).requires_grad


def raised(call):
    """The type and the message of what a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("p", [2.0, 3, "inf"], ids=repr)
@pytest.mark.parametrize("name", ["clip_grad_norm_", "get_total_norm"])
def test_error_if_nonfinite_raises_torchs_message(device, name, p):
    grad = torch.tensor([1.0, torch.inf], device=device)
    given = ([parameter(grad)], 1.0) if name == "clip_grad_norm_" else ([grad],)
    with untouched([grad]):
        kind, message = raised(lambda: getattr(tritonclip, name)(*given, p, True))
    expected, theirs = raised(lambda: getattr(utils, name)(*given, p, True))
    assert kind is expected
    assert message.startswith(theirs)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("clip_grad_norm_", given) for given in (("abc",), (None,), (1.0, "fro"), (1.0, None))),
        *(("clip_grad_value_", given) for given in (("abc",), (None,))),
    ],
    ids=str,
)
def test_arguments_that_are_no_numbers_raise_errors_of_torchs_types(device, name, arguments):
    ours, theirs = two_lists(device)
    with untouched(one.grad for one in ours):
        kind, message = raised(lambda: getattr(tritonclip, name)(ours, *arguments))
    assert kind is raised(lambda: getattr(utils, name)(theirs, *arguments))[0]
    argument = [*inspect.signature(getattr(tritonclip, name)).parameters][len(arguments)]
    assert message.startswith(f"{argument} must be a number, ")
    assert f"got {arguments[-1]!r}" in message


def test_foreach_is_ignored_on_a_device_without_it():
    one = parameter(torch.ones(3, device="meta"))
    assert tritonclip.clip_grad_norm_([one], 1.0, foreach=True).device.type == "meta"


def test_clip_grad_norm_warns_of_an_exhausted_generator_as_torch(backend):
    def nothing():
        yield from ()

    def caught(function):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            norm = function(nothing(), 1.0)
        # A class that users of torch's filters know.
        assert all(issubclass(w.category, UserWarning) for w in seen)
        return norm.item(), [(str(w.message), w.filename) for w in seen]

    ours = caught(tritonclip.clip_grad_norm_)
    assert ours == caught(utils.clip_grad_norm_)
    assert ours[1][0][1] == __file__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_nothing(backend, name):
    function = getattr(tritonclip, name)
    arguments = {"get_total_norm": (), "clip_grads_with_norm_": (1.0, torch.tensor(2.0))}
    result = function([], *arguments.get(name, (1.0,)))
    if name in ("clip_grad_norm_", "get_total_norm"):
        expected = getattr(utils, name)([], *arguments.get(name, (1.0,)))
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    else:
        assert result is None
