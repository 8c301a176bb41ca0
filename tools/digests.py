"""The digest of what calls gave: hashes of every bit, and sums to compare by digits."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tritonclip

HERE = Path(__file__).parent
COLUMNS = ("index", "kind", "backend", "bits", "form", "errors", "warnings", "messages", "digits")
# By the narrowest dtype of a list: as many digits as one rounding more or less may change.
TOLERANCES = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float16: 1e-3}
TOLERANCES |= {torch.bfloat16: 8e-3, torch.float8_e4m3fn: 0.13}


@functools.cache
def weights(n: int) -> Tensor:
    """Factors by which values are summed up, so that their order counts."""
    return torch.arange(n, dtype=torch.float64).cos()


class Digest:
    """All that the calls on one list gave.

    Args:
        sums: whether values are summed up, for comparisons by digits.
        shown: whether each value is printed.
    """

    def __init__(self, *, sums: bool, shown: bool) -> None:
        self.bits, self.form, self.texts = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.sums, self.shown = sums, shown
        self.n, self.direction, self.size, self.tolerance = 0, 0.0, 0.0, 1e-12

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
        self.form.update(text.encode() + b"\0")

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
        if not value.is_floating_point() and not value.is_complex():
            self.form.update(bytes_of(value))
        elif self.sums:
            self.sum_up(value)

    def sum_up(self, value: Tensor) -> None:
        """Adds direction and size of a tensor to those of all."""
        real = torch.view_as_real(value) if value.is_complex() else value
        real = real.double().reshape(-1)
        finite = real.isfinite()
        self.form.update(bytes_of(real[~finite]))
        real = real.where(finite, 0.0)
        # Below the normal numbers there are no digits to compare.
        smallest = 1e-300 if real.dtype == value.dtype else 1e-6 * torch.finfo(value.dtype).tiny
        total = max(float(real.abs().sum()), smallest * max(real.numel(), 1))
        self.n += 1
        self.direction += math.cos(self.n) * float(real @ weights(real.numel())) / total
        self.size += math.sin(self.n) * math.log(total)

    def line(self, index: int, kind: str, backend: str) -> str:
        """The columns, with tabs between them."""
        digits = f"{self.n} {self.direction!r} {self.size!r} {self.tolerance}" if self.n else "-"
        hashes = [one.hexdigest()[:32] for one in (self.bits, self.form)]
        said = [
            ",".join(f"{name} {len([*group])}" for name, group in itertools.groupby(names)) or "-"
            for names in (self.errors, self.warnings)
        ]
        cells = [str(index), kind, backend, *hashes, *said, self.texts.hexdigest()[:32], digits]
        return "\t".join(cells)


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
