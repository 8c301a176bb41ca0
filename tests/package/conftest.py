"""The reports of the examples, and the messages with which they refuse arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rich


@pytest.fixture
def fixed_width() -> None:
    """Reports are the same in every terminal."""
    rich.reconfigure(width=100)


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message of an example that ends for its arguments, which may name {folder} and {file}."""
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    names = {"folder": tmp_path / "folder", "file": tmp_path / "file"}

    def message(main: Callable[[list[str]], object], arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as caught:
            main([argument.format(**names) for argument in arguments])
        assert caught.value.code == 2
        return capsys.readouterr().err

    return message
