"""Names that look like attributes of a ClippedOptimizer, and belong to its rule."""

from __future__ import annotations

from typing import NoReturn


class _OfRule:
    """A number of a rule, which the optimizer neither has nor takes."""

    def __init__(self, owner: str, example: str) -> None:
        self._owner, self._example = owner, example

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: object, kind: type) -> NoReturn:
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {self._name!r}, which belongs to a rule; "
            f"expected optimizer.{self._owner}.{self._name}, where the rule has it",
            name=self._name,
            obj=optimizer,
        )

    def __set__(self, optimizer: object, value: object) -> NoReturn:
        raise AttributeError(
            f"{self._name} belongs to a rule, and would change nothing here; expected a new rule, "
            f"such as optimizer.{self._owner} = {self._example}, got {self._name} = {value!r:.40}",
            name=self._name,
            obj=optimizer,
        )


class NoRuleNumbers:
    """Refuses the fields of rules as attributes, since to set one would do nothing.

    Other names stay free: schedulers, trainers and hooks keep attributes on optimizers.
    """

    max_norm = _OfRule("clip", "2.0")
    norm_type = _OfRule("clip", "ClipByGlobalNorm(1.0, norm_type=1.0)")
    eps = _OfRule("clip", "ClipByGlobalNorm(1.0, eps=0.0)")
    min = _OfRule("clip", "ClipByValue(-1.0, 1.0)")
    max = _OfRule("clip", "ClipByValue(-1.0, 1.0)")
    max_rms = _OfRule("clip", "ClipByRMS(1.0)")
    quantile = _OfRule("clip", "ClipByQuantile(0.9)")
    window = _OfRule("clip", "ClipByQuantile(0.9, window=1000)")
    threshold = _OfRule("clip", "ClipByZScore(2.5)")
    decay = _OfRule("clip", "ClipByZScore(decay=0.97)")
    warmup = _OfRule("clip", "ClipByZScore(warmup=25)")
    ratio = _OfRule("clip", "ClipByUnitNorm(0.01)")
    exclude = _OfRule("clip", "ClipByUnitNorm(0.01, exclude=model.head)")
    sigmas = _OfRule("skip_above", "Outlier(6.0)")
