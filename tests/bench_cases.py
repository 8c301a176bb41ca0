"""Gradient lists, providers, a row and a quiet measurement that tests of the benchmarks share."""

from __future__ import annotations

import math

import torch

from bench.results import Row
from bench.speed import IN_PLACE, Effort, measure
from bench.workloads import Workload

CPU = torch.device("cpu")
SMALL = Workload("small", "small", ((5, 7), (3,), (1,), (257, 9)))
NAMED = {provider.name: provider for provider in IN_PLACE}
ROW = Row("speed", {"workload": "a", "provider": "torch"}, {"wall_us": 1.5}, True)


def elements(shapes):
    return sum(math.prod(shape) for shape in shapes)


def quietly(gradients, rule, clipped, providers, said, effort=None):
    effort = effort or Effort(samples=2, seconds=0.0)
    return measure(gradients, rule, clipped, providers, effort, said.append)
