"""The report says what the rows say, and refuses rows that nobody checked."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench import report, results
from bench.__main__ import main
from bench.results import Row

ORIGIN = {"torch": "2.13.0", "commit": "0123abc", "date": "2026-01-02"}
README = "# Title\n\nbefore\n<!-- speed:cpu -->\nstale\n<!-- /speed -->\nafter\n"
PAGE = "# Performance\n\nbefore\n<!-- bench:cpu -->\nstale\n<!-- /bench -->\nafter\n"


def made(workload, rule, step, ratio, *, dtype="float32", provider="tritonclip", **values) -> Row:
    case = {"workload": workload, "dtype": dtype, "rule": rule, "step": step, "provider": provider}
    known: dict[str, Any] = {"wall_us": 25_800.0, "ratio": ratio}
    known |= {"ratio_lo": ratio - 0.02, "ratio_hi": ratio + 0.02, "baseline": "torch"}
    return Row("speed", case, known | values, True)


OURS = made("gpt2_124m", "norm", "unclipped", 2.451, sum_share=0.8, sum_us=20_000.0)
TORCH = made("gpt2_124m", "norm", "unclipped", 1.0, provider="torch")
LOSS = made("gpt2_124m", "norm", "clipped", 0.634)
VALUE = made("tiny_10000", "value", "unclipped", 1.5)
TIE = made("tiny_10000", "value", "clipped", 0.99)
ROWS = [OURS, TORCH, LOSS, VALUE, TIE]


def changed(row: Row, correct: Any = True, values: dict[str, Any] | None = None, **case) -> Row:
    return Row("speed", row.case | case, row.values if values is None else values, correct)


class Place:
    """README, a page of docs/performance/ and results in a folder of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.readme, self.page = root / "README.md", root / "docs" / "performance" / "cpu.md"
        self.results = root / "bench" / "results"
        self.page.parent.mkdir(parents=True)
        self.readme.write_text(README)
        self.page.write_text(PAGE)
        self.measured(ROWS)

    def measured(self, rows: list[Row]) -> None:
        results.write(self.results / "cpu.json", ORIGIN, rows)

    def run(self, *more: str, refused: str = "") -> int:
        done = CliRunner().invoke(main, ["report", "--root", str(self.root), *more])
        assert refused in done.output
        return int(done.exit_code)

    def table(self, path: Path) -> list[str]:
        return [line for line in path.read_text().splitlines() if line.startswith("|")]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_page_gets_the_table_of_the_rows(place):
    assert place.run() == 0
    text = place.page.read_text()
    assert "stale" not in text
    assert text.startswith("# Performance\n\nbefore\n<!-- bench:cpu -->\n")
    assert text.endswith("<!-- /bench -->\nafter\n")
    assert place.table(place.page) == [
        "| gradients | by | float32 unclipped | float32 clipped |",
        "| --- | --- | --- | --- |",
        "| GPT-2 124M | global norm | 2.45x (2.43 to 2.47) | **0.63x (0.61 to 0.65)** |",
        "| 10,000 tiny | value | 1.50x (1.48 to 1.52) | **0.99x (0.97 to 1.01)** |",
        "| gradients | dtype | by | unclipped |",
        "| --- | --- | --- | --- |",
        "| GPT-2 124M | float32 | global norm | 25.8 ms, 80% |",
    ]
    assert "torch 2.13.0, commit 0123abc, date 2026-01-02" in text


def test_readme_gets_a_short_table_and_the_worst_case(place):
    assert place.run() == 0
    text = place.readme.read_text()
    assert "stale" not in text
    assert text.endswith("<!-- /speed -->\nafter\n")
    assert place.table(place.readme) == [
        "| gradients | unclipped | clipped | by value |",
        "| --- | --- | --- | --- |",
        "| GPT-2 124M | 2.45x | **0.63x** |  |",
        "| 10,000 tiny |  |  | tie |",
    ]
    worst = "the worst 0.63x (GPT-2 124M, float32, by global norm, clipped)"
    assert f"Over all 4 cases the median is 1.25x, {worst}; 50% are below 1.0x." in text


def test_readme_leaves_out_other_dtypes_workloads_and_rules(place):
    others = [changed(OURS, dtype="float16"), changed(OURS, workload="odd")]
    place.measured([*ROWS, *others, changed(LOSS, rule="gradient")])
    place.run()
    assert len(place.table(place.readme)) == 4
    assert "Over all 7 cases" in place.readme.read_text()


def test_page_gets_a_table_of_providers_where_it_asks_for_one(place):
    other = changed(OURS, values={"wall_us": 30_000.0, "ratio": 2.0}, provider="optax")
    unmeasured = changed(LOSS, False, {}, provider="paddle")
    results.write(place.results / "others.json", ORIGIN, [OURS, TORCH, other, LOSS, unmeasured])
    asked = "<!-- bench:others providers -->\nstale\n<!-- /bench -->\n"
    place.page.write_text(PAGE + asked)
    assert place.run() == 0
    text = place.page.read_text().partition("<!-- bench:others providers -->\n")[2]
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| gradients | dtype | by | step | tritonclip | torch | optax | paddle |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| GPT-2 124M | float32 | global norm | unclipped | 25.8 ms, 2.45x | 25.8 ms, 1.00x | "
        "30 ms, 2.00x |  |",
        "| GPT-2 124M | float32 | global norm | clipped | 25.8 ms, 0.63x |  |  | wrong result |",
    ]
    assert not list(place.results.glob("others-*.svg"))
    assert place.run("--check") == 0


def test_page_gets_rows_of_the_other_benchmarks(place):
    row = Row("host", {"path": "cpu", "call": "clip_"}, {"functions": 21, "functions_goal": 20})
    results.write(place.results / "host.json", ORIGIN, [row])
    place.page.write_text(PAGE.replace("bench:cpu", "bench:host"))
    assert place.run() == 0
    (line,) = [line for line in place.table(place.page) if "cpu" in line]
    assert [cell.strip() for cell in line.split("|")] == ["", "cpu", "clip_", "21 / 20 over", ""]


@pytest.mark.parametrize("correct", [False, None, 1, "true"])
def test_report_refuses_rows_that_are_not_known_to_be_correct(place, correct):
    place.measured([*ROWS, changed(TORCH, correct, step="clipped")])
    assert place.run(refused="gpt2_124m float32 norm clipped torch") == 1
    assert place.page.read_text() == PAGE


def test_report_refuses_our_own_wrong_row_even_untimed(place):
    place.measured([*ROWS, changed(OURS, False, {}, dtype="float16")])
    assert place.run(refused="results wrong or not checked") == 1
    assert place.readme.read_text() == README


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        pytest.param([OURS, OURS], "measured twice", id="twice"),
        pytest.param([], "no rows", id="empty"),
    ],
)
def test_report_refuses_rows_that_make_no_table(place, measured, reason):
    place.measured(measured)
    assert place.run("--check", refused=reason) == 1


def test_report_refuses_rows_of_another_kind(place):
    (place.results / "cpu.json").write_text('{"provenance": {"a": 1}, "rows": [{"ours_ms": 1}]}')
    assert place.run(refused="no rows of these benchmarks") == 1


def test_report_refuses_a_section_without_results(place):
    place.page.write_text(PAGE.replace("bench:cpu", "bench:gpu"))
    assert place.run(refused="gpu.json does not exist") == 1


@pytest.mark.parametrize("text", [None, "no marker"])
def test_report_refuses_pages_without_any_table(place, text):
    place.page.unlink()
    if text is not None:
        place.page.write_text(text)
    assert place.run(refused="performance/*.md: expected <!-- bench:NAME -->") == 1


def test_report_refuses_a_page_with_half_a_marker_and_names_it(place):
    place.page.with_name("gpu.md").write_text(PAGE.replace("<!-- /bench -->", ""))
    assert place.run(refused="performance/gpu.md: expected <!-- bench:NAME -->") == 1
    assert place.page.read_text() == PAGE


def test_every_page_with_tables_is_written_and_others_are_left(place):
    other = place.page.with_name("all.md")
    other.write_text(PAGE)
    text = place.page.with_name("method.md")
    text.write_text("no marker")
    assert place.run() == 0
    assert "stale" not in place.page.read_text() + other.read_text()
    assert text.read_text() == "no marker"


@pytest.mark.parametrize("text", ["no marker", README.replace("<!-- /speed -->", "")])
def test_report_refuses_a_readme_without_whole_markers(place, text):
    place.readme.write_text(text)
    assert place.run(refused="README.md: expected <!-- speed:NAME -->") == 1
    assert place.page.read_text() == PAGE


def test_check_accepts_what_was_just_written_and_writes_nothing(place):
    assert place.run("--check") == 1
    assert place.readme.read_text() == README
    assert not list(place.results.glob("*.svg"))
    place.run()
    assert place.run("--check") == 0


def test_check_finds_a_page_that_was_edited(place):
    place.run()
    place.readme.write_text(place.readme.read_text().replace("2.45x", "3.45x"))
    assert place.run("--check", refused="README.md is not what the rows give") == 1


def test_check_finds_everything_that_is_older_than_its_rows(place):
    place.run()
    place.measured([changed(OURS, values=OURS.values | {"ratio": 2.7}), *ROWS[1:]])
    for name in ("README.md", "performance/cpu.md", "cpu-norm.svg"):
        assert place.run("--check", refused=name) == 1
    # Its rows are the same.
    done = CliRunner().invoke(main, ["report", "--root", str(place.root), "--check"])
    assert "cpu-value.svg" not in done.output


def test_check_finds_a_missing_figure(place):
    place.run()
    (place.results / "cpu-value.svg").unlink()
    assert place.run("--check", refused="cpu-value.svg") == 1


def test_figures_are_svg_with_every_list_and_a_line_at_one(place):
    place.run()
    drawn = {path.name: path for path in place.results.glob("*.svg")}
    assert sorted(drawn) == ["cpu-norm.svg", "cpu-value.svg"]
    for name, title in (("cpu-norm.svg", "GPT-2 124M"), ("cpu-value.svg", "10,000 tiny")):
        root = ET.parse(drawn[name]).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        texts = {text.strip() for text in root.itertext()}
        assert {title, "1x"} <= texts
        assert f"](../../bench/results/{name})" in place.page.read_text()


def test_figure_is_drawn_the_same_from_the_same_rows(tmp_path):
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        report.draw([OURS, LOSS], path, "here")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    report.draw([OURS], paths[1], "here")
    assert paths[0].read_bytes() != paths[1].read_bytes()


def test_legend_names_the_marks_that_are_there(tmp_path):
    def names(*rows: Row) -> list[str]:
        path = tmp_path / "figure.svg"
        report.draw(rows, path, "here")
        (legend,) = (e for e in ET.parse(path).iter() if e.get("id") == "legend_1")
        return [text.strip() for text in legend.itertext() if text.strip()][1:]

    assert names(OURS) == ["float32", "slower than torch"]
    half = changed(LOSS, dtype="bfloat16")
    assert names(OURS, half) == ["float32", "bfloat16", "slower than torch"]


def test_rows_of_tables_and_figures_go_from_small_lists_to_large_ones(place):
    place.measured([VALUE, changed(OURS, rule="value"), changed(VALUE, workload="small_1")])
    place.run()
    names = ["1 small", "GPT-2 124M", "10,000 tiny"]
    assert [line.split(" | ")[0].strip("| ") for line in place.table(place.page)][2:5] == names
    drawn = ET.parse(place.results / "cpu-value.svg").getroot()
    texts = [text.strip() for text in drawn.itertext()]
    assert sorted(names, key=texts.index) == names


def test_ratios_of_others_are_not_counted_as_ours():
    assert report.ratio_rows(ROWS) == [OURS, LOSS, VALUE, TIE]
    assert report.summary([TORCH]) == "No ratio was measured."
