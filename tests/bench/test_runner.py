"""`pytest bench` measures in turn, checks, writes, compares and ends well."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from bench import conftest, report
from bench import test_clip as clips
from bench import test_functional as functions
from bench.providers import FRAMEWORKS, IN_PLACE, OUT_OF_PLACE
from bench.workloads import RULES
from helpers.bench_cases import BENCH, run_bench

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")
# One worker takes the first run for all.
pytestmark = pytest.mark.xdist_group("bench")

LENET = (BENCH / "test_clip.py", "-k", "lenet5-float32", "--provider", "torch")
CASES = {(rule, step) for rule in RULES[:3] for step in ("unclipped", "clipped")}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run whose JSON and storage the tests read."""
    folder = tmp_path_factory.mktemp("bench")
    storage = f"--benchmark-storage=file://{folder}/saved"
    options = (storage, "--benchmark-save=first", f"--benchmark-json={folder}/all.json")
    done = run_bench("--benchmark-only", *LENET, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, storage, done.stdout


def test_json_has_all_cases_with_their_samples_figures_and_provenance(first):
    record = json.loads((first[0] / "all.json").read_text())
    assert record["machine_info"]["backend"] in ("native", "torch")
    assert record["machine_info"]["cpu"].keys() == {"brand_raw", "count"}
    assert record["exit_status"] == 0
    assert "-k lenet5-float32 --provider torch" in record["command"]
    assert "json" not in record["command"]
    rows = record["benchmarks"]
    found = {(one["params"]["rule"], one["params"]["step"]) for one in rows}
    assert (found, len(rows)) == (CASES, 2 * len(CASES))
    assert {one["group"] for one in rows} == {
        f"test_clip cpu lenet5 float32 {r} {s}" for r, s in CASES
    }
    for one in rows:
        assert one["stats"]["rounds"] == len(one["stats"]["data"]) >= 2
        assert one["extra_info"]["baseline"] == "torch"
        by_torch = one["params"]["provider"] == "torch"
        assert (one["extra_info"]["ratio"] == 1.0) is by_torch


def test_the_summary_comes_before_the_groups(first):
    out = first[2]
    summary = out.index("torch's best time / tritonclip's: test_clip, cpu")
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
    done = run_bench("--benchmark-only", *LENET, *options, "--rule", "value", before=there)
    assert done.returncode != 0
    assert "Performance has regressed" in done.stdout + done.stderr
    assert "0001_fi" in done.stdout
    assert "machine_info is different" not in done.stdout + done.stderr


WRONG = """
from bench import providers
def off(one):
    return one._replace(make=lambda gradients, rule, limit: one.make(gradients, rule, limit / 2))
ours, torchs, *others = providers.IN_PLACE
providers.IN_PLACE = (off(ours), off(torchs), *others)
"""


def test_a_wrong_result_is_not_timed_and_fails_where_it_is_ours(tmp_path):
    out = tmp_path / "rows.json"
    options = (*LENET, "--provider", "torch foreach", "--rule", "value", "-rs")
    done = run_bench("--benchmark-only", *options, f"--benchmark-json={out}", before=WRONG)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "tritonclip: gradient 0 is off" in done.stdout
    assert "wrong result, not timed: torch: gradient 0 is off" in done.stdout
    record = json.loads(out.read_text())
    assert record["exit_status"] == 1
    clipped = [one["params"] for one in record["benchmarks"] if one["params"]["step"] == "clipped"]
    assert [one["provider"] for one in clipped] == ["torch foreach"]


def test_json_has_rows_that_are_not_timed(tmp_path):
    """Also of what waits for ever; four processes."""
    out = tmp_path / "rows.json"
    chosen = ("-k", "(empty and not accelerate) or (shards and 10-)")
    path = BENCH / "test_distributed.py"
    done = run_bench("--benchmark-only", path, *chosen, f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    hangs, ours, timed = map(report.flat, report.read(out)["benchmarks"])
    assert (hangs["provider"], hangs["outcome"]) == ("torch", "hangs: not run")
    assert ours["collectives"] == 1
    assert "us" not in hangs.keys() | ours.keys()
    assert timed["us"] > 0


INTERRUPTED = """
from bench import comparison
take_turns, taken = comparison.Comparison.take_turns, []
def interrupted(self):
    taken.append(self)
    if len(set(map(id, taken))) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    take_turns(self)
comparison.Comparison.take_turns = interrupted
"""


def test_interrupted_run_keeps_its_rows_and_says_so(tmp_path):
    out = tmp_path / "rows.json"
    done = run_bench("--benchmark-only", *LENET, f"--benchmark-json={out}", before=INTERRUPTED)
    assert done.returncode == 2, done.stdout + done.stderr
    record = json.loads(out.read_text())
    # Two cases of two providers were measured.
    assert len(record["benchmarks"]) == 4
    assert record["exit_status"] == 2
    assert "Over all 2 cases" in done.stdout


def test_frameworks_are_providers_where_asked_for_and_in_their_plan():
    def names(plan, *asked, module=clips):
        option = SimpleNamespace(plan=plan, provider=asked)
        known = conftest.providers_of(option, module, "cpu", "lenet5", "float32", "norm", "clipped")
        return [one.name for one in known]

    assert names("quick", "torch") == ["tritonclip", "torch"]
    assert names("quick", "optax") == ["tritonclip", "optax"]
    assert names("training", "optax") == ["tritonclip"]
    assert names("training") == [one.name for one in IN_PLACE]
    assert names("frameworks") == [one.name for one in (*IN_PLACE, *FRAMEWORKS)]
    assert names("full", module=functions) == [one.name for one in OUT_OF_PLACE]


def test_disabled_benchmarks_check_and_time_nothing(tmp_path):
    out = tmp_path / "rows.json"
    given = ("--benchmark-disable", *LENET, "--rule", "norm", f"--benchmark-json={out}")
    done = run_bench(*given)
    assert (done.returncode, out.exists()) == (0, False), done.stdout + done.stderr
    assert "torch's best time" not in done.stdout


@pytest.mark.skipif("cuda" in conftest.DEVICES, reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_take():
    plugins = SimpleNamespace(hasplugin=lambda name: True)
    config: Any = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(device=["cuda"]))
    with pytest.raises(pytest.UsageError, match="expected --device cpu, got cuda"):
        conftest.pytest_configure(config)


def test_without_the_plugin_it_says_what_to_install():
    plugins = SimpleNamespace(hasplugin=lambda name: False)
    config: Any = SimpleNamespace(pluginmanager=plugins)
    with pytest.raises(pytest.UsageError, match="pip install -e"):
        conftest.pytest_configure(config)
