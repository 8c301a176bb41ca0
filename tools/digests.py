"""The digest of what calls gave: hashes of every bit, and of texts."""

from __future__ import annotations

import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tritonclip

HERE = Path(__file__).parent
COLUMNS = ("index", "kind", "backend", "bits", "errors", "warnings", "messages")


class Digest:
    """All that the calls on one list gave; `shown`: each value is printed."""

    def __init__(self, *, shown: bool) -> None:
        self.bits, self.texts, self.shown = hashlib.sha256(), hashlib.sha256(), shown
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def say(self, text: str) -> None:
        if self.shown:
            print(f"  {text}")

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Adds a result, or an error, and the warnings; returns the result."""
        result = None
        self.say(f"> {function!r:.80} {[a for a in args if not isinstance(a, list)]} {kwargs}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                self.errors.append(public_name(error))
                self.add_text(f"{public_name(error)}: {error}")
        for warning in caught:
            here = "" if Path(warning.filename).parent == HERE else " elsewhere"
            self.warnings.append(warning.category.__name__ + here)
            self.add_text(f"{warning.category.__name__}: {warning.message}")
        self.add(result)
        return result

    def add_text(self, text: str) -> None:
        text = re.sub(r"0x[0-9a-f]+|\S*answers-\w+", "...", text)
        self.say(text)
        self.texts.update(text.encode() + b"\0")

    def add(self, value: Any) -> None:
        """A result: tensors, numbers and text, in any nesting."""
        if isinstance(value, Tensor):
            self.add_tensor(value)
        elif isinstance(value, Mapping):
            self.add([*value])
            self.add([*value.values()])
        elif isinstance(value, (list, tuple)):
            self.mark(f"{len(value)} of")
            for one in value:
                self.add(one)
        elif type(value) is float:
            self.add_tensor(torch.tensor(value, dtype=torch.float64))
        elif value is None or isinstance(value, (bool, int, str)):
            self.mark(repr(value))
        else:
            self.mark(public_name(value))

    def mark(self, text: str) -> None:
        self.say(text)
        self.bits.update(text.encode() + b"\0")

    def add_tensor(self, value: Tensor) -> None:
        value = value.detach()
        self.mark(f"{value.dtype} {tuple(value.shape)} {value.layout} {value.is_neg()}")
        if value.layout == torch.sparse_coo:
            self.mark(f"coalesced {value.is_coalesced()}")
            self.add(value._indices())
            value = value._values()
        value = value.resolve_conj().resolve_neg().as_subclass(Tensor)
        if self.shown:
            print(f"  {value}")
        # In the order of indices, so that a layout may be any.
        self.bits.update(bytes_of(value))

    def line(self, index: int, kind: str, backend: str) -> str:
        """The columns, with tabs between them."""
        said = [
            ",".join(f"{name} {len([*group])}" for name, group in itertools.groupby(names)) or "-"
            for names in (self.errors, self.warnings)
        ]
        bits, texts = (one.hexdigest()[:32] for one in (self.bits, self.texts))
        return "\t".join([str(index), kind, backend, bits, *said, texts])


def public_name(value: object) -> str:
    """The first of the classes of a value that Python or the library names in public."""
    for kind in type(value).__mro__:
        if kind.__module__ == "builtins" or hasattr(tritonclip, kind.__name__):
            return kind.__name__
    return "object"


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a tensor, in the order of its indices."""
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()
