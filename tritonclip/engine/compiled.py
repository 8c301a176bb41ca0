"""Traced calls: the graph collects the gradients, and one custom operator clips them.

Addresses and pointer tables cannot be traced. The operator finds them when the graph runs, with the
same checks and the same code as an eager call. It clips by the global norm or by value, and its
numbers are constants of the graph. All other calls break the graph of torch.compile, see
`graph_break.py`; make_fx and FakeTensorMode refuse them.
"""

from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip.engine import execute
from tritonclip.engine.arguments import needs_clip, with_labels
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import result_dtype
from tritonclip.modes import WHOLE
from tritonclip.rules import ClipByGlobalNorm, ClipByValue, Rule, rule_of


def _clip(grads: list[Tensor], names: str, numbers: list[float], nonfinite: str) -> Tensor:
    """Clips distinct gradients; returns the norm, or an empty tensor for ClipByValue.

    `names` has the name of a gradient in each line. `numbers` are the two bounds of ClipByValue or
    the three arguments of ClipByGlobalNorm.
    """
    gradients = Gradients(grads[0].device, lambda index: names.split("\n")[index]).take_(grads)
    rule: Rule = rule_of(ClipByValue if len(numbers) == 2 else ClipByGlobalNorm, *numbers)
    norm = execute.clip_(gradients, rule, nonfinite)
    return grads[0].new_empty(0) if norm is None else norm


def _simulate_clip(grads: Sequence[Tensor], _: str, numbers: Sequence[float], __: str) -> Tensor:
    clamps = len(numbers) == 2
    return grads[0].new_empty(0) if clamps else grads[0].new_empty((), dtype=result_dtype(grads))


# The layers of Python around a `torch.library.custom_op` take longer than clipping a small list, so
# that this operator does without those for autograd and versions: it has no derivative, and it
# increments versions itself. CUDA graphs of torch.compile must not capture it: the tables of a list
# would lie in the memory of the graph, and outlive it.
_LIBRARY = torch.library.Library("tritonclip", "FRAGMENT")
_LIBRARY.define(
    "clip_(Tensor(a!)[] grads, str names, float[] numbers, str nonfinite) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
_LIBRARY.impl("clip_", _clip, "CompositeExplicitAutograd")
for _key in ("Autograd", "ADInplaceOrView"):
    _LIBRARY.impl("clip_", torch.library.fallthrough_kernel, _key)
torch.library.register_fake("tritonclip::clip_", _simulate_clip, lib=_LIBRARY)
_clip_op = torch.ops.tritonclip.clip_.default


def break_graph(eager: Callable[..., Any], argument: Any, *arguments: Any, **options: Any) -> Any:
    """Breaks the graph and makes the user's call again, eagerly."""
    from tritonclip.engine import graph_break

    return graph_break.call(eager, _read_once(argument), *arguments, **options)


def _read_once(argument: Any) -> Any:
    """Makes a list of an iterator, which could be read only once."""
    return argument if isinstance(argument, (Module, Sized)) else list(argument)


def clip_(
    call: Callable[..., Any], argument: Any, rule: Rule, nonfinite: str, **options: object
) -> Tensor | None:
    """The body of the clipping functions while they are traced.

    `call` is the user's function, which takes the further arguments by name. Options that the user
    did not give are None.
    """
    argument = _read_once(argument)
    parameters, label_of = with_labels(argument)
    # Tensors are hashed by identity.
    names: dict[Tensor, str] = {}
    for index, parameter in enumerate(parameters):
        grad = parameter.grad
        if grad is not None and grad not in names and needs_clip(parameter):
            names[grad] = label_of(index)
    if (
        any(option is not None for option in options.values())
        or type(rule) not in (ClipByGlobalNorm, ClipByValue)
        or not rule.fixed
        # A process without gradients takes part, too, if its parameters are DTensors. The class of
        # plain parameters is guarded anyway, so that the attribute adds no guard for them.
        or any(type(p) not in WHOLE and hasattr(p, "_spec") for p in parameters)
        or any(type(grad) not in WHOLE for grad in names)
    ):
        # The eager call does the checks, and raises on all processes.
        return break_graph(call, argument, rule, nonfinite=nonfinite, **options)  # type: ignore[no-any-return]
    if not names:
        return None if rule.clamps else torch.zeros((), dtype=torch.float32)
    numbers: Any = [getattr(rule, name) for name in rule.__match_args__]
    # Gradients that require grad keep their graph, as in an eager call.
    with torch.no_grad():
        norm: Tensor = _clip_op([*names], "\n".join(names.values()), numbers, nonfinite)
    return None if rule.clamps else norm
