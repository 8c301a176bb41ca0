"""Compiled graphs of calls, and the marks of tests that compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import INTERPRETED

NEEDS_DYNAMO = pytest.mark.skipif(INTERPRETED, reason="dynamo cannot trace beside the interpreter")
# Of files whose tests all compile.
COMPILING = [
    pytest.mark.usefixtures("fresh_compiler"),
    # A replaced torch.empty would be traced in place of torch's.
    pytest.mark.plain_empty,
    # torch's own deprecations while it traces are not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    NEEDS_DYNAMO,
]


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in one graph."""
    return torch.compile(call, fullgraph=True, backend="aot_eager")
