"""Which rule holds for which parameter, what it measures, statistics, and names in errors."""

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, SparseAdam

from helpers import reference
from helpers.cases import assert_bits, assert_norm, copies, grad_of, normal, parameter, parameters
from helpers.training import count_readings
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClippedOptimizer,
    use_backend,
    verify,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ABSENT = object()


def grouped(groups, clips, rule: Any = 1.0, **options):
    """A wrapped SGD, one group a list of gradients; the rules of groups, ABSENT for no key."""
    dicts: list[dict[str, Any]] = []
    for grads, clip in zip(groups, clips, strict=True):
        dicts.append({"params": [parameter(grad.clone()) for grad in grads]})
        if clip is not ABSENT:
            dicts[-1]["clip"] = clip
    return ClippedOptimizer(SGD(dicts, lr=1.0), rule, **options)


def grads_of(optimizer, number=None):
    groups = optimizer.param_groups if number is None else [optimizer.param_groups[number]]
    return [grad_of(p) for group in groups for p in group["params"]]


def values_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def clipped(grads, max_norm, eps=1e-6):
    """What one norm over these gradients makes of them: the formula, by the reference."""
    wide = any(grad.dtype == torch.float64 for grad in grads)
    total = torch.tensor(reference.total_norm(grads)).to(torch.float64 if wide else torch.float32)
    coefficient = reference.coefficient(total, max_norm, eps)
    return [reference.scaled(grad, coefficient) for grad in grads]


def assert_close(actual, expected):
    """Equal but for a norm that is right to 1e-6, and a rounding that may turn the other way."""
    for ours, truth in zip(actual, expected, strict=True):
        rtol = 2e-6 + (torch.finfo(truth.dtype).eps if truth.dtype.itemsize == 2 else 0)
        torch.testing.assert_close(ours.detach().cpu(), truth, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        pytest.param(ABSENT, [1.5, 2.0], id="absent"),
        pytest.param(1.25, [0.75, 1.0], id="number"),
        pytest.param(ClipByNorm(1.25, eps=0.0), [0.75, 1.0], id="ClipByNorm"),
        pytest.param(ClipByValue(0.5), [0.5, 0.5], id="ClipByValue"),
        pytest.param(None, [3.0, 4.0], id="None"),
    ],
)
def test_rule_of_a_group_may_change_between_steps(clip, expected):
    optimizer = grouped([[torch.tensor([3.0, 4.0])]], [9.0], ClipByGlobalNorm(2.5, eps=0.0))
    optimizer.param_groups[0]["clip"] = clip
    if clip is ABSENT:
        del optimizer.param_groups[0]["clip"]
    optimizer.step()
    # A number means eps=1e-6, which is 2e-7 of the norm.
    torch.testing.assert_close(
        grads_of(optimizer), [torch.tensor(expected)], rtol=1e-6 if clip == 1.25 else 0, atol=0
    )


@pytest.mark.parametrize("which", ["wrapper", "inner"])
def test_add_param_group_takes_a_rule(which):
    optimizer = grouped([[normal(5000, seed=1), normal((3, 7), seed=2)]], [ABSENT])
    grad = normal(70, seed=9)
    target = optimizer if which == "wrapper" else optimizer.optimizer
    target.add_param_group({"params": [parameter(grad.clone())], "clip": 0.25})
    optimizer.step()
    assert_close(grads_of(optimizer, 1), clipped([grad], 0.25))
    assert_norm(optimizer.stats.group_norms[1], reference.norm(grad))


@pytest.mark.parametrize("nonfinite", ["propagate", "error", "zero", "skip"])
def test_step_does_not_heed_the_default_device(nonfinite):
    """Nor its dtype: that of the parameters counts."""
    weight = torch.nn.Parameter(torch.zeros(2))
    with torch.device("meta"):
        optimizer = ClippedOptimizer(torch.optim.SGD([weight], lr=1.0), 0.5, nonfinite=nonfinite)
        optimizer.step()
        weight.grad = torch.tensor([3.0, 4.0], device="cpu")
        optimizer.step()
        summary = optimizer.stats.summary()
    assert (summary["norm"], summary["steps"], summary["clipped_steps"]) == (5.0, 2, 1)


def test_groups_of_mixed_dtypes_share_one_norm(device):
    groups = [[normal(3000, dtype, device, seed)] for seed, dtype in enumerate(DTYPES)]
    optimizer = grouped(groups, [ABSENT] * len(groups))
    optimizer.step()
    grads = [grad for group in groups for grad in group]
    assert_close(grads_of(optimizer), clipped(grads, 1.0))
    assert optimizer.stats.last_norm.dtype == torch.float64
    # Right to what is promised for the least of these dtypes.
    expected = reference.total_norm(grads)
    assert optimizer.stats.last_norm.item() == pytest.approx(expected, rel=1e-6, abs=0)


def test_group_norms_keep_the_dtype_of_their_group():
    groups = [[normal(30, dtype, seed=seed)] for seed, dtype in enumerate(DTYPES)]
    optimizer = grouped(groups, [1.0] * len(groups))
    optimizer.step()
    dtypes = [optimizer.stats.group_norms[i].dtype for i in range(len(DTYPES))]
    assert dtypes == [torch.float32, torch.float32, torch.float32, torch.float64]


def sparse_grad():
    """Not coalesced: row 1 occurs twice, and counts as the sum 4."""
    rows, values = torch.tensor([[1, 0, 1]]), torch.tensor([[1.0], [3.0], [3.0]])
    return torch.sparse_coo_tensor(rows, values, (3, 1), check_invariants=False)


def test_sparse_gradient_shares_the_norm_of_dense_ones():
    grads, rule = [[sparse_grad()], [torch.tensor([12.0])]], ClipByGlobalNorm(6.5, eps=0.0)
    optimizer = grouped(grads, [ABSENT, ABSENT], rule)
    sparse, dense = values_of(optimizer)
    optimizer.step()
    # The norm of 3, 4 and 12 is 13: the coefficient is 1/2.
    assert optimizer.stats.last_norm == 13.0
    assert sparse.tolist() == [[-1.5], [-2.0], [0.0]]
    assert dense.tolist() == [-6.0]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        pytest.param(ClipByGlobalNorm(2.5, eps=0.0), [[1.5], [2.0], [0.0]], id="ClipByGlobalNorm"),
        pytest.param(ClipByNorm(2.5, eps=0.0), [[1.5], [2.0], [0.0]], id="ClipByNorm"),
        pytest.param(ClipByValue(3.5), [[3.0], [3.5], [0.0]], id="ClipByValue"),
        pytest.param(ClipByValue(lambda step: 3.5), [[3.0], [3.5], [0.0]], id="schedule"),
        pytest.param(None, [[3.0], [4.0], [0.0]], id="None"),
    ],
)
def test_sparse_group_takes_a_rule_of_its_own(own, expected):
    table = torch.nn.Parameter(torch.zeros(3, 1))
    table.grad = sparse_grad()
    group: dict[str, Any] = {"params": [table], "clip": own}
    ClippedOptimizer(SparseAdam([group]), 1.0).step()
    assert grad_of(table).is_sparse
    assert grad_of(table).to_dense().tolist() == expected


def test_sparse_groups_each_take_a_rule():
    """They have no address that says whether they share a gradient."""
    rules = [ClipByNorm(limit, eps=0.0) for limit in (2.5, 10.0)]
    optimizer = grouped([[sparse_grad()], [sparse_grad()]], rules)
    tables = values_of(optimizer)
    optimizer.step()
    assert tables[0].tolist() == [[-1.5], [-2.0], [0.0]]
    assert tables[1].tolist() == [[-3.0], [-4.0], [0.0]]


class _NoHooks(SGD):
    """Saves and loads without the hooks of torch's."""

    def state_dict(self):
        return {"state": {}, "param_groups": [dict(g) for g in self.param_groups]}

    def load_state_dict(self, state_dict):
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            params = group["params"]
            group.clear()
            group.update(saved, params=params)


def test_rules_stay_where_the_wrapped_optimizer_runs_no_hooks():
    rule = ClipByValue(0.5)
    groups = [{"params": [parameter(torch.ones(2))], "clip": rule}]
    optimizer = ClippedOptimizer(_NoHooks(groups), 1.0)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["clip"] == "not saved"
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["clip"] is rule


@pytest.mark.parametrize("own", [0.5, None], ids=str)
def test_step_of_groups_under_verify_needs_no_other_process(own):
    optimizer = grouped([[torch.ones(4)], [torch.ones(4)]], [ABSENT, own])
    with verify():
        optimizer.step()
    assert int(optimizer.stats.steps) == 1


def with_nan(own=ABSENT, *, names=True):
    """Two groups, the second gradient of the second with a NaN, under "error"."""
    params = parameters([normal(3, seed=i) for i in range(4)])
    grad_of(params[3])[1] = math.nan
    labelled = list(zip(["a", "b", "c.weight", "c.bias"], params, strict=True))
    members: list[Any] = labelled if names else params
    groups: list[dict[str, Any]] = [{"params": members[:2]}, {"params": members[2:]}]
    if own is not ABSENT:
        groups[1]["clip"] = own
    return ClippedOptimizer(SGD(groups, lr=1.0), 1.0, nonfinite="error")


@pytest.mark.parametrize("own", [ABSENT, 0.5, None], ids=["absent", "own", "None"])
@pytest.mark.parametrize("names", [True, False], ids=["named", "unnamed"])
def test_error_names_the_parameter(names, own):
    optimizer = with_nan(own, names=names)
    label = r"c\.bias$" if names else r"param_groups\[1\]\['params'\]\[1\]$"
    before = copies(grads_of(optimizer))
    with pytest.raises(RuntimeError, match=label):
        optimizer.step()
    assert_bits(grads_of(optimizer), before)
    assert all(not p.any() for p in values_of(optimizer))


@pytest.mark.parametrize("own", [0.5, None], ids=["own", "None"])
def test_error_says_why_a_norm_was_not_the_reason(own):
    """Only gradients under a rule have a norm to speak of."""
    with pytest.raises(RuntimeError) as caught:
        with_nan(own).step()
    assert ("total norm" in str(caught.value)) == (own is not None)
    assert "Non-finite gradients: c.bias" in str(caught.value)


@pytest.mark.parametrize("own", [ABSENT, 0.5], ids=["absent", "own"])
def test_error_skips_parameters_without_gradient_when_it_counts(own):
    optimizer = with_nan(own)
    values_of(optimizer)[0].grad = values_of(optimizer)[2].grad = None
    with pytest.raises(RuntimeError, match=r": c\.bias$"):
        optimizer.step()


def test_error_names_a_parameter_that_was_added_by_hand():
    optimizer = with_nan()
    optimizer.param_groups[1]["params"].append(parameter(torch.full((2,), math.nan)))
    with pytest.raises(RuntimeError, match=r"c\.bias, param_groups\[1\]\['params'\]\[2\]$"):
        optimizer.step()


def test_every_group_is_measured_once(verbs, device, monkeypatch):
    """By one norm, which shows NaN and is that of an outlier too."""
    measured = count_readings(monkeypatch, verbs)
    grads = [[torch.ones(n, device=device)] for n in (3, 5)]
    grouped(grads, [1.0, 1.0], nonfinite="skip", skip_above=100.0).step()
    assert len(measured) == 2


def test_step_refuses_a_backend_before_any_group_is_written(backend):
    if backend.name != "triton" or backend.device.type != "cpu":
        pytest.skip("needs kernels that serve CPU tensors only")
    grads = [[torch.tensor([3.0, 4.0])], [torch.zeros(2, device="meta")]]
    optimizer = grouped(grads, [ABSENT, ClipByValue(0.5)])
    with use_backend("triton"), pytest.raises(RuntimeError, match="not on meta"):
        optimizer.step()
    assert grads_of(optimizer)[0].tolist() == [3.0, 4.0]
