"""Parameters that a rule sets no limit for."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.serialization import add_safe_globals

from tritonclip.rules.rule import Rule

_EXPECTED = "exclude must be a module, a parameter, or an iterable of these"


class Excluded:
    """Parameters that a rule sets no limit for, compared by identity and kept alive.

    A deep or unpickled copy excludes the copies of the parameters, so copy a rule in one call with
    their model or optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = tuple(parameters)

    def _ids(self) -> tuple[int, ...]:
        return tuple(map(id, self.parameters))

    def __len__(self) -> int:
        return len(self.parameters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Excluded) and self._ids() == other._ids()

    def __hash__(self) -> int:
        return hash(self._ids())

    def __repr__(self) -> str:
        return f"<{len(self)} parameters>" if self.parameters else "None"


# In checkpoints, as part of a rule.
add_safe_globals([Excluded])


class ExcludingRule(Rule):
    """A rule whose argument `exclude` names parameters, see `as_excluded`."""

    __slots__ = ()
    exclude: Any

    @property
    def excludes(self) -> int:
        return len(self.exclude)

    def exempt(self, parameters: Sequence[Tensor]) -> list[bool]:
        if not len(self.exclude):
            # A graph that asks for an id serves no other parameter.
            return [False] * len(parameters)
        excluded = set(map(id, self.exclude.parameters))
        return [id(parameter) in excluded for parameter in parameters]


def as_excluded(_: str, exclude: object) -> Excluded:
    """The parameters of the user's argument, each once."""
    if isinstance(exclude, Excluded):
        return exclude
    if exclude is None:
        exclude = ()
    if isinstance(exclude, (Module, Tensor, str)):
        exclude = [exclude]
    items = list(exclude)  # type: ignore[call-overload]  # Python refuses what is no iterable
    if not items and isinstance(exclude, Iterator):
        raise ValueError(
            f"{_EXPECTED}, got a {type(exclude).__name__} that yields nothing, as if it was used "
            "before; write exclude=model.head, or exclude=None for no parameter"
        )
    parameters: dict[int, Tensor] = {}
    for position, item in enumerate(items):
        if not isinstance(item, (Module, Tensor)):
            raise TypeError(
                f"{_EXPECTED}, got {item!r:.80} of type {type(item).__name__} at position "
                f"{position}; write exclude=model.head, or exclude=model.head.parameters()"
            )
        members = [item] if isinstance(item, Tensor) else item.parameters()
        parameters.update((id(parameter), parameter) for parameter in members)
    return Excluded(list(parameters.values()))
