"""The benchmarks: workloads, the check of results, rows and commands; nothing here is timed."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tritonclip
from bench import codegen, host, results, speed, timing, workloads
from bench.__main__ import main
from bench.accuracy import Gradients, WrongResultError
from bench.providers import SUMMED, Entry, Provider
from bench.results import Row
from bench.speed import IN_PLACE, OUT_OF_PLACE, Effort, bytes_moved, checked, measure
from bench.timing import Timed
from bench.workloads import DTYPES, RULES, WORKLOADS, Workload, tasks_of

# Published of the models; for the others, as their names say.
COUNTS = {
    "small_1": (1, 8),
    "small_10": (10, 283),
    "small_300": (300, 8_490),
    "mlp4": (4, 706),
    "mlp8": (8, 138_506),
    "lenet5": (10, 61_706),
    "resnet20": (65, 272_474),
    "resnet50": (161, 25_557_032),
    "vit_b16": (152, 86_567_656),
    "gpt2_124m": (148, 124_439_808),
    "llama3_8b_full": (291, 8_030_261_248),
    "lora_r16": (448, 41_943_040),
    "twelve": (12, 48_000_000),
    "tiny_10000": (10_000, 40_000),
}
CPU = torch.device("cpu")
SMALL = Workload("small", "small", ((5, 7), (3,), (1,), (257, 9)))
NAMED = {provider.name: provider for provider in IN_PLACE}


@pytest.fixture(autouse=True)
def little_copied(monkeypatch):
    monkeypatch.setitem(timing.COPIED, "cpu", 2**16)


@pytest.fixture
def command():
    """Runs a command, and gives torch its threads back."""
    threads = torch.get_num_threads()

    def run(*arguments):
        return CliRunner().invoke(main, [str(one) for one in arguments])

    yield run
    torch.set_num_threads(threads)


def elements(shapes):
    return sum(math.prod(shape) for shape in shapes)


def quietly(gradients, rule, clipped, providers, said, effort=None):
    effort = effort or Effort(samples=2, seconds=0.0)
    return measure(gradients, rule, clipped, providers, effort, said.append)


@pytest.mark.parametrize("name", COUNTS)
def test_list_has_the_published_size(name):
    found = WORKLOADS[name]
    assert (len(found.shapes), elements(found.shapes)) == COUNTS[name]


def test_moe_has_all_tensors_and_unscaled_the_published_size():
    whole = workloads.moe(1)
    assert elements(whole) == 16_375_728_128
    assert len(WORKLOADS["moe"].shapes) == len(whole) == 5466


def test_llama_share_is_a_32nd():
    share, whole = (elements(WORKLOADS[name].shapes) for name in ("llama3_8b", "llama3_8b_full"))
    # All but the last norm are divided.
    assert 32 * (share - 4096) == whole - 4096


def test_odd_is_odd_and_misaligned():
    assert all(shape[0] % 2 == 1 for shape in WORKLOADS["odd"].shapes)
    short = Workload("odd", "odd", ((3,),) * 7, misaligned=True)
    grads = Gradients(short, "float32", CPU).grads
    assert [g.data_ptr() % 32 // 4 for g in grads] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_equal_on_every_run(dtype):
    first, second = (Gradients(SMALL, dtype, CPU) for _ in range(2))
    for a, b in zip(first.grads, second.grads, strict=True):
        assert torch.equal(a, b)


def test_mixed_has_both_dtypes():
    dtypes = [g.dtype for g in Gradients(SMALL, "mixed", CPU).grads]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("rule", RULES)
def test_limit_clips_or_clips_nothing(rule):
    gradients = Gradients(SMALL, "float32", CPU)
    for clipped in (False, True):
        gradients.refill()
        checked(NAMED["torch"], gradients, rule, clipped)
        kept = all(map(torch.equal, gradients.grads, gradients.fresh))
        assert kept is not clipped


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [name for name in NAMED if not name.endswith("compiled")])
def test_provider_clips_right(name, rule, dtype):
    provider, gradients = NAMED[name], Gradients(SMALL, dtype, CPU)
    absent = provider.why_absent(gradients)
    if absent or rule not in provider.passes:
        pytest.skip(absent or "does not serve this rule")
    for clipped in (False, True):
        entry, _ = checked(provider, gradients, rule, clipped)
        # A second call on the same gradients, refilled, gives the same.
        entry.refill()
        output = entry.call()
        limit = gradients.limit(rule, clipped) if provider.clips else None
        gradients.check(entry.result(output)[0], rule, limit, provider.tolerance)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("rule", RULES[:3])
@pytest.mark.parametrize("provider", OUT_OF_PLACE, ids=lambda provider: provider.name)
def test_functional_provider_clips_right_and_leaves_its_gradients(provider, rule, dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    absent = provider.why_absent(gradients)
    if absent or rule not in provider.passes:
        pytest.skip(absent or "does not serve this rule")
    for clipped in (False, True):
        checked(provider, gradients, rule, clipped)
        for given, fresh in zip(gradients.grads, gradients.fresh, strict=True):
            assert torch.equal(given, fresh)


def wrong(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Clips to half of the limit, and returns no norm."""
    call = NAMED["torch"].make(gradients, rule, limit / 2).call

    def clip() -> None:
        call()

    return Entry(gradients, clip)


def lying(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Clips right and returns another norm."""
    call = NAMED["torch"].make(gradients, rule, limit).call
    return Entry(gradients, lambda: call() * 1.2)


@pytest.mark.parametrize("make", [wrong, lying])
def test_wrong_provider_is_refused_and_not_timed(make):
    gradients = Gradients(SMALL, "float32", CPU)
    calls: list[str] = []

    def counted(given, rule, limit):
        entry = make(given, rule, limit)
        run = entry.call

        def call():
            calls.append(rule)
            return run()

        entry.call = call
        return entry

    provider = Provider("wrong", counted, {"norm": 3})
    with pytest.raises(WrongResultError):
        checked(provider, gradients, "norm", True)
    calls.clear()
    said: list[str] = []
    bad, good = quietly(gradients, "norm", True, [provider, NAMED["torch"]], said)
    assert len(calls) == 1
    assert (bad.correct, bad.values) == (False, {})
    assert good.correct
    assert good.get("wall_us") is not None
    assert "wrong result, not timed" in said[0]


def test_nothing_is_timed_where_every_result_is_wrong():
    provider = Provider("wrong", wrong, {"norm": 3})
    (row,) = quietly(Gradients(SMALL, "float32", CPU), "norm", True, [provider], [])
    assert (row.correct, row.values) == (False, {})


@pytest.mark.parametrize("limit", [1e-3, None])
def test_check_sees_nan_and_a_changed_element(limit):
    gradients = Gradients(SMALL, "float32", CPU)
    for spoil in (torch.nan, 1.0):
        grads = [f.clone() for f in gradients.fresh]
        if limit is not None:
            torch._foreach_clamp_max_(grads, limit)
            torch._foreach_clamp_min_(grads, -limit)
        gradients.check(grads, "value", limit, 0.0)
        grads[3][100, 3] = spoil
        with pytest.raises(WrongResultError, match="gradient 3"):
            gradients.check(grads, "value", limit, 1e-3)


def test_long_lists_are_not_compiled():
    gradients = Gradients(Workload("long", "long", ((1,),) * 1001), "float32", CPU)
    assert "minutes" in str(NAMED["torch compiled"].why_absent(gradients))
    assert NAMED["torch"].why_absent(gradients) is None


def test_measure_fills_the_columns_of_a_cpu():
    gradients = Gradients(SMALL, "float32", CPU)
    ours, torchs = quietly(gradients, "norm", False, [NAMED["tritonclip"], NAMED["torch"]], [])
    assert (ours.get("provider"), torchs.get("provider")) == ("tritonclip", "torch")
    assert (torchs.get("ratio"), ours.get("baseline")) == (1.0, "torch")
    assert ours.get("bytes_moved") == 4 * elements(SMALL.shapes)
    assert torchs.get("bytes_moved") == 3 * ours.get("bytes_moved")
    for name in ("wall_us", "ratio_lo", "extra_mb", "gb_per_s", "norm_error", "batch"):
        assert ours.get(name) is not None
    for name in ("host_us", "device_us", "graph_us", "launches", "sum_us"):
        assert ours.get(name) is None


def test_ratio_is_to_the_fastest_eager_torch(monkeypatch):
    walls = {"tritonclip": 6.0, "torch": 9.0, "torch foreach": 3.0, "torch compiled": 1.0}

    def interleaved(timed, *_):
        return [timing.Samples([wall] * 2, [wall] * 2) for wall in walls.values()], 1

    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    rows = quietly(Gradients(SMALL, "float32", CPU), "norm", True, [NAMED[n] for n in walls], [])
    assert [row.get("ratio") for row in rows] == [0.5, 1 / 3, 1.0, 3.0]
    assert {row.get("baseline") for row in rows} == {"torch foreach"}


def test_large_lists_stand_beside_a_sum_of_as_many_bytes():
    short, long = (Workload("one", "one", ((SUMMED // 4 + more,),)) for more in (0, 1))
    providers = [NAMED["tritonclip"], NAMED["torch sum"]]
    (alone,) = quietly(Gradients(short, "float32", CPU), "value", False, providers, [])
    assert alone.get("sum_us") is None
    ours, total = quietly(Gradients(long, "float32", CPU), "value", False, providers, [])
    assert ours.get("sum_us") == total.get("wall_us")
    assert total.get("sum_share") == 1.0
    assert total.get("ratio") is None


@pytest.mark.parametrize("name", ["tritonclip", "tritonclip wrapper", "torch"])
def test_a_step_clips_then_descends(name):
    gradients = Gradients(SMALL, "float32", CPU)
    checked(NAMED[name], gradients, "step", True)
    for parameter, fresh in zip(gradients.parameters, gradients.fresh, strict=True):
        torch.testing.assert_close(parameter.detach(), -1e-3 * fresh / 2, rtol=1e-4, atol=0)


def test_clipped_calls_are_prepared_before_each_and_others_run_in_batches():
    order: list[str] = []
    call, prepare = (lambda: order.append("call")), (lambda: order.append("prepare"))
    timing.sample(Timed(call, prepare), CPU, 2)
    assert order == ["prepare", "call"] * 2
    order.clear()
    timing.sample(Timed(call, None), CPU, 3)
    assert order == ["call"] * 3


def test_every_round_has_each_call_once():
    order: list[int] = []
    timed = [Timed(partial(order.append, i), None) for i in range(3)]
    samples, n_calls = timing.interleaved(timed, CPU, 4, 0.0)
    rounds = torch.tensor(order[-12 * n_calls :: n_calls]).view(4, 3)
    assert rounds.sort().values.tolist() == [[0, 1, 2]] * 4
    assert [len(one.walls) for one in samples] == [4, 4, 4]


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


def test_rows_of_busy_cores_say_so():
    gradients = Gradients(SMALL, "float32", CPU)
    effort = Effort(samples=2, seconds=0.0, busy=3)
    (row,) = quietly(gradients, "value", False, [NAMED["torch"]], [], effort)
    assert row.case["busy"] == 3


def test_bytes_moved_follow_the_formula():
    size = 10_000
    gradients = Gradients(Workload("two", "two", ((size,), (8,))), "float32", CPU)
    n, ours, torchs = gradients.n_bytes, NAMED["tritonclip"], NAMED["torch"]
    assert bytes_moved(gradients, "norm", False, ours) == n
    assert bytes_moved(gradients, "norm", True, ours) == 3 * n
    # The limit is a quarter of the sum of both norms: the larger gradient alone is clipped.
    assert bytes_moved(gradients, "gradient", True, ours) == n + 2 * 4 * size
    # On a CPU, whether anything is clipped or not.
    assert bytes_moved(gradients, "value", False, ours) == 2 * n
    assert bytes_moved(gradients, "value", True, ours) == 2 * n
    assert bytes_moved(gradients, "value", True, torchs) == 4 * n
    assert bytes_moved(gradients, "norm", False, torchs) == 3 * n
    assert bytes_moved(gradients, "step", False, torchs) is None


ROW = Row("speed", {"workload": "a", "provider": "torch"}, {"wall_us": 1.5}, True)


def test_rows_go_to_json_and_come_back(tmp_path):
    given = [ROW, replace(ROW, case={"workload": "b"}, values={}, correct=False)]
    results.write(tmp_path / "rows.json", {"torch": "2"}, given)
    assert results.read(tmp_path / "rows.json") == ({"torch": "2"}, given)


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
    text = results.markdown([ROW, replace(ROW, case={"workload": "b"}, values={})])
    assert text.splitlines()[0].split() == [
        "|",
        "gradients",
        "|",
        "provider",
        "|",
        "wall",
        "us",
        "|",
    ]


def test_speed_measures_checks_and_writes(tmp_path, command):
    out = tmp_path / "rows.json"
    options = ["--quick", "--workload", "lenet5", "--device", "cpu", "--samples", "2"]
    done = command("speed", *options, "--provider", "torch", "--out", out)
    assert done.exit_code == 0, done.output
    origin, rows = results.read(out)
    assert origin["device"] == "cpu"
    assert "plan" not in origin
    assert {(row.get("rule"), row.get("step")) for row in rows} == {
        (rule, step) for rule in RULES[:3] for step in ("unclipped", "clipped")
    }
    assert {row.get("provider") for row in rows} == {"tritonclip", "torch"}
    assert all(row.correct for row in rows)
    assert "lenet5" in done.output


# Whatever pytest was started with, Ctrl-C interrupts.
INTERRUPTIBLE = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from bench import timing
from bench.__main__ import main
timing.COPIED["cpu"] = 2**16
main()
"""


def test_interrupted_run_keeps_its_rows_and_says_so(tmp_path):
    out, cases = tmp_path / "rows.json", 2 * len(workloads.SMALL) * len(RULES[:3])
    lists = [option for n in workloads.SMALL for option in ("--workload", f"small_{n}")]
    options = ["speed", "--quick", *lists, "--device", "cpu", "--provider", "torch", "--out", out]
    command = [sys.executable, "-c", INTERRUPTIBLE, *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            while run.poll() is None and not out.exists():
                time.sleep(0.01)
            run.send_signal(signal.SIGINT)
            said = run.communicate(timeout=60)[0]
        finally:
            run.kill()
    origin, rows = results.read(out)
    assert run.returncode == 130
    assert f"interrupted: {len(rows)} rows in {out}" in said.replace("\n", "")
    assert origin["plan"] == "not finished"
    assert 0 < len(rows) < 2 * cases
    assert all(row.correct and row.get("wall_us") for row in rows)
    assert list(tmp_path.iterdir()) == [out]


def test_interrupt_before_the_first_rows_leaves_the_file_as_it_was(tmp_path, command, monkeypatch):
    out = tmp_path / "rows.json"
    results.write(out, {"torch": "2"}, [ROW])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "measure", interrupted)
    done = command("speed", "--workload", "small_1", "--device", "cpu", "--out", out)
    assert (done.exit_code, "interrupted: no rows" in done.output) == (130, True)
    assert results.read(out) == ({"torch": "2"}, [ROW])


def test_functional_measures_checks_and_writes(tmp_path, command):
    out = tmp_path / "rows.json"
    options = ["--workload", "small_1", "--device", "cpu", "--samples", "2"]
    done = command("functional", *options, "--out", out)
    assert done.exit_code == 0, done.output
    rows = results.read(out)[1]
    assert {(row.get("rule"), row.get("step")) for row in rows} == {
        (rule, step) for rule in RULES[:3] for step in ("unclipped", "clipped")
    }
    ours = [row for row in rows if row.get("provider") == "tritonclip"]
    assert all(row.correct and row.get("baseline").startswith("torch ") for row in ours)


def test_speed_refuses_an_unknown_provider(command):
    done = command("speed", "--provider", "nobody")
    assert done.exit_code == 2
    assert "'nobody' is not one of" in done.output


def test_plan_holds_every_workload_dtype_and_rule():
    tasks = tasks_of("speed")
    assert {task.name for task in tasks} == set(WORKLOADS) - {"llama3_8b_full"}
    assert {task.dtype for task in tasks} == set(DTYPES)
    assert {rule for task in tasks for rule in task.rules} == set(RULES)
    assert {task.name for task in tasks_of("busy")} >= {"twelve"}
    assert {t.rules for t in tasks_of("quick", rules=("value",))} == {("value",)}


def test_accuracy_compares_both_norms_with_float64(tmp_path, command):
    out = tmp_path / "accuracy.json"
    done = command("accuracy", "--shrink", "100000", "--device", "cpu", "--out", out)
    assert done.exit_code == 0, done.output
    rows = results.read(out)[1]
    ours, torchs = (rows[i::2] for i in range(2))
    assert torchs[0].get("norm") == "inf"
    assert all(row.get("norm_error") < 1e-6 and row.correct for row in ours)


def test_host_counts_functions_and_modules_of_the_library_only():
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.ones(3)
    with host.entered() as functions:
        tritonclip.clip_([parameter], 1.0)
        [torch.nn.utils.get_total_norm([parameter]) for _ in range(3)]
    names = [name for _, name in functions]
    assert names[0] == "clip_"
    assert "get_total_norm" not in names
    assert not any(name.endswith("comp>") for name in names)
    assert all(Path(file).suffix == ".py" for file, _ in functions)


@pytest.mark.parametrize("path", ["cpu", "triton"])
def test_host_has_a_goal_for_each_kind_of_call(path):
    if path == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    rows = host.run([path], repetitions=2, longest=20)
    calls = [row for row in rows if "call" in row.case]
    assert len(calls) == 5
    assert all(row.get("functions") > 0 and row.get("functions_goal") for row in calls)
    assert [row.get("share_goal") for row in calls] == [host.SHARES[path], *[None] * 4]
    lists = {(row.get("list"), row.get("tensors")) for row in rows if "list" in row.case}
    assert lists == {(kind, n) for kind in host.LISTS for n in (10, 20)}
    growing = [row.get("list") for row in rows if row.get("us_per_tensor_goal")]
    assert growing == (["unchanged", "recreated"] if path == "triton" else [])


@pytest.mark.codegen
def test_launches_reach_a_driver_that_does_nothing():
    pytest.importorskip("triton", reason="triton is not installed")
    rows = host.run(["launches"], repetitions=2, longest=20)
    assert [row.get("call") for row in rows] == [
        f"norm and scale: {by}" for by in ("JIT", "library", "compiled kernel")
    ]
    assert all(row.get("total_us") > 0 for row in rows)


@pytest.mark.codegen
def test_codegen_reads_every_kernel_and_loop():
    pytest.importorskip("triton", reason="triton is not installed")
    rows = codegen.rows_of(codegen.CHIPS[1], torch.float32)
    assert [(row.get("kernel"), row.get("loop")) for row in rows] == [
        ("norm", "read"),
        ("scale", "write"),
        ("norm, each", "read"),
        ("scale, each", "write"),
        ("clamp", "read"),
        ("clamp", "write"),
    ]
    for row in rows:
        assert row.get("load_bits") == 128
        assert row.get("spilled_bytes") == 0
        assert row.get("bytes_needed") == round(3.35e12 * 650e-9 / 132)
