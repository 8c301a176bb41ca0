"""What a call refuses, with an error that says what came, and with nothing written."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import tritonclip
from helpers.cases import assert_bits, bits, copies, each_rule, grad_of, normal, parameter
from helpers.workers import NEEDS_FORK, run_in_fork
from tritonclip import ClipByGlobalNorm

RULES = each_rule(1.0, 0.5)


class Labelled(torch.Tensor):
    """A subclass that the library knows nothing about."""


# The gradient that is refused, and the error with a word that its message says.
REFUSED: dict[str, Any] = {
    "int64": (lambda d: torch.ones(3, dtype=torch.int64, device=d), TypeError, "int64"),
    "uint8": (lambda d: torch.ones(3, dtype=torch.uint8, device=d), TypeError, "uint8"),
    "bool": (lambda d: torch.ones(3, dtype=torch.bool, device=d), TypeError, "bool"),
    "subclass": (lambda d: torch.ones(3, device=d).as_subclass(Labelled), TypeError, "Labelled"),
}
OVERLAPPING = {
    "expanded": lambda d: torch.ones(1, device=d).expand(3),
    "expanded-rows": lambda d: torch.ones(4, device=d).expand(3, 4),
    "overlapping": lambda d: torch.ones(9, device=d).as_strided((3, 3), (1, 1)),
    "overlapping-once": lambda d: torch.ones(13, device=d).as_strided((3, 4), (3, 2)),
}
REFUSED |= {name: (make, ValueError, "expanded|overlap") for name, make in OVERLAPPING.items()}


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", REFUSED)
def test_clip_refuses_before_anything_is_written(device, case, rule):
    make, error, word = REFUSED[case]
    grads = [normal(5, device=device), make(device), normal(7, device=device)]
    before = [bits(grad) for grad in (grads[0], grads[2])]
    versions = [grad._version for grad in grads]
    with pytest.raises(error, match=word):
        tritonclip.clip_([parameter(grad) for grad in grads], rule)
    after = [bits(grad) for grad in (grads[0], grads[2])]
    assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))
    assert [grad._version for grad in grads] == versions


def accumulated(tensor: Any) -> None:
    weight = torch.zeros(5, device=tensor.device, requires_grad=True)
    with tritonclip.accumulate_(weight, 1.0):
        weight.grad = tensor


ON_BATCHES = {
    "clip_": lambda p: tritonclip.clip_(p, 1.0),
    "by norm": lambda p: tritonclip.clip_(p, tritonclip.ClipByNorm(1.0)),
    "by value": lambda p: tritonclip.clip_(p, tritonclip.ClipByValue(1.0)),
    "clip_tensors_": lambda p: tritonclip.clip_tensors_(p.grad.detach(), 1.0),
    "accumulate_": lambda p: accumulated(p.grad),
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
    before = batch.clone()

    def call(grad: torch.Tensor) -> torch.Tensor:
        weight = torch.zeros(5, device=device)
        weight.grad = grad
        ON_BATCHES[name](weight)
        return grad.sum()

    with pytest.raises(RuntimeError, match=r"batched by torch\.func\.vmap.*functional"):
        torch.func.vmap(nested_in(call))(batch)
    assert_bits([batch], [before])


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


OTHER_LAYOUTS = {
    "nested": (nested, "nested tensor"),
    "mkldnn": (lambda: torch.ones(5).to_mkldnn(), "mkldnn"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("case", OTHER_LAYOUTS)
@pytest.mark.parametrize("others", [[], [torch.ones(5)]], ids=["alone", "among others"])
def test_total_norm_refuses_other_layouts(case, others):
    make, word = OTHER_LAYOUTS[case]
    with pytest.raises(TypeError, match=word):
        tritonclip.get_total_norm([*others, make(), *others])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_total_norm_refuses_a_nested_tensor_where_a_plain_one_was():
    """PyTorch's guards end the process at one."""
    plain = [torch.ones(5), torch.ones(5)]
    sizes = torch.tensor([[2], [3]])
    view = torch._nested_view_from_buffer(
        plain[1], sizes, torch.ones_like(sizes), torch.tensor([0, 2])
    )
    for _ in range(2):
        assert tritonclip.get_total_norm(plain) == pytest.approx(10**0.5)
    for other in (nested(), view):
        with pytest.raises(TypeError, match="nested tensor"):
            tritonclip.get_total_norm([plain[0], other])


def freed() -> torch.Tensor:
    grad = torch.ones(5)
    grad.untyped_storage().resize_(0)
    return grad


def freed_view(start: int = 3) -> torch.Tensor:
    """Its address is its offset."""
    grad = torch.ones(start + 5)[start:]
    grad.untyped_storage().resize_(0)
    return grad


def freed_sparse(part: str, *, coalesced: bool) -> torch.Tensor:
    index, values = torch.tensor([[0, 1, 2, 3, 4]]), torch.ones(5)
    grad = torch.sparse_coo_tensor(
        index, values, (9,), is_coalesced=coalesced, check_invariants=True
    )
    getattr(grad, part)().untyped_storage().resize_(0)
    return grad


NO_MEMORY = {
    "freed": freed,
    "freed view": freed_view,
    "freed view far inside": lambda: freed_view(100_000),
    "zero tensor": lambda: torch._efficientzerotensor((5,)),
    "view of a zero tensor": lambda: torch._efficientzerotensor((7,))[2:],
}


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

    def work() -> None:
        with pytest.raises(ValueError, match=r"parameters\[1\] has 5 elements and no memory"):
            tritonclip.clip_(params, rule)
        assert (grad_of(params[0]) == 3).all()

    run_in_fork(work)


@pytest.mark.covering(2)
@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", NO_MEMORY)
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "duplicates"])
def test_clip_refuses_gradients_without_memory_beside_sparse_ones(coalesced, case, rule):
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[2, 0]]), torch.full((2,), 3.0), (9,), check_invariants=True
    )
    grads = [torch.full((3,), 3.0), NO_MEMORY[case](), sparse.coalesce() if coalesced else sparse]

    def work() -> None:
        with pytest.raises(ValueError, match=r"parameters\[1\] has 5 elements and no memory"):
            tritonclip.clip_([parameter(grad) for grad in grads], rule)
        assert (grads[0] == 3).all()
        assert (grads[2]._values() == 3).all()

    run_in_fork(work)


@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("part", ["_values", "_indices"])
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "duplicates"])
def test_clip_refuses_sparse_gradients_without_memory(coalesced, part, rule):
    grads = [torch.full((3,), 3.0), freed_sparse(part, coalesced=coalesced)]

    def work() -> None:
        with pytest.raises(ValueError, match=r"parameters\[1\] has 5 elements and no memory"):
            tritonclip.clip_([parameter(grad) for grad in grads], rule)
        assert (grads[0] == 3).all()

    run_in_fork(work)


@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("freed_at", [0, 1])
def test_clip_refuses_memory_that_is_freed_between_two_calls(freed_at, rule):
    """Gradients of one buffer: freed, the first has the address 0, and the second its offset."""
    buffers = [torch.full((10,), 3.0) for _ in range(2)]
    params = [parameter(grad) for buffer in buffers for grad in (buffer[:4], buffer[4:])]
    params += [parameter(torch.zeros(0)) for _ in range(2)]

    def work() -> None:
        for _ in range(2):
            tritonclip.clip_(params, rule)
        before = buffers[1 - freed_at].clone()
        buffers[freed_at].untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(ValueError, match="elements and no memory"):
                tritonclip.clip_(params, rule)
        assert torch.equal(buffers[1 - freed_at], before)
        buffers[freed_at].untyped_storage().resize_(40)
        buffers[freed_at].fill_(3.0)
        tritonclip.clip_(params, rule)

    run_in_fork(work)


@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
def test_clip_refuses_a_view_that_is_freed_where_a_plan_is_known(rule):
    """The other gradients keep their addresses."""
    buffer, others = torch.ones(10), [torch.ones(4), torch.ones(4)]
    params = [parameter(grad) for grad in (others[0], buffer[3:7], others[1])]

    def work() -> None:
        for _ in range(2):
            tritonclip.clip_(params, rule)
        before = [other.clone() for other in others]
        buffer.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"parameters\[1\] has 4 elements and no memory"):
            tritonclip.clip_(params, rule)
        assert all(map(torch.equal, others, before))

    run_in_fork(work)


@pytest.mark.parametrize("rule", RULES)
def test_clip_refuses_gradients_made_in_inference_mode(device, rule):
    with torch.inference_mode():
        made_there = normal(3, device=device)
    grads = [normal(3, device=device), made_there, normal(2, device=device)]
    before = copies(grads)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameters\[1\] were made in inference mode"):
            tritonclip.clip_([parameter(grad) for grad in grads], rule)
    assert_bits(grads, before)


def test_clip_grads_with_norm_refuses_gradients_made_in_inference_mode(device):
    with torch.inference_mode():
        made_there = normal(3, device=device)
    grads = [normal(3, device=device), made_there]
    before = copies(grads)
    with pytest.raises(RuntimeError, match="inference mode"):
        tritonclip.clip_grads_with_norm_(
            [parameter(grad) for grad in grads], 0.1, torch.tensor(5.0, device=device)
        )
    assert_bits(grads, before)


def test_total_norm_reads_what_was_made_in_inference_mode(device):
    with torch.inference_mode():
        made_there = torch.ones(4, device=device)
    assert tritonclip.get_total_norm([made_there]) == 2


@pytest.mark.parametrize("rule", RULES)
def test_clip_names_what_it_refuses(device, rule):
    pairs = [
        ("body.weight", parameter(normal(5, device=device))),
        ("head.steps", parameter(torch.ones(3, dtype=torch.int64, device=device))),
    ]
    with pytest.raises(TypeError, match=r"head\.steps"):
        tritonclip.clip_(pairs, rule)
    with pytest.raises(TypeError, match=r"parameters\[1\]"):
        tritonclip.clip_([one for _, one in pairs], rule)


def test_clip_accepts_an_expansion_without_overlap(device):
    """Stride 0 over a dimension of one element repeats nothing."""
    grad = torch.tensor([3.0, 4.0], device=device).expand(1, 2)
    tritonclip.clip_([parameter(grad)], 1.0)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.6, 0.8]]))


NO_PARAMETERS = [
    pytest.param(None, id="None"),
    pytest.param(3.0, id="number"),
    pytest.param([1.0, 2.0], id="numbers"),
    pytest.param([None], id="list-of-None"),
    pytest.param("weights", id="string"),
    pytest.param([(1, torch.ones(2))], id="name-not-a-string"),
    pytest.param([("w", 1.0)], id="named-number"),
    pytest.param([("w", torch.ones(2), 3)], id="triple"),
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("given", NO_PARAMETERS)
def test_clip_refuses_what_is_no_parameter(backend, given, rule):
    with pytest.raises(TypeError, match="parameter"):
        tritonclip.clip_(given, rule)


def test_clip_refuses_a_bad_element_after_good_ones(device):
    grad = torch.full((3,), 8.0, device=device)
    given: Any = [parameter(grad), 1.0]
    with pytest.raises(TypeError):
        tritonclip.clip_(given, 1.0)
    assert grad.tolist() == [8.0] * 3


@pytest.mark.parametrize(
    ("clip", "error"),
    [
        (-1.0, ValueError),
        (torch.nan, ValueError),
        (True, TypeError),
        ("1.0", TypeError),
        (None, TypeError),
        (ClipByGlobalNorm, TypeError),
        ((0.1, 0.2), TypeError),
    ],
    ids=repr,
)
def test_clip_refuses_what_is_no_rule(device, clip, error):
    grad = torch.full((3,), 8.0, device=device)
    with pytest.raises(error):
        tritonclip.clip_([parameter(grad)], clip)
    assert grad.tolist() == [8.0] * 3


@pytest.mark.parametrize("total_norm", [-5.0, torch.nan, torch.tensor(-5.0), torch.tensor([-5.0])])
def test_clip_grads_with_norm_refuses_numbers_that_are_no_norm(device, total_norm):
    one = torch.ones(3, requires_grad=True)
    one.grad = torch.ones(3)
    with pytest.raises(ValueError, match="total_norm"):
        tritonclip.clip_grads_with_norm_([one], 1.0, total_norm)
    assert one.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "parameters_of", [lambda m: m, lambda m: m.parameters(), lambda m: list(m.parameters())]
)
def test_clip_says_that_parameters_come_first(parameters_of):
    given = parameters_of(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"parameters come first: clip_\(parameters, 1\.0\)"):
        tritonclip.clip_(1.0, given)  # type: ignore[call-overload]


def test_clip_says_where_outliers_belong():
    weight = parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"got Outlier.*ClippedOptimizer\(skip_above=Outlier"):
        tritonclip.clip_(weight, tritonclip.Outlier())  # type: ignore[call-overload]


def test_total_norm_asks_for_gradients_in_place_of_modules():
    with pytest.raises(TypeError, match=r"tensors\[0\] must be a tensor, got Linear; .*None\]$"):
        tritonclip.get_total_norm([torch.nn.Linear(2, 2)])  # type: ignore[list-item]


def test_total_norm_asks_for_gradients_in_place_of_a_module():
    with pytest.raises(TypeError, match=r"got Linear, a module; expected \[p.grad for p in"):
        tritonclip.get_total_norm(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize(
    "parameters_of", [lambda m: m, lambda m: m.parameters(), lambda m: list(m.parameters())]
)
def test_functions_of_torch_say_that_parameters_come_first(name, parameters_of):
    given = parameters_of(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a number, got .*; parameters come first"):
        getattr(tritonclip, name)(1.0, given)


@pytest.mark.parametrize("boolean", [True, numpy.bool_(True), torch.tensor(True)], ids=repr)
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("clip_grad_norm_", "max_norm"),
        ("clip_grad_norm_", "norm_type"),
        ("clip_grad_value_", "clip_value"),
    ],
)
def test_functions_of_torch_refuse_booleans(name, argument, boolean):
    one = parameter(torch.ones(2))
    arguments = {"max_norm": 1.0} if name == "clip_grad_norm_" else {}
    with pytest.raises(TypeError, match=f"{argument} must be a number, got .*([Tt]rue|boolean)"):
        getattr(tritonclip, name)(one, **arguments | {argument: boolean})
    assert grad_of(one).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_functions_of_torch_say_where_rules_belong(name):
    grad = torch.ones(2)
    with pytest.raises(TypeError, match=r"got the rule ClipByNorm; .*clip_\(parameters, rule\)"):
        getattr(tritonclip, name)(parameter(grad), tritonclip.ClipByNorm(1.0))
    assert grad.tolist() == [1.0, 1.0]
