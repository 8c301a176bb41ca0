"""Options, cases, provenance and summary of `pytest bench --benchmark-only`.

Published ratios are paired: every round times all providers of a case in another order
(`tritonclip.samples`). The test that comes first in a case takes its rounds; each hands the samples
of its provider to pytest-benchmark, through a clock that reads them. Were rounds taken by
`pedantic`, with the others in its setup and teardown, N providers would be timed N times each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench import results, timing
from bench.accuracy import Gradients
from bench.providers import IN_PLACE, OUT_OF_PLACE, Provider
from bench.report import ratio_rows, summary
from bench.results import Row
from bench.speed import Effort, Measured, measure, providers_of
from bench.workloads import DTYPES, FUNCTIONAL, PLANS, RULES, WORKLOADS, cases_of

PLACES = {"test_clip": "in place", "test_functional": "out of place"}
SHOWN = ("wall_us", "ratio", "baseline")
# Those of the last case, which many tests share: large ones fill the memory.
gradients_of = lru_cache(1)(Gradients)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class Case(NamedTuple):
    """All that tests whose samples are paired have in common."""

    function: str  # test_clip or test_functional
    device: str
    workload: str
    dtype: str
    rule: str
    step: str


class Session:
    """The cases that were asked for, and the rows of those that were measured."""

    def __init__(self, config: pytest.Config) -> None:
        self.option = option = config.option
        self.devices = option.device or DEVICES
        self.cases: dict[Case, list[Provider]] = {}
        self.asked: set[Case] = set()
        self.measured: dict[Case, dict[str, Measured]] = {}
        self.left_out: dict[str, None] = {}
        is_quick, is_busy = option.plan == "quick", option.plan == "busy"
        self.effort = Effort(
            max(2, option.benchmark_min_rounds, 0 if is_quick else 9),
            min(float(option.benchmark_max_time), 0.2 if is_quick else 0.6),
            (os.cpu_count() or 1) if is_busy else 0,
            option.plan == "training",
        )
        device = torch.device(self.devices[-1])
        self.origin = results.provenance(device, "pytest") | {"plan": "not finished"}

    def collect(self, function: str) -> Iterator[tuple[Case, str]]:
        """The cases of a test function, with their providers; notes why others are left out."""
        option, in_place = self.option, function == "test_clip"
        plan = (PLANS if in_place else FUNCTIONAL).get(option.plan, ())
        for device in self.devices:
            for case in cases_of(plan, option.workload, option.dtype, option.rule):
                workload, dtype, rule, _ = case
                fitting = [one for one in OUT_OF_PLACE if rule in one.passes]
                if in_place:
                    fitting = providers_of(option.provider, option.plan, workload, dtype, rule)
                absent = [one.why_absent(WORKLOADS[workload], dtype, device) for one in fitting]
                self.left_out |= dict.fromkeys(why for why in absent if why)
                present = [one for one, why in zip(fitting, absent, strict=True) if why is None]
                self.cases[Case(function, device, *case)] = present
                yield from ((Case(function, device, *case), one.name) for one in present)

    def measure(self, case: Case, provider: str, timed: bool) -> Measured:
        """A provider, timed with all of its case and written when one is first asked for."""
        gradients = gradients_of(WORKLOADS[case.workload], case.dtype, torch.device(case.device))
        given = gradients, case.rule, case.step == "clipped"
        if not timed:
            (found,) = measure(*given, [o for o in self.cases[case] if o.name == provider], None)
            return found
        if case not in self.measured:
            every = measure(*given, self.cases[case], self.effort)
            self.measured[case] = {one.provider.name: one for one in every}
            if self.asked <= self.measured.keys():
                self.origin.pop("plan", None)
            self.write()
        return self.measured[case][provider]

    def rows(self, *kind: str) -> list[Row]:
        """The rows so far; those of a test function on a device where these are given."""
        known = [found for case, found in self.measured.items() if case[: len(kind)] == kind]
        return [one.row for found in known for one in found.values()]

    def write(self) -> None:
        """Writes the rows so far where a file was asked for."""
        if self.option.rows and self.measured:
            results.write(self.option.rows, self.origin, self.rows())


SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("clipping benchmarks")
    group.addoption("--plan", choices=PLANS, default="quick", help="what to measure (quick)")
    names = [one.name for one in IN_PLACE]
    for name, choices, about in (
        ("workload", WORKLOADS, "measure these lists by all rules, whatever the plan"),
        ("dtype", DTYPES, "only these; with --workload: in these"),
        ("rule", RULES, "only these"),
        ("provider", names, "compare these with tritonclip in place"),
        ("device", DEVICES, "only these (the CPU, and a GPU where there is one)"),
    ):
        group.addoption(f"--{name}", action="append", choices=choices, default=[], help=about)
    group.addoption("--rows", type=Path, help="write rows for `python -m bench report` to a file")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("pytest bench needs pytest-benchmark: pip install -e '.[bench]'")
    if config.option.plan == "training" and "tritonclip flat" in config.option.provider:
        raise pytest.UsageError("--plan training makes new gradients, which are in no buffer")
    # As many columns as a terminal has.
    columns = ["median", "iqr", "min", "rounds"]
    config.option.benchmark_columns = config.option.benchmark_columns or columns
    if config.option.benchmark_sort == "min":
        config.option.benchmark_sort = "median"
    config.stash[SESSION] = Session(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = list(metafunc.config.stash[SESSION].collect(metafunc.function.__name__))
    metafunc.parametrize(
        [*Case._fields[1:], "provider"],
        [(*case[1:], name) for case, name in given],
        ids=["-".join((*case[1:], name.replace(" ", "_"))) for case, name in given],
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    known = session.config.stash[SESSION]
    ours: list[Any] = [i for i in session.items if getattr(i, "originalname", "") in PLACES]
    cases = {
        Case(one.originalname, *(one.callspec.params[name] for name in Case._fields[1:]))
        for one in ours
    }
    # A plan without cases of a function leaves one item of it, which is skipped.
    known.asked = cases & known.cases.keys()
    if known.option.rows and len({case[2:] for case in known.asked}) < len(known.asked):
        raise pytest.UsageError(
            "--rows: expected cases of one test function on one device, found more; choose them, "
            "as in pytest bench -k test_clip --device cpu --rows FILE"
        )


@pytest.fixture(scope="session", autouse=True)
def busy_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps other processes spinning where the plan says so."""
    with timing.busy_cores(request.config.stash[SESSION].effort.busy):
        yield


@pytest.fixture
def measured(
    request: pytest.FixtureRequest, benchmark: Any, device, workload, dtype, rule, step, provider
) -> Measured:
    """One provider, from rounds that it shares with all providers of its case."""
    session = request.config.stash[SESSION]
    case = Case(request.function.__name__, device, workload, dtype, rule, step)
    benchmark.group = f"{workload} {dtype} {rule} {step}, {PLACES[case.function]}, {device}"
    return session.measure(case, provider, benchmark.enabled)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    """The plugin's holds the clock rate of the moment, so that no two runs are of one machine."""
    moment = ("command", "date", "commit", "plan")
    origin = config.stash[SESSION].origin
    return {name: value for name, value in origin.items() if name not in moment}


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session, say = config.stash[SESSION], terminalreporter.write_line
    for function, device in dict.fromkeys(case[:2] for case in session.measured):
        ours = ratio_rows(session.rows(function, device))
        place = f"{PLACES[function]}, {device}"
        terminalreporter.section(f"torch's best time / tritonclip's: {place}")
        say(f"{summary(ours)}\n{results.table(ours, shown=SHOWN)}")
    if session.left_out and session.measured:
        say(f"left out: {'; '.join(session.left_out)}")
    if session.option.rows and session.measured:
        # Once more: an interrupt between a measurement and its writing left it out.
        session.write()
        state = session.origin.get("plan", "complete")
        say(f"{len(session.rows())} rows in {session.option.rows}: {state}")
