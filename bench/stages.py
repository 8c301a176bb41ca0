"""Where the time of a call goes: clocks around the functions that do its stages."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

# The stages of a call, and the functions whose time they are.
STAGES = {
    "walk": ("gradients:of_parameters",),
    "checks": (
        "gradients:_check_tensors",
        "gradients:_distinct",
        "gradients:_fill_groups",
        "familiar:Familiar.groups",
        "familiar:Familiar.learn",
    ),
    "backend": ("dispatch:backend_of",),
    "compare": ("kernels.backend:prepare",),
    "layout": ("kernels.chunks:_Cache._lay_out",),
    "upload": ("kernels.chunks:_on_cpu", "kernels.chunks:_Cache._upload"),
}
LAUNCHES = ("kernels.norm:launch", "kernels.scale:launch", "kernels.clamp:launch")


class Clocks:
    """Time spent in wrapped functions, each without the wrapped ones that it calls."""

    def __init__(self) -> None:
        self.spent_us: dict[str, float] = {}
        self._inner = [0.0]

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added to the stage."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._inner.append(0.0)
            start = perf_counter_ns()
            result = function(*arguments, **keywords)
            whole = (perf_counter_ns() - start) / 1e3
            own = whole - self._inner.pop()
            self._inner[-1] += whole
            self.spent_us[stage] = self.spent_us.get(stage, 0.0) + own
            return result

        return timed


def owner_of(place: str) -> tuple[Any, str]:
    """The module or class that holds a function named as in STAGES, and its name there."""
    module, _, path = place.partition(":")
    owner = importlib.import_module(f"tritonclip.{module}")
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name


@contextmanager
def clocks(stages: dict[str, tuple[str, ...]]) -> Iterator[Clocks]:
    """Wraps the functions of the stages in clocks."""
    result = Clocks()
    with ExitStack() as stack:
        for stage, places in stages.items():
            for place in places:
                owner, name = owner_of(place)
                wrapped = result.wrap(stage, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, wrapped))
        yield result


@contextmanager
def no_launches() -> Iterator[None]:
    """Replaces every launch by nothing."""
    with ExitStack() as stack:
        for place in LAUNCHES:
            owner, name = owner_of(place)
            stack.enter_context(patch.object(owner, name, lambda *_, **__: None))
        yield
