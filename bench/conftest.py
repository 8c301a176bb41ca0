"""Options, cases, provenance and summary of `pytest bench`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import pytest
import torch

import tritonclip
from bench import report, timing
from bench.accuracy import Gradients
from bench.comparison import Comparison, Effort, hand_over
from bench.providers import FRAMEWORKS, IN_PLACE, NAMED, Provider
from bench.speed import compare
from bench.workloads import PLANS, RULES, WORKLOADS, cases_of
from tritonclip.backends import choose

# Only the last gradients are kept: successive cases share them, and large lists fill the memory.
gradients_of = lru_cache(1)(Gradients)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
# Packages whose versions the provenance names, if they are installed.
PACKAGES = ("triton", "tensorflow", "tensorflow-cpu", "paddlepaddle", "jax", "optax")
# The rows and the exit status of a run; the plugin itself writes no rows of untimed cases.
MEASURED = pytest.StashKey[list[Any]]()
UNTIMED = pytest.StashKey[list[dict[str, Any]]]()
EXIT_STATUS = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("clipping benchmarks")
    group.addoption("--plan", choices=PLANS, default="quick", help="what to measure (quick)")
    for name, choices, about in (
        ("rule", RULES, "only these"),
        ("provider", NAMED, "compare these with tritonclip in place"),
        ("device", ("cpu", "cuda"), "only these (the CPU, and a GPU where there is one)"),
    ):
        group.addoption(f"--{name}", action="append", choices=choices, default=[], help=about)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("pytest bench needs pytest-benchmark: pip install -e '.[bench]'")
    if absent := set(config.option.device) - set(DEVICES):
        raise pytest.UsageError(
            f"expected --device {' or '.join(DEVICES)}, got {', '.join(absent)}, and "
            "torch.cuda.is_available() is false: run this where there is a GPU"
        )
    # Columns that fit a terminal.
    columns = ["median", "iqr", "min", "rounds"]
    config.option.benchmark_columns = config.option.benchmark_columns or columns
    if config.option.benchmark_sort == "min":
        config.option.benchmark_sort = "median"
    config.stash[MEASURED], config.stash[UNTIMED], config.stash[EXIT_STATUS] = [], [], 0


def providers_of(option: Any, module: Any, *case: str) -> dict[Provider, str | None]:
    """The providers of a case in a module of tests, each with the reason if it is not compared."""
    device, workload, dtype, rule, _ = case
    known, asked = module.PROVIDERS, option.provider
    if known is IN_PLACE:
        # A plan with backward passes excludes other frameworks, whose arrays none of these makes.
        if option.plan == "frameworks" or (asked and option.plan != "training"):
            known = [*known, *FRAMEWORKS]
        known = [one for one in known if not asked or one.name in ("tritonclip", *asked)]
    why = {one: one.why_absent(WORKLOADS[workload], dtype, device) for one in known}
    return {one: reason for one, reason in why.items() if rule in one.rules}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes the tests of modules with plans by the cases of the plan and their providers."""
    module, option = metafunc.module, metafunc.config.option
    if not hasattr(module, "PLANS"):
        return
    given, cases = [], cases_of(module.PLANS.get(option.plan, ()))
    for device, case in product(option.device or DEVICES, cases):
        if case[2] not in (option.rule or RULES):
            continue
        for one, why in providers_of(option, module, device, *case).items():
            marks = [pytest.mark.skipif(why is not None, reason=why or "")]
            marks += [pytest.mark.gpu] if device == "cuda" else []
            parts = (device, *case, one.name)
            given.append(pytest.param(*parts, marks=marks, id="-".join(parts).replace(" ", "_")))
    names = ("device", "workload", "dtype", "rule", "step", "provider")
    metafunc.parametrize(names, given, scope="module")


@pytest.fixture(scope="session")
def effort(request: pytest.FixtureRequest) -> Effort:
    """How long to measure each case."""
    option = request.config.option
    is_quick = option.plan == "quick"
    least = max(2, option.benchmark_min_rounds, 0 if is_quick else 9)
    return Effort(least, min(float(option.benchmark_max_time), 0.2 if is_quick else 0.6))


@pytest.fixture(scope="session")
def conditions(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The entries of a plan in each row; under the plan "busy" keeps other processes spinning."""
    plan = request.config.option.plan
    busy = (os.cpu_count() or 1) if plan == "busy" else 0
    with timing.busy_cores(busy):
        found: dict[str, Any] = {"busy": busy} if busy else {}
        yield found | ({"after": "backward pass"} if plan == "training" else {})


@pytest.fixture(scope="module")
def comparison(
    request: pytest.FixtureRequest, effort, conditions, device, workload, dtype, rule, step
) -> Comparison:
    """The checked providers of a case, which are timed when the first of its tests runs."""
    gradients = gradients_of(WORKLOADS[workload], dtype, torch.device(device))
    case = device, workload, dtype, rule, step
    known = providers_of(request.config.option, request.module, *case)
    here = [one for one, why in known.items() if why is None]
    return compare(gradients, rule, step == "clipped", here, effort, conditions)


@pytest.fixture
def add_untimed(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[Any], None]:
    """Adds a row of figures without times to the rows of the run."""

    def add(figures: dict[str, Any]) -> None:
        hand_over(benchmark, None)
        row = {"name": benchmark.name, "params": benchmark.params, "extra_info": figures}
        request.config.stash[UNTIMED].append({**row, "stats": {}})

    return add


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Adds versions and the device, and drops the CPU's clock rate, which changes all the time."""
    cpu = machine_info["cpu"]
    machine_info["cpu"] = {name: cpu.get(name) for name in ("brand_raw", "count")}
    device = torch.device((config.option.device or DEVICES)[-1])
    machine_info |= {
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "tritonclip": tritonclip.__version__,
        "backend": choose.backend_name(device),
        "torch": torch.__version__,
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            machine_info[package] = version(package)
    if device.type == "cuda":
        chip = torch.cuda.get_device_properties(device)
        machine_info["cuda"] = torch.version.cuda or f"hip {torch.version.hip}"
        counts = {"multiprocessors": chip.multi_processor_count, "l2_bytes": chip.L2_cache_size}
        machine_info |= counts
        about = "--query-gpu=driver_version,clocks.max.memory,power.limit --format=csv,noheader"
        machine_info["card"] = subprocess.getoutput(f"nvidia-smi {about}")


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    """Marks a commit with changes as dirty, unless only results changed."""
    command = "git status --porcelain --untracked-files=no -- :/ ':/!bench/results'"
    commit_info["dirty"] = bool(subprocess.getoutput(command))


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Keeps the exit status before the plugin writes its JSON."""
    session.config.stash[EXIT_STATUS] = int(exitstatus)
    return (yield)


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Adds untimed rows, the command and the exit status.

    The report takes only whole runs without a failure.
    """
    output_json["benchmarks"] = [*config.stash[UNTIMED], *output_json["benchmarks"]]
    given = [one for one in sys.argv[1:] if not one.startswith("--benchmark-json")]
    output_json["command"] = f"pytest {shlex.join(given)}"
    output_json["exit_status"] = config.stash[EXIT_STATUS]


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: list[dict[str, Any]]) -> None:
    """Keeps the rows of this run for the summary."""
    config.stash[MEASURED].extend(one for one in benchmarks if one["path"] is None)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the ratios to torch before the plugin's tables."""
    groups: dict[str, list[report.Row]] = {}
    for one in config.stash[MEASURED]:
        row = report.flat(one)
        if {"rule", "device"} <= row.keys():
            backend = choose.backend_name(torch.device(row["device"]))
            place = f"{row['test']}, {row['device']}, {backend} backend"
            groups.setdefault(place, []).append(row)
    for place, rows in groups.items():
        terminalreporter.section(f"torch's best time / tritonclip's: {place}")
        terminalreporter.write_line(report.summary(rows))
        for row in report.ratio_rows(rows):
            case = " ".join(row[part] for part in report.CASE)
            line = f"{report.ratio_cell(row):>28} over {row['baseline']:16} {case}"
            terminalreporter.write_line(line)
