"""Counts of how often the statistics of an optimizer are read."""

from __future__ import annotations

import pytest

import tritonclip


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tritonclip.ClipStats]:
    """The statistics that were read on the host during the test, in order."""
    seen = []
    summary = tritonclip.ClipStats.summary

    def counting(stats: tritonclip.ClipStats) -> dict[str, float]:
        seen.append(stats)
        return summary(stats)

    monkeypatch.setattr(tritonclip.ClipStats, "summary", counting)
    return seen
