"""Versions that stand in two files agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())


def test_pre_commit_runs_the_pinned_ruff() -> None:
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hook = re.search(
        r"^    rev: v(\S+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE
    )

    assert pinned is not None
    assert hook is not None
    assert hook[1] == pinned[1]
