"""Mutation testing of the core: `nox -s mutants`, or `python tools/mutants.py` in a copy of it.

A mutant is the core with one small change. It survives if no test fails: a test is missing, code is
needless, or the change has no effect. coverage.py measures once which tests run each line. A mutant
meets only the tests that run its line, with one case of every test function first, in a fork of a
process that has imported torch but not tritonclip.
"""

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest
import torch  # noqa: F401 - its import takes longer than most tests
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

CORE = ("backends", "clipping.py", "engine", "flat", "optim", "rules")
# Files that other tests cover: compiled graphs and the Triton backend.
NOT_CORE = re.compile("compiled|graph_break|triton")
TESTS = [
    *["backends", "backward", "clip", "engine", "flat", "functional", "monitor", "optim", "rules"],
    *["distributed/test_refusals.py", "test_calls.py", "test_messages.py", "test_modes.py"],
    *["test_moves.py", "test_named_norms.py", "test_refusals.py", "test_warm_calls.py"],
]
# One change of each kind is enough: others rarely show more, and those of | change annotations.
NOT_TRIED = re.compile(
    "core/(RemoveDecorator|ReplaceUnaryOperator_(USub|UAdd|Invert)"
    "|ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Add|Pow_Mul)"
    "|ReplaceComparisonOperator_"
    "(?!Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is))"
)
# The most seconds of tests for a mutant, and the seconds after which it counts as killed.
MOST, TIMEOUT = 30.0, 300.0
# The tests of `make test`.
OPTIONS = ("-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", "not exhaustive")


class Mutant(NamedTuple):
    """One change: an occurrence of an operator of cosmic-ray, with its first and last line."""

    path: str
    operator: str
    occurrence: int
    first: int
    last: int


class Recorder(coverage.Coverage):
    """A pytest plugin that measures the lines of each test, and the seconds of passed tests."""

    seconds: dict[str, float]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        from tritonclip.engine.plan_cache import plans

        # A test that finds the plan of an earlier one would not run the lines that make plans.
        plans.clear()
        self.seconds[item.nodeid] = start = time.perf_counter()
        # Started for each test, as some set a trace function.
        self.start()
        self.switch_context(item.nodeid)
        result = yield
        self.stop()
        if item.nodeid in self.seconds:
            self.seconds[item.nodeid] = time.perf_counter() - start
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.seconds.pop(report.nodeid, None)

    def pytest_collection_finish(self) -> None:
        """Imports the core, so that no test seems to run the lines of an import."""
        for path in core():
            __import__(path.removesuffix(".py").replace("/", "."))


class Chosen(list[str]):
    """A pytest plugin that selects tests and runs them in the order of this list."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {item.nodeid: item for item in items}
        items[:] = [known[test] for test in self if test in known]


def core(paths: list[str] | None = None) -> list[str]:
    """The files that are mutated."""
    chosen = map(Path, paths or [f"tritonclip/{name}" for name in CORE])
    files = [file for path in chosen for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return sorted(str(file) for file in files if not NOT_CORE.search(file.name))


def mutants_of(path: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    nodes = list(ast_nodes(get_ast(Path(path).read_text())))
    for name in operator_names():
        operator = get_operator(name)
        if not operator.arguments() and not NOT_TRIED.match(name):
            spans = ((n, span) for n in nodes for span in operator().mutation_positions(n))
            for occurrence, (node, ((first, _), (last, _))) in enumerate(spans):
                if not is_no_decision(node):
                    yield Mutant(path, name, occurrence, first, last)


def is_no_decision(node: Any) -> bool:
    """Whether correct code behaves the same: a star in a signature, or `strict=` of `zip`."""
    parent = node.parent
    of_strict = parent.type == "argument" and parent.get_first_leaf().value == "strict"
    return bool(of_strict or (parent.type == "parameters" and node.type == "operator"))


def forked(work: Callable[[], object], log: Path, timeout: float = float("inf")) -> int | None:
    """The exit status of work in a new process; None if it took too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
        os.dup2(1, 2)
        os._exit(int(work() or 0))  # type: ignore[call-overload]
    end = time.monotonic() + timeout
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        # Also kills processes that tests left behind, and when the run is interrupted.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def measure(results: Path) -> None:
    """Runs all tests under coverage.py."""
    recorder = Recorder(str(results / "coverage"), source=["tritonclip"], config_file=False)
    recorder.set_option("run:disable_warnings", ["trace-changed"])
    recorder.seconds = {}
    tests = [f"tests/{name}" for name in TESTS]
    pytest.main([*tests, "--ignore-glob=*compile*", *OPTIONS[1:]], [recorder])
    recorder.save()
    (results / "seconds.json").write_text(json.dumps(recorder.seconds))


@lru_cache
def tests_of_lines(path: str, results: Path) -> Any:
    """The tests that run each line of a file."""
    data = coverage.CoverageData(str(results / "coverage"))
    data.read()
    return data.contexts_by_lineno(str(Path(path).resolve()))


def tests_of(mutant: Mutant, seconds: dict[str, float], results: Path) -> list[str]:
    """The tests that run the smallest expression, or the statement, around a change.

    No test runs a change outside of functions by itself, so all tests of the file are taken.
    """
    of_lines = tests_of_lines(mutant.path, results)
    tree = ast.parse(Path(mutant.path).read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.expr | ast.stmt)]
    around = [n for n in nodes if n.lineno <= mutant.first <= mutant.last <= (n.end_lineno or 0)]
    functions = [n for n in around if isinstance(n, ast.FunctionDef)]
    inside = any(mutant.first >= function.body[0].lineno for function in functions)
    for node in sorted(around, key=lambda n: (n.end_lineno or 0) - n.lineno):
        lines = range(node.lineno, (node.end_lineno or 0) + 1)
        tests = {test for n in lines for test in of_lines.get(n, ())}
        if tests or (inside and isinstance(node, ast.stmt)):
            return in_order(tests, seconds)
    return in_order({test for tests in of_lines.values() for test in tests}, seconds)


def in_order(tests: set[str], seconds: dict[str, float]) -> list[str]:
    """Sorts tests: the quickest case of each function, then the next ones, while time is left."""
    cases: Counter[str] = Counter()
    ranked = []
    for test in sorted(tests.intersection(seconds), key=lambda test: (seconds[test], test)):
        function = test.partition("[")[0]
        ranked.append((cases[function], seconds[test], test))
        cases[function] += 1
    ranked.sort()
    ends = accumulate(needed for _, needed, _ in ranked)
    return [test for (_, _, test), end in zip(ranked, ends, strict=True) if end < MOST]


def outcome_of(tests: list[str], log: Path) -> str:
    """Runs tests on the code as it stands; returns "survived", or what killed it."""
    sys.dont_write_bytecode = True
    files = sorted({test.partition("::")[0] for test in tests})
    status = forked(lambda: pytest.main([*files, *OPTIONS], [Chosen(tests)]), log, TIMEOUT)
    if status == 0:
        return "survived"
    failed = re.findall(r"^(?:FAILED|ERROR) .*", log.read_text(errors="replace"), re.MULTILINE)
    return "timed out" if status is None else f"killed: {failed[:1] or status}"


def try_out(mutant: Mutant, tests: list[str], log: Path) -> dict[str, object]:
    """Makes a change, runs tests, and takes the change back."""
    path = Path(mutant.path)
    before = path.read_text()
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
    try:
        path.write_text(after)
        outcome = outcome_of(tests, log) if tests else "not run"
    finally:
        path.write_text(before)
    diff = [*difflib.unified_diff(before.split("\n"), after.split("\n"), n=0)][3:]
    return {"mutant": mutant, "outcome": outcome, "tests": len(tests), "diff": diff}


def main() -> None:
    """Tries a sample of the mutants, and prints survivors; resumes an interrupted run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders in place of the core")
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, required=True, help="folder to remember them in")
    options = parser.parse_args()
    results, kept = options.results.resolve(), options.results / "mutants.jsonl"
    results.mkdir(parents=True, exist_ok=True)
    if not (results / "seconds.json").exists():
        print("Measuring which tests run each line.", flush=True)
        forked(lambda: measure(results), results / "measured.log")
    seconds = json.loads((results / "seconds.json").read_text())
    kept.touch()
    known = map(json.loads, kept.read_text().splitlines())
    outcomes = {Mutant(*result["mutant"]): result for result in known}
    every = [mutant for path in core(options.paths) for mutant in mutants_of(path)]
    sample = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    for mutant in sample:
        if mutant not in outcomes:
            chosen = tests_of(mutant, seconds, results)
            outcomes[mutant] = try_out(mutant, chosen, results / "pytest.log")
            with kept.open("a") as file:
                file.write(json.dumps(outcomes[mutant]) + "\n")
        result = outcomes[mutant]
        if result["outcome"] in ("survived", "not run"):
            print(f"{mutant.path}:{mutant.first} {result['outcome']}, {result['tests']} tests")
            print(*result["diff"], sep="\n", flush=True)
    tally = Counter(outcomes[mutant]["outcome"].partition(":")[0] for mutant in sample)
    print(f"{len(sample)} of {len(every)} mutants:", dict(tally))


if __name__ == "__main__":
    main()
