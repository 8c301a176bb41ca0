"""A day with a GPU, as far as it goes without one: launches are replaced by nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic

import pytest
import torch
from bench_cases import CPU, SMALL
from click.testing import CliRunner

from bench import gpu, results, timing
from bench.__main__ import main
from bench.accuracy import Gradients, WrongResultError
from bench.codegen import kernel_module, replaced_launch
from bench.providers import IN_PLACE
from bench.results import Row
from bench.workloads import PLANS

NOW = gpu.Setting(3, 80, 16384, 4096, 8)


@pytest.fixture
def absent(monkeypatch):
    """A GPU of one multiprocessor that launches nothing, and a clock that always says 10 us.

    Returns the launches: kernel, programs, registers, warps, and constants.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    launches = []
    module = kernel_module("launch")

    def record(kernel, device, programs, occupancy, arguments, **constants):
        options = module.options_of(occupancy)
        launches.append((kernel.fn.__name__, programs, occupancy, options, constants))

    def device_us(timed, device, host_us):
        timed.prepared()()
        return 10.0

    monkeypatch.setattr(module, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(timing, "device_us", device_us)
    monkeypatch.setattr(timing, "copy_gb_per_s", lambda device: 100.0)
    # Nothing was computed.
    monkeypatch.setattr(Gradients, "check", lambda *_: None)
    monkeypatch.setattr(Gradients, "norm_error", lambda *_: 0.0)
    with replaced_launch(record):
        yield launches


def row(device_us: float | None, **changed: int) -> Row:
    setting = NOW._replace(**changed)
    values = {"device_us": device_us, "gb_per_s": 1e3, "copy_gb_per_s": 2e3}
    found = Row("sweep", {"kernel": "norm", "dtype": "float32", **setting._asdict()}, values, True)
    if device_us is None:
        found.correct, found.values = False, {"answer": "OutOfResources: registers"}
    return found


def test_without_a_gpu_the_command_says_that_it_needs_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, ["gpu", "--out", str(tmp_path / "gpu.json")])
    assert done.exit_code != 0
    assert "expected a GPU" in done.output
    assert not list(tmp_path.iterdir())


def test_commands_name_plans_and_providers_that_exist():
    tests, plan = gpu.commands(Path("rows.json")).values()
    assert tests[:3] == plan[:3] == [sys.executable, "-m", "pytest"]
    assert tests[tests.index("gpu") - 1] == "-m"
    assert plan[plan.index("--plan") + 1] in PLANS
    names = {plan[i + 1] for i, one in enumerate(plan) if one == "--provider"}
    assert names == {"torch", "torch sum"} <= {one.name for one in IN_PLACE}
    assert plan[-2:] == ["--rows", "rows.json"]


def test_all_parts_fit_ten_minutes():
    assert sum(gpu.SHARES.values()) <= 550


@pytest.mark.parametrize("grace", [10, 0], ids=["interrupted", "killed"])
def test_a_command_is_cut_off_where_its_share_ends(grace):
    # Of a process that is left without waiting for it Python warns.
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert gpu.finished(command, monotonic() + 0.5, grace) == ("cut off after 0 s", None)


@pytest.mark.parametrize(("status", "text"), [(0, "yes, in"), (3, "no, exit status 3, in")])
def test_a_command_says_how_it_ended(status, text):
    how, well = gpu.finished([sys.executable, "-c", f"exit({status})"], monotonic() + 60)
    assert how.startswith(text)
    assert well is (status == 0)


def test_settings_begin_with_todays_and_differ_in_one_way():
    settings = gpu.settings_of(NOW)
    assert settings[0] == NOW
    assert len(settings) == len(set(settings))
    changed = {
        frozenset(n for n in NOW._fields if getattr(one, n) != getattr(NOW, n))
        for one in settings[1:]
    }
    pairs = [{"programs", "registers"}, {"warps", "programs"}, {"warps", "block"}]
    assert changed == {*map(frozenset, [*pairs, {"chunk"}, {"block"}])}
    for one in settings:
        assert one.programs * one.warps * 32 * one.registers <= 65_536
        assert one.block <= one.chunk
        # Of the tile behind the last vector.
        assert one.warps * 32 <= 512


def test_a_setting_reaches_tables_and_launches(absent):
    setting = gpu.Setting(programs=4, registers=64, chunk=8192, block=2048, warps=4)
    gradients = Gradients(SMALL, "float32", CPU)
    for kernel in gpu.SWEPT:
        absent.clear()
        found = gpu.swept(kernel, gradients, setting)
        assert (found.correct, found.get("device_us")) == (True, 10.0)
        assert found.get("gb_per_s") == gpu.SWEPT[kernel] * gradients.n_bytes / 1e4
        for _, programs, occupancy, options, constants in absent:
            assert (occupancy, options["num_warps"]) == ((4, 64), 4)
            assert (constants["CHUNK"], constants["BLOCK"]) == (8192, 2048)
            assert programs in (1, 4)
    names = {"norm_kernel", "scale_kernel", "scale_each_kernel", "clamp_kernel"}
    assert {launch[0] for launch in absent} <= names


def test_todays_setting_is_that_of_the_verbs(absent):
    for dtype in ("float32", "bfloat16"):
        gradients = Gradients(SMALL, dtype, CPU)
        for kernel in gpu.SWEPT:
            absent.clear()
            gpu.verb(kernel, gradients)[0]()
            _, _, occupancy, options, constants = absent[-1]
            found = (*occupancy, constants["CHUNK"], constants["BLOCK"], options["num_warps"])
            assert gpu.today(kernel, gradients.fresh[0].itemsize) == found


def test_a_setting_that_is_wrong_or_fails_is_not_timed(absent, monkeypatch):
    def wrong(*_):
        raise WrongResultError("element 3 is wrong")

    gradients = Gradients(SMALL, "float32", CPU)
    monkeypatch.setattr(Gradients, "check", wrong)
    found = gpu.swept("scale", gradients, NOW)
    assert found.correct is False
    assert found.values == {"answer": "WrongResultError: element 3 is wrong"}


def test_sweep_begins_with_todays_of_every_kernel_and_ends_in_time(absent):
    rows = list(gpu.sweep(CPU, monotonic() + 600, "small_1"))
    first = [(one.get("kernel"), one.get("dtype")) for one in rows[:8]]
    assert set(first) == {(k, d) for k in gpu.SWEPT for d in ("float32", "bfloat16")}
    assert len({str(one) for one in rows}) == len(rows) > 8 * 8
    (cut,) = gpu.sweep(CPU, monotonic() - 1, "small_1")
    assert cut.get("answer") == f"no, 0 of {len(rows)}"


def test_a_question_that_fails_leaves_the_others(monkeypatch):
    def fails(device):
        raise RuntimeError("no\nmemory")

    monkeypatch.setattr(gpu, "QUESTIONS", {"A?": fails, "B?": lambda device: "yes"})
    found = [one.get("answer") for one in gpu.ask(CPU, monotonic() + 60)]
    assert found == ["not answered: RuntimeError: no memory", "yes"]
    found = [one.get("answer") for one in gpu.ask(CPU, monotonic() - 1)]
    assert found == ["no time was left"] * 2


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row(10.0), row(8.0, chunk=32768)], "best of 2 8.0 us, 1,000 GB/s with chunk 32,768"),
        ([row(10.0), row(12.0, warps=4)], "best of 2 10.0 us, 1,000 GB/s with the same"),
        ([row(10.0), row(None, warps=4)], "best of 1 10.0 us"),
        ([row(None)], "norm, float32: today's constants failed: OutOfResources: registers"),
    ],
    ids=["better", "worse", "failed", "today-failed"],
)
def test_report_shows_the_best_setting_beside_todays(rows, text):
    report = gpu.report([*rows, gpu.answer("A?", "yes")])
    assert text in report
    assert report.endswith("\nA? yes")


def test_all_parts_are_written_to_one_file(absent, tmp_path, monkeypatch):
    speed = Row("speed", {"workload": "small_1", "provider": "tritonclip"}, {"gb_per_s": 1.0}, True)

    def finished(command, end):
        if "--rows" in command:
            results.write(Path(command[-1]), {"torch": "2"}, [speed])
        return "yes, in 1 s", True

    monkeypatch.setattr(gpu, "finished", finished)
    monkeypatch.setattr(gpu, "environment", lambda device: {"torch": "2"})
    monkeypatch.setattr(gpu, "sweep", lambda device, end: [row(10.0)])
    monkeypatch.setattr(gpu, "QUESTIONS", {"A?": lambda device: "yes"})
    out = tmp_path / "gpu.json"
    assert gpu.run(out, CPU) == 0
    origin, rows = results.read(out)
    assert "plan" not in origin
    assert [one.benchmark for one in rows] == ["gpu", "speed", "gpu", "sweep", "gpu"]

    def interrupted(device, end):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(gpu, "sweep", interrupted)
    assert gpu.run(out, CPU) == 130
    origin, rows = results.read(out)
    assert (origin["plan"], len(rows)) == ("not finished", 3)

    def stopped(command, end):
        if "--rows" in command:
            finished(command, end)
            raise KeyboardInterrupt
        return "yes", True

    monkeypatch.setattr(gpu, "finished", stopped)
    assert gpu.run(out, CPU) == 130
    assert [one.benchmark for one in results.read(out)[1]] == ["gpu", "speed"]

    monkeypatch.setattr(gpu, "finished", lambda command, end: ("no, exit status 1", False))
    monkeypatch.setattr(gpu, "sweep", lambda device, end: [row(None)])
    assert gpu.run(out, CPU) == 1
