"""The report says what the rows say, and refuses rows of a run that failed or was cut off."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench import report

README = "# Title\n\nbefore\n<!-- speed:cpu -->\nstale\n<!-- /speed -->\nafter\n"
PAGE = "# Performance\n\nbefore\n<!-- bench:cpu -->\nstale\n<!-- /bench -->\nafter\n"
ORIGIN = {
    "command": "pytest bench",
    "exit_status": 0,
    "datetime": "2026-01-02T03:04:05+00:00",
    "machine_info": {
        "node": "somewhere",
        "machine": "x86_64",
        "system": "Linux",
        "python_version": "3.11.7",
        "cpu": {"brand_raw": "EPYC", "count": 2},
        "threads": 2,
        "device": "cpu",
        "torch": "2.13.0",
    },
    "commit_info": {"id": "0123456789012345678901234567890123456789", "dirty": True},
}


def made(workload, rule, step, ratio, provider="tritonclip", dtype="float32", **extra) -> Any:
    """A benchmark as the plugin writes it."""
    params = {"workload": workload, "dtype": dtype, "rule": rule, "step": step}
    params |= {"provider": provider, "device": "cpu"}
    ends = {"ratio": ratio, "ratio_lo": ratio - 0.02, "ratio_hi": ratio + 0.02}
    stats: Any = {"median": 25.8e-3, "q1": 25e-3, "q3": 26e-3, "rounds": 2, "iterations": 1}
    name = f"test_clip[{'-'.join(params.values())}]"
    other = {"fullname": f"bench/test_clip.py::{name}", "options": {}, "group": "group"}
    stats |= {"data": [25e-3, 26e-3], "mean": 25.5e-3}
    extra |= ends | {"baseline": "torch", "baseline_us": stats["median"] * 1e6 * ratio}
    return {"name": name, "params": params, "extra_info": extra, "stats": stats, **other}


OURS = made("gpt2_124m", "norm", "unclipped", 2.451, sum_share=0.8)
TORCH = made("gpt2_124m", "norm", "unclipped", 1.0, "torch")
LOSS = made("resnet50", "norm", "clipped", 0.634)
VALUE = made("tiny_10000", "value", "unclipped", 1.5)
TIE = made("tiny_10000", "value", "clipped", 0.99)
ROWS = [OURS, TORCH, LOSS, VALUE, TIE]


def advised(advice, losses, limits) -> Any:
    """Of a task with two seeds: 10 untrained, 6 without clipping, 2 at the best limit."""
    extra = {"is_new": False, "untrained": [10.0, 10.0], "losses": losses, "limits": limits}
    params = {"task": "a task", "advice": advice}
    name, stats = f"test_advice[a task-{advice}]", made("x", "norm", "clipped", 1.0)["stats"]
    return {"name": name, "params": params, "extra_info": extra, "stats": stats}


ADVICE = [
    advised("no clipping", [6.0, 6.0], [None, None]),
    advised("best of the grid", [2.0, 2.4], [0.3, 0.3]),
    advised("suggest", [3.5, 3.2], [None, 0.123]),
    advised("find", [6.5, 6.6], [0.5, 0.5]),
]


class Place:
    """README, a page of docs/performance/ and results in a folder of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.readme, self.page = root / "README.md", root / "docs" / "performance" / "cpu.md"
        (root / "docs").mkdir()
        (root / "docs" / "index.md").write_text(README)
        self.advice = self.page.with_name("training.md")
        self.results = root / "bench" / "results"
        self.page.parent.mkdir()
        self.results.mkdir(parents=True)
        self.advice.write_text(PAGE.replace("cpu", "advice"))
        self.readme.write_text(README)
        self.page.write_text(PAGE)
        self.measured(ROWS)
        self.measured(ADVICE, "advice")

    def measured(self, rows: list[Any], name: str = "cpu", **origin: Any) -> None:
        record = ORIGIN | origin | {"benchmarks": rows}
        (self.results / f"{name}.json").write_text(json.dumps(record, indent=4))

    def stale(self) -> list[str]:
        return [path.name for path in report.write(self.root, check=True)]

    def table(self, path: Path) -> list[str]:
        return [line for line in path.read_text().splitlines() if line.startswith("|")]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_page_gets_the_table_of_the_rows(place):
    report.write(place.root)
    text = place.page.read_text()
    assert text.startswith("# Performance\n\nbefore\n<!-- bench:cpu -->\n")
    assert text.endswith("<!-- /bench -->\nafter\n")
    assert place.table(place.page) == [
        "| gradients | dtype | by | ratio to torch (quartiles) | us; torch's | rate of torch.sum |",
        "| --- | --- | --- | --- | --- | --- |",
        "| ResNet-50 | float32 | global norm, clipped | 0.63x slower (0.61 to 0.65) "
        "| 25,800.0; 16,357.2 |  |",
        "| GPT-2 124M | float32 | global norm, unclipped | 2.45x (2.43 to 2.47) "
        "| 25,800.0; 63,235.8 | 80% |",
        "| 10,000 tiny | float32 | value, unclipped | 1.50x (1.48 to 1.52) "
        "| 25,800.0; 38,700.0 |  |",
        "| 10,000 tiny | float32 | value, clipped | 0.99x slower (0.97 to 1.01) "
        "| 25,800.0; 25,542.0 |  |",
    ]
    assert (
        "- By global norm **1.5x** (0.63x to 2.5x over 2 cases, 1 of them slower than torch)."
        in text
    )
    order = [
        "cpu-norm.svg",
        "<summary>All 4 cases",
        "cpu-value.svg",
        "| ResNet-50",
        "<summary>Meas",
    ]
    assert sorted(order, key=text.index) == order
    short = "cpu EPYC, device cpu, threads 2, torch 2.13.0, commit 0123456-dirty, date 2026-01-02"
    assert f"<summary>Measured on: {short}</summary>" in text
    assert "command `pytest bench`, date 2026-01-02" in text


def test_readme_gets_medians_and_ranges(place):
    place.measured([*ROWS, made("resnet50", "norm", "clipped", 3.0, dtype="float16")])
    report.write(place.root)
    assert (
        "**EPYC, 2 threads.** By global norm **2.5x** (0.63x to 3.0x over 3 cases, 1 of them "
        "slower than torch). By value **1.2x** (0.99x to 1.5x over 2 cases, 1 of them slower than "
        "torch).\n"
    ) in place.readme.read_text()


def test_readme_gets_ratios_over_processes_of_the_rows_that_are_timed(place):
    params: dict[str, Any] = {"layout": "FSDP2", "provider": "tritonclip"}
    untimed = {"name": "test_layout[FSDP2]", "params": params, "extra_info": {}, "stats": {}}
    timed = {"name": "test_two_processes[FSDP2]", "params": params | {"tensors": 1000}}
    timed |= {"extra_info": {"share": 0.25}, "stats": {"median": 2e-6}}
    place.measured([untimed, timed], "distributed")
    place.readme.write_text(README.replace("speed:cpu", "speed:distributed"))
    report.write(place.root)
    said = "**FSDP2, two processes on that CPU.** By global norm **4.0x** on 1,000 shards.\n"
    assert said in place.readme.read_text()


def test_figure_for_a_dark_page_is_drawn_where_a_page_names_it(place):
    place.readme.write_text(README + "bench/results/cpu-norm-dark.svg\n")
    report.write(place.root)
    dark = place.results / "cpu-norm-dark.svg"
    adaptive = (place.results / "cpu-norm.svg").read_text()
    assert "@media (prefers-color-scheme: dark){text{fill:" in adaptive
    assert dark.read_text() == adaptive.replace("(prefers-color-scheme: dark)", "all")
    assert not (place.results / "cpu-value-dark.svg").exists()
    dark.unlink()
    assert place.stale() == ["cpu-norm-dark.svg"]


def test_page_gets_a_table_of_providers_where_it_asks_for_one(place):
    other = made("gpt2_124m", "norm", "unclipped", 2.0, "optax")
    place.measured([OURS, TORCH, other, LOSS], "others")
    place.page.write_text(PAGE + "<!-- bench:others providers -->\nstale\n<!-- /bench -->\n")
    report.write(place.root)
    assert place.table(place.page)[-4:] == [
        "| gradients | dtype | by | step | tritonclip | torch | optax |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| GPT-2 124M | float32 | global norm | unclipped | 25.8 ms, 2.45x | 25.8 ms, 1.00x | "
        "25.8 ms, 2.00x |",
        "| ResNet-50 | float32 | global norm | clipped | 25.8 ms, 0.63x |  |  |",
    ]
    assert not list(place.results.glob("others-*.svg"))


def test_page_gets_rows_of_the_other_benchmarks_with_quartiles_and_goals(place):
    stats: dict[str, Any] = {"median": 2e-6, "q1": 1e-6, "q3": 3e-6}
    rows = [
        {"name": f"test_call[{call}]", "params": {"path": "cpu", "call": call}, "stats": stats}
        | {"extra_info": {"share": share, "share_goal": 0.3}}
        for call, share in (("clip_", 0.2), ("step", 0.31))
    ]
    place.measured(rows, "host")
    place.page.write_text(PAGE.replace("bench:cpu", "bench:host"))
    report.write(place.root)
    assert place.table(place.page) == [
        "| path | call | us | of torch |",
        "| --- | --- | --- | --- |",
        "| cpu | clip_ | 2.0 (1.0 to 3.0) | 0.20 / 0.30 |",
        "| cpu | step | 2.0 (1.0 to 3.0) | 0.31 / 0.30 over |",
    ]


def test_rows_are_written_back_without_samples_other_providers_and_names_of_a_machine(place):
    report.write(place.root)
    text = (place.results / "cpu.json").read_text()
    record = json.loads(text)
    assert [one["params"]["provider"] for one in record["benchmarks"]] == ["tritonclip"] * 4
    assert record["benchmarks"][0] == {
        "name": OURS["name"],
        "params": OURS["params"],
        "extra_info": OURS["extra_info"],
        "stats": {name: OURS["stats"][name] for name in report.STATS},
    }
    assert "somewhere" not in text
    assert place.stale() == []
    report.write(place.root)
    assert (place.results / "cpu.json").read_text() == text


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        pytest.param([OURS, OURS], 0, id="twice"),
        pytest.param([], 0, id="empty"),
        pytest.param(ROWS, 1, id="failed"),
        pytest.param(ROWS, 2, id="interrupted"),
    ],
)
def test_report_refuses_rows_of_no_whole_run(place, rows, status):
    place.measured(rows, exit_status=status)
    with pytest.raises(SystemExit, match=rf"cpu\.json: expected different rows .* status {status}"):
        report.write(place.root)
    assert place.page.read_text() == PAGE


def test_report_refuses_a_section_without_results(place):
    place.page.write_text(PAGE.replace("bench:cpu", "bench:gpu"))
    with pytest.raises(SystemExit, match=r"gpu\.json does not exist: measure first"):
        report.write(place.root)


@pytest.mark.parametrize("text", ["no marker", PAGE.replace("<!-- /bench -->", "")])
def test_report_refuses_pages_without_whole_markers(place, text):
    place.advice.unlink()
    place.page.write_text(text)
    with pytest.raises(SystemExit, match="md: expected <!-- bench:NAME -->"):
        report.write(place.root)
    assert place.page.read_text() == text


def test_page_gets_losses_by_advice_and_how_often_they_are_close_to_the_best(place):
    report.write(place.root)
    assert place.table(place.advice) == [
        "| task | untrained | no clipping | best of the grid | suggest | find |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a task | 10 | 6 | 2.2 (0.3) | 3.35 (none) | 6.55 (0.5) |",
        # Of the rules, of which there are none here.
        "| task | untrained | no clipping |",
        "| --- | --- | --- |",
        "| a task | 10 | 6 |",
        "| advice | within a quarter | worse than none | no limit where none clearly helps "
        "| misses (regret) |",
        "| --- | --- | --- | --- | --- |",
        "| no clipping | 0 of 1 | 0 of 1 |  |  |",
        "| best of the grid | 1 of 1 | 0 of 1 | 0 of 0 |  |",
        "| suggest | 0 of 1 | 0 of 1 | 0 of 0 | a task (0.30) |",
        "| find | 0 of 1 | 1 of 1 | 0 of 0 | a task (1.14), a task (worse) |",
    ]
    assert "Rows: [advice.json](../../bench/results/advice.json)." in place.advice.read_text()


def test_check_finds_everything_that_is_older_than_its_rows(place):
    names = {"README.md", "index.md", "cpu.md", "cpu.json", "cpu-norm.svg", "cpu-value.svg"}
    advice = {"training.md", "advice.json"}
    assert set(place.stale()) == names | advice
    assert place.readme.read_text() == README
    report.write(place.root)
    assert place.stale() == []
    place.measured([OURS, TORCH, made("resnet50", "norm", "clipped", 0.7), VALUE, TIE])
    assert set(place.stale()) == names - {"cpu-value.svg"}
    report.write(place.root)
    place.readme.write_text(place.readme.read_text().replace("0.70x", "3.45x"))
    (place.results / "cpu-value.svg").unlink()
    assert place.stale() == ["README.md", "cpu-value.svg"]


def test_figures_are_the_same_for_the_same_rows_with_every_list_and_dtype(tmp_path):
    half = made("tiny_10000", "norm", "clipped", 1.2, dtype="bfloat16")
    rows = list(map(report.flat, [OURS, LOSS, half]))
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        report.draw(rows, path, "here")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    root = ET.parse(paths[0]).getroot()
    texts = [text.strip() for text in root.itertext() if text.strip()]
    assert {"GPT-2 124M", "ResNet-50", "10,000 tiny", "1x"} <= set(texts)
    (legend,) = (e for e in root.iter() if e.get("id") == "legend_1")
    names = [text.strip() for text in legend.itertext() if text.strip()][1:]
    assert names == ["float32", "bfloat16", "slower than torch"]


def test_main_checks_the_committed_tables(monkeypatch):
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    report.main()
