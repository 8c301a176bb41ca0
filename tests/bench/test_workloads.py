"""Gradient lists have published sizes, are equal on every run, and plans measure all of them."""

import pytest
import torch

from bench import workloads
from bench.accuracy import Gradients, WrongResultError
from bench.providers import NAMED
from bench.speed import checked
from bench.workloads import DTYPES, PLANS, RULES, WORKLOADS, Workload, cases_of
from helpers.bench_cases import CPU, SMALL, elements

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_equal_on_every_run(dtype):
    first, second = (Gradients(SMALL, dtype, CPU) for _ in range(2))
    for a, b in zip(first.grads, second.grads, strict=True):
        assert torch.equal(a, b)


def test_mixed_has_both_dtypes():
    dtypes = [g.dtype for g in Gradients(SMALL, "mixed", CPU).grads]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_pass_gives_the_first_gradients_in_new_memory(dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    old = gradients.grads
    torch._foreach_zero_(old)
    gradients.backward()
    assert all(map(torch.equal, gradients.grads, gradients.fresh))
    # The old ones are alive, so that no new one can have their memory.
    assert not {g.data_ptr() for g in old} & {g.data_ptr() for g in gradients.grads}


@pytest.mark.parametrize("rule", RULES)
def test_limit_clips_or_clips_nothing(rule):
    gradients = Gradients(SMALL, "float32", CPU)
    for clipped in (False, True):
        gradients.refill()
        checked(NAMED["torch"], gradients, rule, clipped)
        kept = all(map(torch.equal, gradients.grads, gradients.fresh))
        assert kept is not clipped


@pytest.mark.parametrize("limit", [1e-3, torch.inf])
def test_check_sees_nan_and_a_changed_element(limit):
    gradients = Gradients(SMALL, "float32", CPU)
    for spoil in (torch.nan, 1.0):
        grads = [f.clone() for f in gradients.fresh]
        torch._foreach_clamp_max_(grads, limit)
        torch._foreach_clamp_min_(grads, -limit)
        gradients.check(grads, "value", limit, 0.0)
        grads[3][100, 3] = spoil
        with pytest.raises(WrongResultError, match="gradient 3"):
            gradients.check(grads, "value", limit, 1e-3)
