"""Who asks: PyTorch's own code that needs another answer than a user.

torch offers no protocol by which an optimizer could tell it; its modules are known by their names.
"""

import sys

CHECKPOINT = "torch.distributed.checkpoint.state_dict"
GRAD_SCALER = "torch.amp.grad_scaler"


def asks(module: str) -> bool:
    """Whether the caller of the caller is code of that module."""
    known = sys.modules.get(module)
    return known is not None and sys._getframe(2).f_globals is known.__dict__


def unscales() -> bool:
    """Whether the caller of the caller belongs to the `unscale_` of a GradScaler."""
    # A step only looks for inf there, by the same function.
    frame = sys._getframe(2)
    above = frame.f_back
    return (
        frame.f_code.co_name == "_unscale_grads_"
        and above is not None
        and above.f_code.co_name == "unscale_"
    )
