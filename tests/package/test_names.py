"""Every public name has an example, and every name of another library has a match."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import re
from operator import attrgetter
from typing import Any

import pytest

import tritonclip
from tritonclip import functional, hints


def _public() -> list[Any]:
    """Every public object, under its name."""
    modules = [tritonclip, functional]
    for name in ("lightning", "transformers"):
        # The packages that they serve are optional.
        with contextlib.suppress(ImportError):
            modules.append(importlib.import_module(f"tritonclip.integrations.{name}"))
    return [
        pytest.param(getattr(module, name), id=name)
        for module in modules
        for name in module.__all__
    ]


@pytest.mark.parametrize("value", _public())
def test_every_public_name_has_an_example(value):
    examples = doctest.DocTestParser().get_examples(value.__doc__ or "")
    assert any(one.want for one in examples)


def test_every_match_is_there():
    for name, text in hints.NAMES.items():
        path = re.split(r"[ ,(]", text)[0]
        assert name not in tritonclip.__all__
        # Their packages are optional.
        assert path.startswith("integrations.") or attrgetter(path)(tritonclip)


def test_public_names_are_few_and_listed():
    assert len(tritonclip.__all__) <= 35
    assert set(tritonclip.__all__) <= set(dir(tritonclip))
    assert set(tritonclip._LAZY) <= set(tritonclip.__all__)
