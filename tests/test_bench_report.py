"""The report says what the rows say, and refuses rows that nobody checked."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench import figures, report, rows, sass, stages, tables
from bench.rows import Row

ORIGIN = {"torch": "2.13.0", "commit": "0123abc", "date": "2026-01-02"}
README = "# Title\n\nbefore\n<!-- bench:cpu -->\nold\n<!-- /bench -->\nafter\n"
OURS = Row(
    list="gpt2_124m",
    n_tensors=148,
    n_elements=124_439_808,
    gradient_bytes=497_759_232,
    dtype="float32",
    rule="norm",
    clipped=False,
    rival="tritonclip",
    device="cpu",
    repetitions=20,
    wall_us=25_800.0,
    wall_lo_us=25_000.0,
    wall_hi_us=26_000.0,
    norm_error=2e-8,
    correct=True,
    ratio=2.451,
    ratio_lo=2.4,
    ratio_hi=2.5,
)
TORCH = replace(OURS, rival="torch", norm_error=9e-4, ratio=1.0, ratio_lo=1.0, ratio_hi=1.0)
LOSS = replace(OURS, clipped=True, ratio=0.634, ratio_lo=0.61, ratio_hi=0.66)
VALUE = replace(OURS, list="tiny_10000", rule="value", norm_error=None, ratio=1.5)
ROWS = [OURS, TORCH, LOSS, VALUE]


class Place:
    """A README and a folder of results in a directory of their own."""

    def __init__(self, root: Path) -> None:
        self.readme, self.results = root / "README.md", root / "bench" / "results"
        self.readme.write_text(README)
        self.measured(ROWS)

    def measured(self, measured: list[Row]) -> None:
        rows.write(self.results / "cpu.json", ORIGIN, measured)

    def run(self, *more: str) -> int:
        return report.main(["--readme", str(self.readme), "--results", str(self.results), *more])


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_readme_gets_the_table_of_the_rows(place):
    assert place.run() == 0
    text = place.readme.read_text()
    assert "old" not in text
    assert text.startswith("# Title\n\nbefore\n<!-- bench:cpu -->\n")
    assert text.endswith("<!-- /bench -->\nafter\n")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table == [
        "| gradients | by | float32 unclipped | float32 clipped | norm off by: ours, torch |",
        "|---|---|---|---|---|",
        "| GPT-2 124M | global norm | 2.45x (2.40 to 2.50) | **0.63x slower** (0.61 to 0.66) | "
        "2e-08, 9e-04 |",
        "| 10,000 tiny | value | 1.50x (2.40 to 2.50) |  |  |",
    ]
    assert "torch 2.13.0, commit 0123abc, date 2026-01-02" in text
    assert "Of 3 cases 2 are at least as fast as the best torch variant and 1 slower" in text


def test_readme_gets_a_table_of_rivals_where_it_asks_for_one(place):
    other = replace(OURS, rival="optax", wall_us=30_000.0, ratio=2.0)
    unmeasured = replace(LOSS, rival="paddle", correct=False, **UNTIMED)
    rows.write(place.results / "others.json", ORIGIN, [OURS, TORCH, other, LOSS, unmeasured])
    asked = "<!-- bench:others rivals -->\nold\n<!-- /bench -->\n"
    place.readme.write_text(README + asked)
    assert place.run() == 0
    text = place.readme.read_text().partition("<!-- bench:others rivals -->\n")[2]
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| gradients | dtype | by | step | tritonclip | torch | optax | paddle |",
        "|---|---|---|---|---|---|---|---|",
        "| GPT-2 124M | float32 | global norm | unclipped | 25.8 ms, 2.45x | 25.8 ms, 1.00x | "
        "30.0 ms, 2.00x |  |",
        "| GPT-2 124M | float32 | global norm | clipped | 25.8 ms, 0.63x |  |  | wrong result |",
    ]
    assert not list(place.results.glob("others-*.svg"))
    assert place.run("--check") == 0


def test_full_table_leaves_empty_what_was_not_measured(place):
    place.run()
    text = (place.results / "cpu.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(ROWS)
    cells = dict(zip(lines[0].split("|"), lines[2].split("|"), strict=True))
    assert cells[" wall us "] == " 25,800.0 "
    assert cells[" device us "].strip() == cells[" launches "].strip() == ""
    assert "None" not in text
    assert "torch" in lines[3]


@pytest.mark.parametrize("correct", [False, None, 1, "true"])
def test_report_refuses_rows_that_are_not_known_to_be_correct(place, capsys, correct):
    wrong: Any = replace(TORCH, clipped=True, correct=correct)
    place.measured([*ROWS, wrong])
    assert place.run() == 1
    assert place.readme.read_text() == README
    message = capsys.readouterr().err
    assert "gpt2_124m float32 norm clipped torch" in message
    assert "gpt2_124m float32 norm unclipped" not in message


UNTIMED: dict[str, Any] = dict.fromkeys(
    ("wall_us", "wall_lo_us", "wall_hi_us", "ratio", "ratio_lo", "ratio_hi", "norm_error")
)


def test_a_wrong_rival_that_was_not_timed_is_said_and_not_counted(place):
    place.measured([*ROWS, replace(TORCH, clipped=True, correct=False, **UNTIMED)])
    assert place.run() == 0
    (line,) = [t for t in (place.results / "cpu.md").read_text().splitlines() if "wrong" in t]
    assert "| clipped | torch | wrong result, not timed |  |" in line
    assert "Of 3 cases" in place.readme.read_text()


def test_report_refuses_our_own_wrong_row_even_untimed(place):
    place.measured([*ROWS, replace(OURS, dtype="float16", correct=False, **UNTIMED)])
    assert place.run() == 1
    assert place.readme.read_text() == README


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        pytest.param([OURS, OURS], "measured twice", id="twice"),
        pytest.param([OURS, replace(OURS, device="GPU")], "mixes devices", id="two devices"),
        pytest.param([], "no rows", id="empty"),
    ],
)
def test_report_refuses_rows_that_make_no_table(place, capsys, measured, reason):
    place.measured(measured)
    assert place.run("--check") == 1
    assert reason in capsys.readouterr().err


def test_report_refuses_rows_of_another_kind(place, capsys):
    (place.results / "cpu.json").write_text('{"provenance": {"a": 1}, "rows": [{"ours_ms": 1}]}')
    assert place.run() == 1
    assert "no rows of this suite" in capsys.readouterr().err


def test_report_refuses_a_section_without_results(place, capsys):
    place.readme.write_text(README.replace("bench:cpu", "bench:gpu"))
    assert place.run() == 1
    assert "gpu.json does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no marker", README.replace("<!-- /bench -->", "")])
def test_report_refuses_a_readme_without_whole_markers(place, capsys, text):
    place.readme.write_text(text)
    assert place.run() == 1
    assert "expected <!-- bench:NAME -->" in capsys.readouterr().err


def test_check_accepts_what_was_just_written_and_writes_nothing(place):
    assert place.run("--check") == 1
    assert place.readme.read_text() == README
    assert not list(place.results.glob("*.svg"))
    place.run()
    assert place.run("--check") == 0


def test_check_finds_a_readme_that_was_edited(place, capsys):
    place.run()
    place.readme.write_text(place.readme.read_text().replace("2.45x", "3.45x"))
    assert place.run("--check") == 1
    assert "README.md is not what the rows give" in capsys.readouterr().err


def test_check_finds_everything_that_is_older_than_its_rows(place, capsys):
    place.run()
    place.measured([replace(OURS, ratio=2.7), *ROWS[1:]])
    assert place.run("--check") == 1
    message = capsys.readouterr().err
    for name in ("README.md", "cpu.md", "cpu-norm.svg"):
        assert name in message
    # Its rows are the same.
    assert "cpu-value.svg" not in message


def test_check_finds_a_missing_figure(place, capsys):
    place.run()
    (place.results / "cpu-value.svg").unlink()
    assert place.run("--check") == 1
    assert "cpu-value.svg" in capsys.readouterr().err


def test_figures_are_svg_with_every_list_and_a_line_at_one(place):
    place.run()
    drawn = {path.name: path for path in place.results.glob("*.svg")}
    assert sorted(drawn) == ["cpu-norm.svg", "cpu-value.svg"]
    for name, title in (("cpu-norm.svg", "GPT-2 124M"), ("cpu-value.svg", "10,000 tiny")):
        root = ET.parse(drawn[name]).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        texts = {text.strip() for text in root.itertext()}
        assert {title, "1x"} <= texts
        assert f"]({drawn[name].relative_to(place.readme.parent)})" in place.readme.read_text()


def test_figure_is_drawn_the_same_from_the_same_rows(tmp_path):
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        figures.draw([OURS, LOSS], path, "here")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    figures.draw([OURS], paths[1], "here")
    assert paths[0].read_bytes() != paths[1].read_bytes()


def test_losses_are_drawn_in_their_own_colour(tmp_path):
    path = tmp_path / "figure.svg"
    counts = []
    for ratio in (1.01, 0.99):
        figures.draw([OURS, replace(LOSS, ratio=ratio)], path, "here")
        counts.append(path.read_text().count(figures.LOSS))
    won, lost = counts
    assert lost > won


def test_ratios_of_others_are_not_counted_as_ours():
    assert tables.ratio_rows(ROWS) == [OURS, LOSS, VALUE]
    assert tables.summary([TORCH]) == "No ratio was measured."


def test_rows_survive_writing_and_reading(tmp_path):
    path = tmp_path / "rows.json"
    rows.write(path, ORIGIN, ROWS)
    assert rows.read(path) == (ORIGIN, ROWS)
    assert json.loads(path.read_text())["rows"][0]["device_us"] is None


SASS = """
        /*0000*/                   LDG.E.128 R4, desc[UR8][R2.64] ;
        /*0010*/                   LDG.E.128 R8, desc[UR8][R2.64+0x1000] ;
        /*0020*/                   LDG.E.128 R12, desc[UR8][R2.64+0x2000] ;
        /*0030*/                   FADD R20, R5, R20 ;
        /*0040*/                   LDG.E.128 R4, desc[UR8][R2.64+0x3000] ;
        /*0050*/              @!P0 BRA 0x70 ;
        /*0060*/                   FADD R20, R4, R20 ;
        /*0070*/              @!P1 LDG.E.128 R4, desc[UR8][R2.64] ;
        /*0080*/                   STG.E.128 desc[UR8][R2.64], R4 ;
"""


def test_loads_in_flight_end_where_the_first_is_used():
    assert sass.widest(SASS, "LDG") == sass.widest(SASS, "STG") == 16
    assert sass.loads_by_loop(SASS, 16) == {("read", False): 3, ("write", True): 1}


def test_stages_name_functions_of_the_library():
    """A function that is renamed would be timed as something else, in silence."""
    pytest.importorskip("triton", reason="tritonclip.kernels needs triton")
    for places in (*stages.STAGES.values(), stages.LAUNCHES):
        for place in places:
            owner, name = stages.owner_of(place)
            assert callable(getattr(owner, name))


def test_clocks_count_the_time_of_inner_functions_once(monkeypatch):
    now = iter(range(0, 8000, 1000))
    monkeypatch.setattr(stages, "perf_counter_ns", lambda: next(now))
    clocks = stages.Clocks()
    inner = clocks.wrap("inner", lambda: None)
    clocks.wrap("outer", lambda: (inner(), inner()))()
    # Six readings of a clock that goes on by 1 us: outer takes 5, each inner 1.
    assert clocks.spent_us == {"inner": 2.0, "outer": 3.0}
