"""Names that look like attributes of a ClippedOptimizer, and belong to its rule."""

from __future__ import annotations

from typing import NoReturn


class _OfRule:
    """A number of a rule, which the optimizer neither has nor takes."""

    def __init__(self, example: str) -> None:
        self._example = example

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: object, kind: type) -> NoReturn:
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {self._name!r}, which belongs to a rule; "
            f"expected optimizer.clip.{self._name}, where the rule has it",
            name=self._name,
            obj=optimizer,
        )

    def __set__(self, optimizer: object, value: object) -> NoReturn:
        raise AttributeError(
            f"{self._name} belongs to a rule, and would change nothing here; expected a new rule, "
            f"such as optimizer.clip = {self._example}, got {self._name} = {value!r:.40}",
            name=self._name,
            obj=optimizer,
        )


class NoRuleNumbers:
    """Refuses fields that only rules have as attributes, since to set one would do nothing.

    Other names stay free: schedulers, trainers, hooks and subclasses keep attributes on optimizers.
    """

    max_norm = _OfRule("2.0")
    norm_type = _OfRule("ClipByGlobalNorm(1.0, norm_type=1.0)")
    max_rms = _OfRule("ClipByRMS(1.0)")
    quantile = _OfRule("ClipByQuantile(0.9)")
