"""Processes that spin while something is timed come to an end."""

from __future__ import annotations

import subprocess

from bench import timing


def test_busy_cores_are_given_back(monkeypatch):
    started = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with timing.busy_cores(2):
        assert [process.poll() for process in started] == [None, None]
    assert None not in [process.poll() for process in started]
