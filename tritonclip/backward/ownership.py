"""An identity that knows in backward whether its gradient may be overwritten.

Autograd passes one tensor to several branches, expands one element to many, and hands on tensors
that users gave it or keep. All of these hold one more reference, to the object, to the tensor, or
to its memory, than a gradient that the operator before has just made. Python and PyTorch add
references while they call, so those to a gradient that nobody else holds are counted first.
"""

import sys
from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from tritonclip.engine.arguments import PLAIN
from tritonclip.engine.memory import has_overlap

# Reference counts of a gradient and of its storage, from Python and from C++; None if unavailable.
References = tuple[int, int, int, int] | None


class Identity(torch.autograd.Function):
    """Passes its gradient in backward to a function, with the counts of references to it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor, References], Tensor]) -> Tensor:
        """A view of `x`; in backward, `function` gets its gradient and returns another one."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the function; a missing gradient is None."""
        ctx.function = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """The result of the function."""
        # Counted here, in every case: each function in between holds one more.
        return None if grad is None else ctx.function(grad, _references(grad)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, _: None) -> Tensor | None:
        """The tangent of an identity."""
        return None if tangent is None else tangent.view_as(tangent)


def is_free(grad: Tensor, references: References) -> bool:
    """Whether a gradient with these references may be overwritten."""
    return references is not None and references == references_to_free() and not has_overlap(grad)


@cache
def references_to_free() -> References:
    """The references to a gradient that nobody else holds."""
    counted: list[References] = []

    def keep(grad: Tensor, references: References) -> Tensor:
        counted.append(references)
        return grad

    def count() -> None:
        # A debugger may hold the variables of every function.
        if sys.gettrace() is None and sys.getprofile() is None:
            x = torch.zeros(2, device="cpu", requires_grad=True)
            # The derivative of a negation is a new tensor.
            (-Identity.apply(x, keep)).sum().backward()  # type: ignore[no-untyped-call]

    # In a thread, where no graph, hook, mode or transform of the user is active.
    thread = Thread(target=count)
    thread.start()
    thread.join()
    return counted[0] if counted else None


def _references(grad: Tensor) -> References:
    if type(grad) not in PLAIN or grad.layout != torch.strided:
        return None
    try:
        memory = grad.untyped_storage()
        if not memory.resizable():
            # Of NumPy, or of another owner that no count sees.
            return None
        return (
            sys.getrefcount(grad),
            grad._use_count(),  # type: ignore[attr-defined]
            sys.getrefcount(memory),
            torch._C._storage_Use_Count(memory._cdata),
        )
    except (AttributeError, RuntimeError):
        # Private names of torch; a tensor without memory.
        return None
