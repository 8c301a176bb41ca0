"""Gradient lists, providers, a row and ways to run that tests of the benchmarks share."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from workers import python

from bench.results import Row
from bench.speed import Effort, measure
from bench.workloads import Workload

BENCH = Path(__file__).parents[1] / "bench"
CPU = torch.device("cpu")
SMALL = Workload("small", "small", ((5, 7), (3,), (1,), (257, 9)))
ROW = Row("speed", {"workload": "a", "provider": "torch"}, {"wall_us": 1.5}, True)


def elements(shapes):
    return sum(math.prod(shape) for shape in shapes)


def measured(gradients, rule, clipped, providers, effort=None):
    """Rows of providers, measured shortly."""
    effort = effort or Effort(samples=2, seconds=0.0)
    return [one.row for one in measure(gradients, rule, clipped, providers, effort)]


def pytest_bench(*arguments, before=""):
    """Runs pytest on the benchmarks, shortly and with little memory copied."""
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
# In a worker of pytest-xdist, which the run would take itself for, nothing is timed.
os.environ.pop("PYTEST_XDIST_WORKER", None)
import pytest
from bench import timing
timing.COPIED["cpu"] = 2**16
{before}
sys.exit(pytest.main())
"""
    short = ("--benchmark-min-rounds=2", "--benchmark-max-time=0.000001", "--device=cpu")
    given = (BENCH, "-pno:cacheprovider", *short, *arguments)
    return [sys.executable, "-c", code, *map(str, given)]


def run_bench(*arguments, before=""):
    """The finished run of pytest on the benchmarks."""
    return python(*pytest_bench(*arguments, before=before)[1:])
