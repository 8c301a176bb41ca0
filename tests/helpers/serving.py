"""How CPU tensors are served: by plans made anew, and as tensors of other devices are."""

from collections.abc import Iterator
from contextlib import contextmanager

from tritonclip.backends import choose
from tritonclip.engine.plan_cache import plans


def forget_plans() -> None:
    """The next call on any list makes its plan anew."""
    plans.clear()


@contextmanager
def decided_on_device() -> Iterator[None]:
    """Coefficients are tensors and nothing is read on the host, as on an accelerator."""
    before = choose.host_decides
    choose.host_decides = lambda device: False
    forget_plans()
    try:
        yield
    finally:
        choose.host_decides = before
        forget_plans()
