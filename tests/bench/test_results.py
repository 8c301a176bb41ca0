"""Rows go to JSON whole, and to tables with their quartiles and goals."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import CPU, ROW
from rich import box

import tritonclip
from bench import results
from bench.results import Row


def test_rows_go_to_json_and_come_back(tmp_path):
    given = [ROW, replace(ROW, case={"workload": "b"}, values={}, correct=False)]
    results.write(tmp_path / "rows.json", {"torch": "2"}, given)
    assert results.read(tmp_path / "rows.json") == ({"torch": "2"}, given)


def test_provenance_names_the_backend_that_serves():
    for name in ("native", "torch"):
        with tritonclip.use_backend(name):
            assert results.provenance(CPU)["backend"] == name


def test_provenance_names_the_command_without_its_output_file(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "speed", "--out", "folder/rows.json", "--quick"])
    assert results.provenance(CPU)["command"] == "python -m bench speed --quick"


def test_rows_that_are_not_written_whole_leave_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    results.write(path, {}, [ROW])

    def write_half(self, text):
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(KeyboardInterrupt):
        results.write(path, {}, [ROW, replace(ROW, case={"workload": "b"})])
    assert results.read(path) == ({}, [ROW])


def test_rows_refuse_numbers_that_json_lacks(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        results.write(tmp_path / "rows.json", {}, [replace(ROW, values={"wall_us": torch.nan})])


def test_cell_shows_quartiles_and_a_missed_goal():
    values = {"total_us": 2.0, "total_us_lo": 1.0, "total_us_hi": 3.0, "functions": 21}
    row = Row("host", {"call": "clip_"}, {**values, "functions_goal": 20})
    assert results.cell(row, "total_us") == "2.0 (1.0 to 3.0)"
    assert results.cell(row, "functions") == "21 / 20 over"
    row.values["functions"] = 20
    assert results.cell(row, "functions") == "20 / 20"
    assert results.cell(row, "modules") == ""


def test_table_has_the_columns_that_any_row_has():
    rows = [ROW, replace(ROW, case={"workload": "b"}, values={})]
    lines = results.table(rows, border=box.MARKDOWN).splitlines()
    assert [one.strip() for one in lines[0].split("|")] == [
        "",
        "gradients",
        "provider",
        "wall us",
        "",
    ]
