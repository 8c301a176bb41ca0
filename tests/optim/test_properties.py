"""Steps of any groups, rules, gradients and policies are those of a plain float64 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import reference
from helpers.cases import assert_bits, bounds_of, copies, grad_of, normal
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer

N_GROUPS = 3
LIMITS = st.floats(1e-2, 1e2)
NORM_TYPES = st.sampled_from([1.0, 2.0, 2.0, 3.0, torch.inf])
EPS = st.sampled_from([0.0, 1e-6])
RULES = st.one_of(
    st.builds(ClipByGlobalNorm, LIMITS, NORM_TYPES, eps=EPS),
    st.builds(ClipByNorm, LIMITS, NORM_TYPES, eps=EPS),
    st.builds(lambda low, high: ClipByValue(-low, high), LIMITS, LIMITS),
)


@dataclass(frozen=True)
class Member:
    """A parameter: its size, its group, and whether it is clipped."""

    size: int
    group: int
    need_clip: bool


MEMBERS = st.lists(
    st.builds(
        Member,
        st.sampled_from([0, 1, 2, 7, 33, 700]),
        st.integers(0, N_GROUPS - 1),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=6,
)
# The magnitude of each gradient, None for no gradient; and where not None, one bad element.
STEPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([1.0, 1.0, 1e-3, 1e3, None]), min_size=6, max_size=6),
        st.sampled_from([None, None, None, math.nan, math.inf]),
    ),
    min_size=1,
    max_size=3,
)
POLICIES = st.sampled_from(["propagate", "zero", "skip"])


def gradients(members: Sequence[Member], step: Any, seed: int) -> list[Tensor | None]:
    """The gradients of a step; the first that has elements takes the bad one."""
    magnitudes, bad = step
    grads: list[Tensor | None] = []
    for at, (member, magnitude) in enumerate(zip(members, magnitudes, strict=False)):
        grad = None
        if magnitude is not None:
            grad = magnitude * normal(member.size, seed=100 * seed + at)
            if bad is not None and member.size:
                grad[-1], bad = bad, None
        grads.append(grad)
    return grads


def clipped(grads: list[Tensor], rule: Any, policy: str) -> list[Tensor]:
    """Gradients under one rule, float64."""
    if policy == "zero" and not all(bool(grad.isfinite().all()) for grad in grads):
        return [torch.zeros_like(grad) for grad in grads]
    if isinstance(rule, ClipByValue):
        return [grad.clamp(*bounds_of(rule)) for grad in grads]
    result = []
    for share in [[grad] for grad in grads] if isinstance(rule, ClipByNorm) else [grads]:
        norm = torch.tensor(reference.total_norm(share, rule.norm_type), dtype=torch.float64)
        coefficient = reference.coefficient(norm, rule.max_norm, rule.eps)
        result += [grad * coefficient for grad in share]
    return result


def expected(
    members: Sequence[Member],
    grads: Sequence[Tensor | None],
    rules: list[Any],
    rule: Any,
    policy: str,
) -> list[Tensor | None]:
    """The gradients that a step applies: groups without a rule of their own share one norm."""
    result = [None if grad is None else grad.double() for grad in grads]
    shares: dict[int | None, list[int]] = {}
    for i, member in enumerate(members):
        if member.need_clip and grads[i] is not None:
            key = None if rules[member.group] is None else member.group
            shares.setdefault(key, []).append(i)
    for key, indices in shares.items():
        share = [grad for i in indices if (grad := result[i]) is not None]
        values = clipped(share, rule if key is None else rules[key], policy)
        for i, value in zip(indices, values, strict=True):
            result[i] = value
    return result


def take_step(
    optimizer: ClippedOptimizer, params: list[Tensor], truth: list[Tensor | None], policy: str
) -> None:
    """Steps, and compares gradients and parameters."""
    before = copies(params)
    finite = all(bool(p.grad.isfinite().all()) for p in params if p.grad is not None)
    skipped = optimizer.stats.skipped_steps
    optimizer.step()
    if policy == "skip" and not finite:
        assert optimizer.stats.skipped_steps == skipped + 1
        assert_bits(params, before)
        return
    assert optimizer.stats.skipped_steps == skipped
    for param, old, value in zip(params, before, truth, strict=True):
        if value is None:
            assert_bits([param], [old])
            continue
        # A norm is right to 1e-6; its rounding, the coefficient's and each element's are 2**-24.
        torch.testing.assert_close(
            grad_of(param).double(), value, rtol=1.3e-6, atol=2.0**-149, equal_nan=True
        )
        torch.testing.assert_close(
            param.detach(), old - grad_of(param), rtol=0, atol=0, equal_nan=True
        )


def new_params(members: Sequence[Member]) -> list[Tensor]:
    params: list[Any] = [torch.nn.Parameter(normal(m.size, seed=i)) for i, m in enumerate(members)]
    for param, member in zip(params, members, strict=True):
        param.need_clip = member.need_clip
    return params


@given(
    members=MEMBERS,
    own=st.lists(st.none() | RULES, min_size=N_GROUPS, max_size=N_GROUPS),
    rule=RULES,
    steps=STEPS,
    policy=POLICIES,
)
def test_step_is_that_of_the_reference(members, own, rule, steps, policy):
    params = new_params(members)
    groups: list[dict[str, Any]] = [{"params": []} for _ in own]
    for group, given_rule in zip(groups, own, strict=True):
        if given_rule is not None:
            group["clip"] = given_rule
    for param, member in zip(params, members, strict=True):
        groups[member.group]["params"].append(param)
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=1.0), rule, nonfinite=policy)
    for seed, step in enumerate(steps):
        grads = gradients(members, step, seed)
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        take_step(optimizer, params, expected(members, grads, own, rule, policy), policy)
