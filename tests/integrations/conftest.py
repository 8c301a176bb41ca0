"""Statistics that are read on the host, and recorders that wrappers are given."""

from typing import Any

import pytest

import tritonclip
from tritonclip.monitor.stats import ClipStats


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[ClipStats]:
    """The statistics that were read on the host during the test, in order."""
    seen = []
    summary = ClipStats.summary

    def counting(stats: ClipStats) -> dict[str, float]:
        seen.append(stats)
        return summary(stats)

    monkeypatch.setattr(ClipStats, "summary", counting)
    return seen


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The recorders given to wrappers during the test, in order; the wrappers record nothing."""
    seen = []
    make = tritonclip.ClippedOptimizer.__init__

    def noting(
        wrapper: tritonclip.ClippedOptimizer, *args: Any, recorder: object, **options: Any
    ) -> None:
        seen.append(recorder)
        make(wrapper, *args, **options)

    monkeypatch.setattr(tritonclip.ClippedOptimizer, "__init__", noting)
    return seen
