"""Gradient lists have the sizes of the published models, and plans measure all of them."""

from __future__ import annotations

import pytest
import torch

from bench import workloads
from bench.accuracy import Gradients
from bench.workloads import DTYPES, PLANS, RULES, WORKLOADS, Workload, cases_of
from helpers.bench_cases import CPU, elements

# Published of the models; for the others, as their names say.
COUNTS = {
    "small_1": (1, 8),
    "small_10": (10, 283),
    "small_300": (300, 8_490),
    "mlp4": (4, 706),
    "mlp8": (8, 138_506),
    "lenet5": (10, 61_706),
    "resnet20": (65, 272_474),
    "resnet20_last": (65, 272_474),
    "resnet50": (161, 25_557_032),
    "vit_b16": (152, 86_567_656),
    "gpt2_124m": (148, 124_439_808),
    "lora_r16": (448, 41_943_040),
    "twelve": (12, 48_000_000),
    "tiny_10000": (10_000, 40_000),
}


@pytest.mark.parametrize("name", COUNTS)
def test_list_has_the_published_size(name):
    found = WORKLOADS[name]
    assert (len(found.shapes), elements(found.shapes)) == COUNTS[name]


def test_moe_has_all_tensors_and_unscaled_the_published_size():
    whole = workloads.moe(1)
    assert elements(whole) == 16_375_728_128
    assert len(WORKLOADS["moe"].shapes) == len(whole) == 5466


def test_llama_share_is_a_32nd():
    share, whole = elements(WORKLOADS["llama3_8b"].shapes), elements(workloads.llama3(32, 128256))
    assert whole == 8_030_261_248
    # All but the last norm are divided.
    assert 32 * (share - 4096) == whole - 4096


def test_odd_is_odd_and_misaligned():
    assert all(shape[0] % 2 == 1 for shape in WORKLOADS["odd"].shapes)
    short = Workload("odd", "odd", ((3,),) * 7, misaligned=True)
    grads = Gradients(short, "float32", CPU).grads
    assert [g.data_ptr() % 32 // 4 for g in grads] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_four_dimensions_are_channels_last(training):
    made = Gradients(WORKLOADS["resnet20_last"], "float32", CPU)
    if training:
        made.backward()
    form = torch.channels_last
    assert all(g.dim() != 4 or g.is_contiguous(memory_format=form) for g in made.grads)
    assert sum(not g.is_contiguous() for g in made.grads) == 19
    made.check(made.grads, "norm", torch.inf, 0.0)


def test_plans_hold_every_workload_dtype_and_rule():
    names, dtypes, rules, _ = (set(one) for one in zip(*cases_of(PLANS["full"]), strict=True))
    assert names == set(WORKLOADS)
    assert (dtypes, rules) == (set(DTYPES), set(RULES))
    assert {name for name, *_ in cases_of(PLANS["busy"])} >= {"twelve"}
    assert {name for name, *_ in cases_of(PLANS["gpu"])} >= {"small_1", "gpt2_124m", "tiny_10000"}
    assert {rule for *_, rule, _ in cases_of(PLANS["quick"], rules=("value",))} == {"value"}
