"""A list met in one context is clipped right in another: modes, settings, backends, other lists.

Each test clips the same parameters in a context and outside of it, in both orders.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tritonclip
from helpers.arena import Arena, OptimizerArena, TorchArena
from helpers.cases import INTERPRETED, Operators, each_rule, unchanged
from helpers.clips import clip
from tritonclip import ClipByGlobalNorm

# In some contexts operators serve in place of kernels, which is said once.
pytestmark = pytest.mark.filterwarnings("ignore:tritonclip's kernels cannot read:UserWarning")

TURNS = 1 if INTERPRETED else 2
GLOBAL = ClipByGlobalNorm(0.5)
RULES = each_rule(0.5, -0.3, 0.2)
CALLS = [
    *(pytest.param(Arena, *rule.values, id=rule.id) for rule in RULES),
    *(pytest.param(arena, GLOBAL, id=arena.__name__) for arena in (TorchArena, OptimizerArena)),
]
MIXED = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16)
# A launch takes the interpreter 0.1 s.
LISTS = [
    *([] if INTERPRETED else [pytest.param(torch.float32, id="float32")]),
    pytest.param(MIXED, id="mixed"),
]


_first_size = itertools.count(10)


def new_sizes() -> tuple[int, ...]:
    """Five sizes that no list of another test has, one of them zero and one more than a row."""
    return (next(_first_size), 0, 1, 700, 33)


class Functions(TorchFunctionMode):
    """Sees every function of torch, and calls it as it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "inference": lambda device: torch.inference_mode(),
    "no-grad": lambda device: torch.set_grad_enabled(False),
    "grad": lambda device: torch.set_grad_enabled(True),
    "function-mode": lambda device: Functions(),
    "dispatch-mode": lambda device: Operators(),
    "meta-device": lambda device: torch.device("meta"),
    "float16-by-default": lambda device: default_dtype(torch.float16),
    "float64-by-default": lambda device: default_dtype(torch.float64),
    "verified": lambda device: tritonclip.verify(),
}
INSIDE = pytest.mark.parametrize("context", CONTEXTS)
ORDERS = pytest.mark.parametrize(
    "order", [(True, False), (False, True)], ids=["inside-first", "outside-first"]
)


@pytest.mark.covering(1 if INTERPRETED else 2)
@INSIDE
@ORDERS
@pytest.mark.parametrize("dtypes", LISTS)
@pytest.mark.parametrize(("arena", "rule"), CALLS)
def test_list_is_clipped_inside_and_outside(device, arena, rule, dtypes, order, context):
    ours = arena(new_sizes(), dtypes, device)
    for inside in order * TURNS:
        clip(ours, rule, CONTEXTS[context](device.type) if inside else ExitStack())


@ORDERS
@pytest.mark.parametrize("rule", RULES)
def test_gradients_made_in_inference_mode_are_refused_outside(device, rule, order):
    """And clipped inside, where gradients made outside of it were clipped before."""
    sizes = new_sizes()
    normals = Arena(sizes, torch.float32, device)
    with torch.inference_mode():
        ours = Arena(sizes, torch.float32, device)
    for inside in order * TURNS:
        clip(normals, rule, torch.inference_mode() if inside else ExitStack())
        if inside:
            with torch.inference_mode():
                clip(ours, rule)
        else:
            refused = pytest.raises(RuntimeError, match="made in inference mode")
            with unchanged([ours.memory]), refused:
                ours.call(rule)


@pytest.mark.parametrize("order", [("torch", "auto"), ("auto", "torch")], ids="-".join)
@pytest.mark.parametrize("rule", RULES)
def test_backend_holds_from_the_next_call_on(backend, rule, order):
    ours = Arena(new_sizes(), torch.float32, backend.device)
    for name in (*order, backend.name) * 2:
        clip(ours, rule, tritonclip.use_backend(name))


@pytest.mark.skipif(INTERPRETED, reason="the kernels serve CPU tensors in the interpreter")
def test_backend_that_cannot_serve_refuses_a_list_met_before():
    ours = Arena(new_sizes())
    for _ in range(2):
        clip(ours, GLOBAL, tritonclip.use_backend("auto"))
        refused = pytest.raises(RuntimeError, match="asked for")
        with unchanged([ours.memory]), tritonclip.use_backend("triton"), refused:
            ours.call(GLOBAL)
