"""Lists over several processes in a compiled region: the graph breaks, the result is the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Shard

import tritonclip
from helpers import reference
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.refusing import check_raises, is_first, named_parameters, overlap
from helpers.spread import assert_same_everywhere, mesh_of, parameter, whole
from tritonclip import ClipByQuantile, ClipByValue, ClipState


def _compiled(call: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, backend="eager")


@in_processes(2)
def test_compiled_clip_of_distributed_tensors() -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i in range(2)]
    grads = [one.grad for one in parameters]
    expected = reference.total_norm([whole(grad) for grad in grads])
    norm = _compiled(lambda: tritonclip.get_total_norm(grads))()
    assert_norm(whole(norm), expected)
    assert_norm(_compiled(lambda: tritonclip.clip_(iter(parameters), 1.0))(), expected)
    after = reference.total_norm([whole(grad) for grad in grads])
    assert after == pytest.approx(1.0, rel=1e-5)
    for known in (2.0 * norm, torch.tensor(2.0 * expected)):
        step = _compiled(lambda norm: tritonclip.clip_grads_with_norm_(parameters, expected, norm))
        step(known)
    assert reference.total_norm([whole(g) for g in grads]) == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("limit", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@in_processes(2)
def test_compiled_clip_grad_norm_of_distributed_tensors(limit: float) -> None:
    one = parameter((8, 3), mesh_of(-1), [Shard(0)])
    expected = reference.total_norm([whole(one.grad)], 3.0)

    def step() -> torch.Tensor:
        norm: Any = tritonclip.clip_grad_norm_([one], limit, 3.0)
        whole_norm: torch.Tensor = norm.full_tensor()
        return whole_norm

    assert_norm(_compiled(step)(), expected)
    assert reference.total_norm([whole(one.grad)], 3.0) == pytest.approx(0.5, rel=1e-5)


@in_processes(2)
def test_compiled_clip_grad_norm_of_distributed_tensors_raises_as_torch() -> None:
    one = parameter((8, 3), mesh_of(-1), [Shard(0)])
    one.grad.to_local()[0] = torch.nan
    step = _compiled(lambda: tritonclip.clip_grad_norm_([one], 0.5, error_if_nonfinite=True))
    with pytest.raises(RuntimeError, match="set `error_if_nonfinite=False`"):
        step()


@in_processes(2)
def test_compiled_clip_of_a_process_without_gradients() -> None:
    """The others wait for it."""
    one = parameter((8, 3), mesh_of(-1), [Shard(0)])
    if is_first():
        one.grad = None
    norm = _compiled(lambda: tritonclip.clip_([one], 0.5))()
    assert float(norm) > 0
    assert_same_everywhere(norm)


@pytest.mark.parametrize("call", ["clip", "state", "norm"])
@in_processes(2)
def test_compiled_call_that_one_process_refuses_raises_everywhere(call: str) -> None:
    named = named_parameters()
    rule, states = ClipByQuantile(0.5, 4), [ClipState(), ClipState()]
    known = named_parameters()
    if call == "state":
        tritonclip.clip_(known.values(), rule, state=states[0])
    elif is_first() and call == "norm":
        named["plain"].grad.untyped_storage().resize_(0)
    elif is_first():
        overlap(named["plain"])
    state = states[0] if is_first() else states[1]
    plain = list(named.values())
    calls: dict[str, Callable[[], object]] = {
        "clip": lambda: tritonclip.clip_(plain, 0.5),
        "state": lambda: tritonclip.clip_(plain, rule, state=state),
        "norm": lambda: tritonclip.get_total_norm([one.grad for one in plain]),
    }
    message = {"clip": "share memory", "state": "belongs to another", "norm": "freed"}[call]
    grads = [one.grad for one in plain[:2]]
    check_raises(_compiled(calls[call]), ValueError, message, grads)


REFUSED_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scale": ({"grad_scale": 0.0}, ValueError, "grad_scale must be positive"),
    "scale-tensor": ({"grad_scale": torch.zeros(())}, ValueError, "grad_scale must"),
    "state": ({"state": 3}, TypeError, "ClipState"),
}


@pytest.mark.parametrize("what", REFUSED_ARGUMENTS)
@in_processes(2)
def test_compiled_clip_with_a_bad_argument_in_one_process_raises_everywhere(what: str) -> None:
    plain = list(named_parameters().values())
    bad, error, message = REFUSED_ARGUMENTS[what]
    options = bad if is_first() else {}
    grads = [one.grad for one in plain]
    call = _compiled(lambda: tritonclip.clip_(plain, 0.5, **options))
    check_raises(call, error, message, grads)


@in_processes(2)
def test_compiled_clip_of_a_limit_that_changes_over_processes() -> None:
    one = parameter((8, 3), mesh_of(-1), [Shard(0)], seed=1)
    step = _compiled(lambda limit: tritonclip.clip_([one], limit))
    for limit in (0.5, 0.4, 0.3, torch.tensor(0.2)):
        step(limit)
        after = reference.total_norm([whole(one.grad)])
        assert after == pytest.approx(float(limit), rel=1e-5)
    _compiled(lambda limit: tritonclip.clip_([one], ClipByValue(limit)))(torch.tensor(0.01))
    assert float(whole(one.grad).abs().max()) == pytest.approx(0.01)


@in_processes(2)
def test_compiled_clip_over_a_group() -> None:
    one = torch.nn.Parameter(torch.zeros(2))
    one.grad = torch.full((2,), 3.0 + dist.get_rank())
    group = dist.group.WORLD
    for call in (
        lambda: tritonclip.clip_([one], 100.0, process_group=group),
        lambda: tritonclip.clip_grad_norm_([one], 100.0, process_group=group),
        lambda: tritonclip.get_total_norm([one.grad], process_group=group),
    ):
        assert_norm(_compiled(call)(), (2 * 9 + 2 * 16) ** 0.5)
