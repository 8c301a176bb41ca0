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
