"""The notebook runs from its first cell to its last, and its network learns."""

import re
from pathlib import Path
from typing import Any

import pytest

from helpers.cases import INTERPRETED

nbformat = pytest.importorskip("nbformat", reason="needs tritonclip[test]")
nbclient = pytest.importorskip("nbclient", reason="needs tritonclip[test]")

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
QUICKSTART = ROOT / "examples" / "quickstart.ipynb"


@pytest.mark.skipif(INTERPRETED, reason="trains on the native backend: no kernel is interpreted")
def test_quickstart_learns_where_it_clips(tmp_path, monkeypatch):
    # This Python, and no other that is installed as a kernel of the same name.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(QUICKSTART, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    (train,) = (cell for cell in notebook.cells if "steps=300" in cell.source)
    train.source = train.source.replace("steps=300", "steps=120")

    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()

    cells = {cell.id: cell for cell in notebook.cells}
    (without,) = _shares(cells["without"])
    at_suggestion, _, at_one, clipped_at_one = _shares(cells["clipped"])
    # 21% without clipping, 79% at 1.0; after 300 steps 34% and 87%.
    assert at_one > without + 20
    assert clipped_at_one > 80
    assert 0 <= at_suggestion <= 100
    assert "image/png" in cells["plot"].outputs[-1].data


def _shares(cell: Any) -> list[int]:
    """The percentages that a cell prints."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return [int(share) for share in re.findall(r"(\d+)%", printed)]
