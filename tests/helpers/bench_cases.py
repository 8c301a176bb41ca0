"""Gradient lists, a comparison and ways to run that tests of the benchmarks share."""

import math
from pathlib import Path

import torch

from bench.comparison import Effort
from bench.speed import compare
from bench.workloads import Workload
from helpers.workers import python

BENCH = Path(__file__).parents[2] / "bench"
CPU = torch.device("cpu")
SMALL = Workload("small", "small", ((5, 7), (3,), (1,), (257, 9)))


def elements(shapes):
    return sum(math.prod(shape) for shape in shapes)


def figures(gradients, rule, clipped, providers, conditions=None):
    """Figures of each provider, measured shortly."""
    effort = Effort(samples=2, seconds=0.0)
    compared = compare(gradients, rule, clipped, providers, effort, conditions or {})
    compared.take_turns()
    names = [one.name for one in providers if one.name in compared.samples]
    return [compared.figures(name, compared.samples) for name in names]


def run_bench(*arguments, before=""):
    """A finished short run of pytest on the benchmarks."""
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
# In a worker of pytest-xdist, which the run would take itself for, nothing is timed.
os.environ.pop("PYTEST_XDIST_WORKER", None)
import pytest
{before}
sys.exit(pytest.main())
"""
    plain = ("-pno:cacheprovider", "-pno:hypothesispytest", "--device=cpu")
    short = ("--benchmark-min-rounds=2", "--benchmark-max-time=0.000001")
    return python("-c", code, *map(str, (*plain, *short, *arguments)))
