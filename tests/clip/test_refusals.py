"""What a call refuses, with an error that says what came, and with nothing written."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import pytest
import torch

import tritonclip
from helpers.cases import each_rule, normal, parameter, parameters, unchanged, untouched
from helpers.workers import NEEDS_FORK, run_in_fork
from tritonclip import ClipByGlobalNorm

RULES = each_rule(1.0, 0.5)


class Labelled(torch.Tensor):
    """A subclass that the library knows nothing about."""


REFUSED: dict[str, Any] = {
    name: (lambda d, n=name: torch.ones(3, dtype=getattr(torch, n), device=d), TypeError, name)
    for name in ("int64", "uint8", "bool")
}
REFUSED["subclass"] = lambda d: torch.ones(3, device=d).as_subclass(Labelled), TypeError, "Labelled"
OVERLAPPING = {
    "expanded": lambda d: torch.ones(1, device=d).expand(3),
    "expanded-rows": lambda d: torch.ones(4, device=d).expand(3, 4),
}
REFUSED |= {name: (make, ValueError, "expanded|overlap") for name, make in OVERLAPPING.items()}


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", REFUSED)
def test_clip_refuses_before_anything_is_written(device, case, rule):
    make, error, word = REFUSED[case]
    grads = [normal(5, device=device), make(device), normal(7, device=device)]
    with untouched([grads[0], grads[2]]), pytest.raises(error, match=word):
        tritonclip.clip_(parameters(grads), rule)


ON_BATCHES = {
    "clip_": lambda p: tritonclip.clip_(p, 1.0),
    "by norm": lambda p: tritonclip.clip_(p, tritonclip.ClipByNorm(1.0)),
    "by value": lambda p: tritonclip.clip_(p, tritonclip.ClipByValue(1.0)),
    "clip_tensors_": lambda p: tritonclip.clip_tensors_(p.grad.detach(), 1.0),
    "clip_grad_norm_": lambda p: tritonclip.clip_grad_norm_(p, 1.0),
    "clip_grad_value_": lambda p: tritonclip.clip_grad_value_(p, 1.0),
    "get_total_norm": lambda p: tritonclip.get_total_norm(p.grad),
    "clip_grads_with_norm_": lambda p: tritonclip.clip_grads_with_norm_(p, 1.0, torch.ones(())),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ON_BATCHES)
@pytest.mark.parametrize("nested_in", [lambda f: f, torch.func.grad], ids=["vmap", "grad in vmap"])
def test_calls_inside_vmap_point_to_functional(device, name, nested_in):
    batch = normal((2, 5), device=device) * 9

    def call(grad: torch.Tensor) -> torch.Tensor:
        weight = torch.zeros(5, device=device)
        weight.grad = grad
        ON_BATCHES[name](weight)
        return grad.sum()

    refused = pytest.raises(RuntimeError, match=r"batched by torch\.func\.vmap.*functional")
    with unchanged([batch]), refused:
        torch.func.vmap(nested_in(call))(batch)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "word"),
    [(nested, "nested tensor"), (lambda: torch.ones(5).to_mkldnn(), "mkldnn")],
    ids=["nested", "mkldnn"],
)
@pytest.mark.parametrize("others", [[], [torch.ones(5)]], ids=["alone", "among others"])
def test_total_norm_refuses_other_layouts(make, word, others):
    with pytest.raises(TypeError, match=word):
        tritonclip.get_total_norm([*others, make(), *others])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_total_norm_refuses_a_nested_tensor_where_a_plain_one_was():
    """PyTorch's guards end the process at one."""
    plain, sizes = [torch.ones(5), torch.ones(5)], torch.tensor([[2], [3]])
    offsets = torch.tensor([0, 2])
    view = torch._nested_view_from_buffer(plain[1], sizes, torch.ones_like(sizes), offsets)
    for _ in range(2):
        assert tritonclip.get_total_norm(plain) == pytest.approx(10**0.5)
    for other in (nested(), view):
        with pytest.raises(TypeError, match="nested tensor"):
            tritonclip.get_total_norm([plain[0], other])


def freed(start: int) -> torch.Tensor:
    """The address of a view is its offset."""
    grad = torch.ones(start + 5)[start:]
    grad.untyped_storage().resize_(0)
    return grad


def sparse(*, coalesced: bool) -> torch.Tensor:
    index, values = torch.tensor([[0, 1, 2, 3, 4]]), torch.full((5,), 3.0)
    return torch.sparse_coo_tensor(
        index, values, (9,), is_coalesced=coalesced, check_invariants=True
    )


NO_MEMORY_MESSAGE = r"parameters\[1\] has {} elements and no memory"


def check_no_memory(params: Any, rule: Any, others: Any, n: int = 5) -> None:
    """The second of the parameters is refused, and others stay; in a fork, which may crash."""

    def work() -> None:
        with untouched(others), pytest.raises(ValueError, match=NO_MEMORY_MESSAGE.format(n)):
            tritonclip.clip_(params, rule)

    run_in_fork(work)


NO_MEMORY = {
    "freed": lambda: freed(0),
    "freed view": lambda: freed(3),
    "freed view far inside": lambda: freed(100_000),
    "zero tensor": lambda: torch._efficientzerotensor((5,)),
    "view of a zero tensor": lambda: torch._efficientzerotensor((7,))[2:],
}
COALESCED = pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "duplicates"])


@pytest.mark.covering(2)
@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", NO_MEMORY)
@pytest.mark.parametrize("n_before", [0, 2])
def test_clip_refuses_gradients_without_memory(case, n_before, rule):
    """Also where gradients of the same form were clipped before."""
    params = [torch.nn.Parameter(torch.zeros(5000)), torch.nn.Parameter(torch.zeros(5))]
    for _ in range(n_before):
        params[0].grad, params[1].grad = torch.full((5000,), 3.0), torch.ones(5)
        tritonclip.clip_(params, rule)
    params[0].grad, params[1].grad = torch.full((5000,), 3.0), NO_MEMORY[case]()
    check_no_memory(params, rule, [params[0].grad])


@pytest.mark.covering(2)
@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", NO_MEMORY)
@COALESCED
def test_clip_refuses_gradients_without_memory_beside_sparse_ones(coalesced, case, rule):
    grads = [torch.full((3,), 3.0), NO_MEMORY[case](), sparse(coalesced=coalesced)]
    check_no_memory(parameters(grads), rule, [grads[0], grads[2]._values()])


@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("part", ["_values", "_indices"])
@COALESCED
def test_clip_refuses_sparse_gradients_without_memory(coalesced, part, rule):
    grads = [torch.full((3,), 3.0), sparse(coalesced=coalesced)]
    getattr(grads[1], part)().untyped_storage().resize_(0)
    check_no_memory(parameters(grads), rule, grads[:1])


@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("freed_at", [0, 1])
def test_clip_refuses_memory_that_is_freed_between_two_calls(freed_at, rule):
    """Gradients of one buffer: freed, the first has the address 0, and the second its offset."""
    buffers = [torch.full((10,), 3.0) for _ in range(2)]
    params = parameters(grad for buffer in buffers for grad in (buffer[:4], buffer[4:]))
    params += [parameter(torch.zeros(0)) for _ in range(2)]

    def work() -> None:
        for _ in range(2):
            tritonclip.clip_(params, rule)
        buffers[freed_at].untyped_storage().resize_(0)
        for _ in range(2):
            refused = pytest.raises(ValueError, match="elements and no memory")
            with untouched([buffers[1 - freed_at]]), refused:
                tritonclip.clip_(params, rule)
        buffers[freed_at].untyped_storage().resize_(40)
        buffers[freed_at].fill_(3.0)
        tritonclip.clip_(params, rule)

    run_in_fork(work)


@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
def test_clip_refuses_a_view_that_is_freed_where_a_plan_is_known(rule):
    """The other gradients keep their addresses."""
    buffer, others = torch.ones(10), [torch.ones(4), torch.ones(4)]
    params = parameters([others[0], buffer[3:7], others[1]])
    for _ in range(2):
        tritonclip.clip_(params, rule)
    buffer.untyped_storage().resize_(0)
    check_no_memory(params, rule, others, 4)


@pytest.mark.parametrize("rule", [*RULES, None])
def test_gradients_made_in_inference_mode_are_refused(device, rule):
    with torch.inference_mode():
        made_there = normal(3, device=device)
    grads = [normal(3, device=device), made_there, normal(2, device=device)]
    call = partial(tritonclip.clip_, max_norm=rule)
    if rule is None:
        total = torch.tensor(5.0, device=device)
        call = partial(tritonclip.clip_grads_with_norm_, max_norm=0.1, total_norm=total)
    for _ in range(2):
        message = r"parameters\[1\] were made in inference mode"
        with unchanged(grads), pytest.raises(RuntimeError, match=message):
            call(parameters(grads))


def test_total_norm_reads_what_was_made_in_inference_mode(device):
    with torch.inference_mode():
        made_there = torch.ones(4, device=device)
    assert tritonclip.get_total_norm([made_there]) == 2


@pytest.mark.parametrize("rule", RULES)
def test_clip_names_what_it_refuses(device, rule):
    grads = [normal(5, device=device), torch.ones(3, dtype=torch.int64, device=device)]
    names = ("body.weight", "head.steps")
    with pytest.raises(TypeError, match=r"head\.steps"):
        tritonclip.clip_(zip(names, parameters(grads), strict=True), rule)
    with pytest.raises(TypeError, match=r"parameters\[1\]"):
        tritonclip.clip_(parameters(grads), rule)


def test_clip_accepts_an_expansion_without_overlap(device):
    """Stride 0 over a dimension of one element repeats nothing."""
    grad = torch.tensor([3.0, 4.0], device=device).expand(1, 2)
    tritonclip.clip_([parameter(grad)], 1.0)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.6, 0.8]]))


NO_PARAMETERS: dict[str, Any] = {
    "None": None,
    "number": 3.0,
    "numbers": [1.0, 2.0],
    "list-of-None": [None],
    "string": "weights",
    "name-not-a-string": [(1, torch.ones(2))],
    "named-number": [("w", 1.0)],
    "triple": [("w", torch.ones(2), 3)],
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("given", NO_PARAMETERS.values(), ids=NO_PARAMETERS)
def test_clip_refuses_what_is_no_parameter(backend, given, rule):
    with pytest.raises(TypeError, match="parameter"):
        tritonclip.clip_(given, rule)


def test_clip_refuses_a_bad_element_after_good_ones(device):
    grad = torch.full((3,), 8.0, device=device)
    given: Any = [parameter(grad), 1.0]
    with untouched([grad]), pytest.raises(TypeError):
        tritonclip.clip_(given, 1.0)


@pytest.mark.parametrize("clip", [-1.0, torch.nan, True, "1.0", None, ClipByGlobalNorm, (0.1, 0.2)])
def test_clip_refuses_what_is_no_rule(device, clip):
    grad = torch.full((3,), 8.0, device=device)
    with untouched([grad]), pytest.raises(ValueError if type(clip) is float else TypeError):
        tritonclip.clip_([parameter(grad)], clip)


@pytest.mark.parametrize("total_norm", [-5.0, torch.nan, torch.tensor(-5.0), torch.tensor([-5.0])])
def test_clip_grads_with_norm_refuses_numbers_that_are_no_norm(device, total_norm):
    grad = torch.ones(3)
    with untouched([grad]), pytest.raises(ValueError, match="total_norm"):
        tritonclip.clip_grads_with_norm_([parameter(grad)], 1.0, total_norm)


FORMS = pytest.mark.parametrize(
    "parameters_of",
    [lambda m: m, lambda m: m.parameters(), lambda m: list(m.parameters())],
    ids=["module", "generator", "list"],
)


@FORMS
def test_clip_says_that_parameters_come_first(parameters_of):
    given = parameters_of(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"parameters come first: clip_\(parameters, 1\.0\)"):
        tritonclip.clip_(1.0, given)  # type: ignore[call-overload]


def test_clip_says_where_outliers_belong():
    weight = parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"got Outlier.*ClippedOptimizer\(skip_above=Outlier"):
        tritonclip.clip_(weight, tritonclip.Outlier())  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([torch.nn.Linear(2, 2)], r"tensors\[0\] must be a tensor, got Linear; .*None\]$"),
        (torch.nn.Linear(2, 2), r"got Linear, a module; expected \[p.grad for p in"),
    ],
    ids=["modules", "module"],
)
def test_total_norm_asks_for_gradients(given, message):
    with pytest.raises(TypeError, match=message):
        tritonclip.get_total_norm(given)


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
@FORMS
def test_functions_of_torch_say_that_parameters_come_first(name, parameters_of):
    given = parameters_of(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a number, got .*; parameters come first"):
        getattr(tritonclip, name)(1.0, given)


@pytest.mark.parametrize("boolean", [True, numpy.bool_(True), torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("argument", ["max_norm", "norm_type", "clip_value"])
def test_functions_of_torch_refuse_booleans(argument, boolean):
    function = (
        tritonclip.clip_grad_value_ if argument == "clip_value" else tritonclip.clip_grad_norm_
    )
    given = {} if argument == "clip_value" else {"max_norm": 1.0}
    grad, message = torch.ones(2), f"{argument} must be a number, got .*([Tt]rue|boolean)"
    with untouched([grad]), pytest.raises(TypeError, match=message):
        function(parameter(grad), **given | {argument: boolean})


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_functions_of_torch_say_where_rules_belong(name):
    grad, message = torch.ones(2), r"got the rule ClipByNorm; .*clip_\(parameters, rule\)"
    with untouched([grad]), pytest.raises(TypeError, match=message):
        getattr(tritonclip, name)(parameter(grad), tritonclip.ClipByNorm(1.0))
