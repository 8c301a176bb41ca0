"""Gradients whose memory is gone, which may end the process, and what looks like a refused one."""

from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import each_rule, parameter, parameters, untouched
from helpers.workers import NEEDS_FORK, run_in_fork

RULES = each_rule(1.0, 0.5)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


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


def check_no_memory(params: Any, rule: Any, others: Any) -> None:
    """The second of the parameters is refused, and others stay; in a fork, which may crash."""

    def work() -> None:
        refused = pytest.raises(ValueError, match=r"parameters\[1\] has 5 elements and no memory")
        with untouched(others), refused:
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


def test_total_norm_reads_what_was_made_in_inference_mode(device):
    with torch.inference_mode():
        made_there = torch.ones(4, device=device)
    assert tritonclip.get_total_norm([made_there]) == 2


def test_clip_accepts_an_expansion_without_overlap(device):
    """Stride 0 over a dimension of one element repeats nothing."""
    grad = torch.tensor([3.0, 4.0], device=device).expand(1, 2)
    tritonclip.clip_([parameter(grad)], 1.0)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.6, 0.8]]))
