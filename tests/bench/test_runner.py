"""`pytest bench` measures paired rounds, checks, writes, compares and ends well."""

from __future__ import annotations

import json
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from bench_cases import run_bench

from bench import conftest, results
from bench.workloads import RULES

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")
# One worker takes the first run for all.
pytestmark = pytest.mark.xdist_group("bench")

IN_PLACE = ("-k", "test_clip", "--workload", "lenet5", "--provider", "torch")
CASES = {(rule, step) for rule in RULES[:3] for step in ("unclipped", "clipped")}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run whose rows, JSON and storage the tests read."""
    folder = tmp_path_factory.mktemp("bench")
    storage = f"--benchmark-storage=file://{folder}/saved"
    options = (storage, "--benchmark-save=first", f"--benchmark-json={folder}/all.json")
    done = run_bench("--benchmark-only", *IN_PLACE, *options, "--rows", folder / "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, storage, done.stdout


def test_rows_have_every_case_checked_with_their_provenance(first):
    folder, *_ = first
    origin, rows = results.checked(folder / "rows.json")
    assert (origin["device"], "plan" in origin) == ("cpu", False)
    assert "--provider torch" in origin["command"]
    assert "--rows" not in origin["command"]
    assert {(row.get("rule"), row.get("step")) for row in rows} == CASES
    assert {row.get("provider") for row in rows} == {"tritonclip", "torch"}
    assert all(row.get("baseline") == "torch" for row in rows)


def test_json_has_groups_of_one_case_the_samples_and_the_figures_of_the_rows(first):
    folder, *_ = first
    record = json.loads((folder / "all.json").read_text())
    assert record["machine_info"]["backend"] in ("native", "torch")
    rows = {str(row): row for row in results.read(folder / "rows.json")[1]}
    assert len(record["benchmarks"]) == len(rows) == 2 * len(CASES)
    assert len({one["group"] for one in record["benchmarks"]}) == len(CASES)
    for one in record["benchmarks"]:
        names = ("workload", "dtype", "rule", "step", "provider")
        row = rows[" ".join(one["params"][name] for name in names)]
        samples = one["stats"]["data"]
        assert statistics.median(samples) * 1e6 == pytest.approx(row.get("wall_us"), rel=1e-6)
        assert one["extra_info"]["ratio"] == pytest.approx(row.get("ratio"), rel=1e-6)


def test_the_summary_comes_before_the_groups(first):
    out = first[2]
    summary = out.index("torch's best time / tritonclip's: in place")
    assert summary < out.index("Over all 6 cases the median is") < out.index("Rounds")


def test_a_run_fails_that_is_slower_than_the_saved_one(first):
    folder, storage, _ = first
    (saved,) = (folder / "saved").rglob("*_first.json")
    record = json.loads(saved.read_text())
    for one in record["benchmarks"]:
        one["stats"]["median"] /= 1e6
    saved.write_text(json.dumps(record))
    options = (storage, "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    # The plugin names saved files from the folder that it runs in.
    there = f"import os; os.chdir({str(folder)!r})"
    done = run_bench("--benchmark-only", *IN_PLACE, *options, "--rule", "value", before=there)
    assert done.returncode != 0
    assert "Performance has regressed" in done.stdout + done.stderr
    assert "0001_fi" in done.stdout


WRONG = """
from bench import speed
def off(one):
    return one._replace(make=lambda gradients, rule, limit: one.make(gradients, rule, limit / 2))
names = ("tritonclip", "torch")
speed.IN_PLACE = tuple(off(one) if one.name in names else one for one in speed.IN_PLACE)
"""


def test_a_wrong_result_is_not_timed_and_fails_where_it_is_ours(tmp_path):
    rows = tmp_path / "rows.json"
    options = (*IN_PLACE, "--provider", "torch foreach", "--rule", "value", "--rows", rows, "-rs")
    done = run_bench("--benchmark-only", *options, before=WRONG)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "lenet5 float32 value clipped tritonclip: gradient" in done.stdout
    assert "wrong result, not timed: lenet5 float32 value clipped torch" in done.stdout
    found = {(row.get("step"), row.get("provider")): row for row in results.read(rows)[1]}
    for name in ("tritonclip", "torch"):
        wrong = found.pop(("clipped", name))
        assert (wrong.correct, wrong.values) == (False, {})
    assert all(row.correct and row.get("wall_us") for row in found.values())
    assert len(found) == 4


INTERRUPTED = """
from bench import results
write, calls = results.write, []
def interrupted(*given):
    calls.append(given)
    if len(calls) == 2:
        raise KeyboardInterrupt
    write(*given)
results.write = interrupted
"""


def test_interrupted_run_keeps_its_rows_and_says_so(tmp_path):
    out = tmp_path / "rows.json"
    options = ("-k", "test_clip", "--provider", "torch", "--rows", out)
    done = run_bench("--benchmark-only", *options, before=INTERRUPTED)
    origin, rows = results.read(out)
    assert done.returncode == 2, done.stdout + done.stderr
    # Two cases of two providers were measured; the interrupt came before the second was written.
    assert len(rows) == 4
    assert f"4 rows in {out}: not finished" in done.stdout
    assert origin["plan"] == "not finished"
    assert all(row.correct and row.get("wall_us") for row in rows)
    assert list(tmp_path.iterdir()) == [out]


def test_disabled_benchmarks_check_and_time_nothing(tmp_path):
    rows = tmp_path / "rows.json"
    done = run_bench("--benchmark-disable", *IN_PLACE, "--rule", "norm", "--rows", rows)
    assert (done.returncode, rows.exists()) == (0, False), done.stdout
    assert "torch's best time" not in done.stdout


def configured(has_plugin, **option):
    plugins = SimpleNamespace(hasplugin=lambda name: has_plugin)
    config: Any = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(**option))
    conftest.pytest_configure(config)


def test_without_the_plugin_it_says_what_to_install():
    with pytest.raises(pytest.UsageError, match="pip install -e"):
        configured(False)


def test_training_refuses_buffers():
    with pytest.raises(pytest.UsageError, match="are in no buffer"):
        configured(True, plan="training", provider=["tritonclip flat"])


def test_rows_of_one_file_are_of_one_function_and_device():
    names = conftest.Case._fields[1:]
    params = dict.fromkeys(names, "lenet5")
    items = [
        SimpleNamespace(originalname=name, callspec=SimpleNamespace(params=params))
        for name in ("test_clip", "test_functional")
    ]
    cases: dict[Any, Any] = {conftest.Case(one.originalname, *["lenet5"] * 5): [] for one in items}
    known = SimpleNamespace(option=SimpleNamespace(rows="rows.json"), cases=cases, asked=set())
    stash = {conftest.SESSION: known}
    session: Any = SimpleNamespace(config=SimpleNamespace(stash=stash), items=items)
    with pytest.raises(pytest.UsageError, match="expected cases of one test function"):
        conftest.pytest_collection_finish(session)
    known.option.rows = None
    conftest.pytest_collection_finish(session)
    assert len(known.asked) == 2
