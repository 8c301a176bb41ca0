"""Verbs of a backend that give wrong results, for tests of `verify`."""

from typing import Any


def break_scale(monkeypatch, verbs: Any, spoil, verb="scale_"):
    """Lets `spoil` at the gradients after every call of a verb that writes."""
    real = getattr(verbs, verb)

    def broken(*args, **options):
        result = real(*args, **options)
        spoil()
        return result

    monkeypatch.setattr(verbs, verb, broken)


def break_norm(monkeypatch, verbs: Any, factor: float):
    """Makes every measured norm wrong by a factor."""
    real = verbs.norm

    def broken(batch, norm_type, of):
        norms = real(batch, norm_type, of)
        return [factor * norm for norm in norms] if isinstance(norms, list) else norms.mul_(factor)

    monkeypatch.setattr(verbs, "norm", broken)
