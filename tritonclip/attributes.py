"""Errors for attributes that are not there, which name those that are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn


class NamesAttributes:
    """An object that lists its public attributes where another one is asked for."""

    # Hidden from type checkers, which would let every name pass.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            # Of names that begin so, copy and pickle ask before there is anything to list.
            if not name.startswith("_"):
                message += f"; expected one of {', '.join(_public(self))}"
            raise AttributeError(message, name=name, obj=self)


def _public(owner: object) -> list[str]:
    """The attributes to read, and the methods; without those that change the object."""
    names = [name for name in dir(owner) if not (name.startswith("_") or name.endswith("_"))]
    return [f"{name}()" if callable(getattr(type(owner), name, None)) else name for name in names]
