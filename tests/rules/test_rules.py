"""Rules check their arguments on construction, and are plain frozen values."""

import copy
import dataclasses
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch

import tritonclip
from helpers.optimizers import torch_saved
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue
from tritonclip.rules.rule import RULE_CLASSES

PUBLIC_RULES = [kind for kind in RULE_CLASSES if kind.__name__ in tritonclip.__all__]
BY_NORM = pytest.mark.parametrize("kind", [ClipByGlobalNorm, ClipByNorm])


@BY_NORM
@pytest.mark.parametrize("max_norm", [0, -0.0, 3, 1e-30, math.inf, np.float64(2), np.float32(2)])
def test_rule_by_norm_takes_limits_from_zero_to_infinity(kind, max_norm):
    """And -0.0 for 0.0, whose sign would turn that of every gradient."""
    rule = kind(max_norm)
    assert rule.max_norm == float(max_norm)
    assert type(rule.max_norm) is float
    assert math.copysign(1.0, rule.max_norm) == 1.0


@pytest.mark.parametrize("limit", [0, 0.5, 2, math.inf])
def test_rule_by_value_of_one_bound_is_symmetric(limit):
    rule = ClipByValue(limit)
    assert (rule.min, rule.max) == (-limit, limit)


@pytest.mark.parametrize(
    ("low", "high"),
    [(-1.0, 2.0), (0.1, 0.1), (-2, -1), (-math.inf, 0.0), (0, math.inf), (0.0, -0.0)],
)
def test_rule_by_value_takes_any_bounds_in_order(low, high):
    for rule in (ClipByValue(low, high), ClipByValue(min=low, max=high)):
        assert (rule.min, rule.max) == (low, high)


RULES = [ClipByGlobalNorm(1.0), ClipByNorm(2.0, 1.0, 0.0), ClipByValue(-1.0, 2.0), ClipByValue(3)]
RULES += [ClipByUnitNorm(0.1), ClipByUnitNorm(0.2)]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule_is_frozen(rule):
    field = dataclasses.fields(rule)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, field, 9.0)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, dataclasses.replace, lambda rule: pickle.loads(pickle.dumps(rule))],
    ids=["copy", "deepcopy", "replace", "pickle"],
)
def test_rule_equals_its_copy(rule, again):
    assert again(rule) == rule
    assert hash(again(rule)) == hash(rule)


def test_every_rule_of_the_library_is_public():
    public = {kind.__name__ for kind in RULE_CLASSES if not kind.__name__.startswith("_")}
    assert public - {"LossOutlier"} == {kind.__name__ for kind in PUBLIC_RULES}


@pytest.mark.parametrize("kind", PUBLIC_RULES, ids=lambda kind: kind.__name__)
def test_every_argument_of_a_public_rule_is_checked(kind):
    is_by_value = kind is ClipByValue  # It checks both bounds together.
    assert is_by_value or {one.name for one in dataclasses.fields(kind)} == dict(kind.checks).keys()


@pytest.mark.parametrize("kind", PUBLIC_RULES, ids=lambda kind: kind.__name__)
def test_rule_is_loaded_with_weights_only(kind):
    """As trainers load checkpoints, in which some have the keys of parameter groups."""
    rule = kind(0.5)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    tritonclip.ClippedOptimizer(sgd, 1.0)
    saved = torch_saved({"param_groups": [{"params": ["weight"], "clip": rule}]}, weights_only=True)
    loaded = saved["param_groups"][0]["clip"]
    assert loaded == rule
    assert hash(loaded) == hash(rule)


def test_rules_with_different_arguments_differ():
    assert ClipByGlobalNorm(1) == ClipByGlobalNorm(1.0)
    assert ClipByGlobalNorm(1.0) != ClipByGlobalNorm(1.0, eps=0.0)
    assert ClipByGlobalNorm(1.0) != ClipByNorm(1.0)  # type: ignore[comparison-overlap]
    assert ClipByValue(1.0) == ClipByValue(-1.0, 1.0)
    assert len({*RULES, *RULES}) == len(RULES)


# Norms have torch's defaults.
SHOWN = [
    "ClipByGlobalNorm(max_norm=1.0, norm_type=2.0, eps=1e-06)",
    "ClipByNorm(max_norm=1.0, norm_type=2.0, eps=1e-06)",
    "ClipByRMS(max_rms=1.0)",
    "ClipByUnitNorm(ratio=0.01, eps=0.001)",
    "ClipByValue(min=-1.0, max=1.0)",
    "ClipByZScore(threshold=2.5, decay=0.97, warmup=25, max_norm=inf, norm_type=2.0)",
    "ClipByOwnHistory(ratio=1.05, decay=0.98, warmup=100, max_norm=1.0)",
    "ClipByQuantile(quantile=0.9, window=1000, max_norm=inf, factor=1.0, norm_type=2.0)",
    "ClipByOwnQuantile(quantile=0.9, window=100, max_norm=inf, factor=1.0)",
    "Outlier(sigmas=6.0, window=128)",
]


@pytest.mark.parametrize(("kind", "text"), [*zip(PUBLIC_RULES, SHOWN, strict=True)])
def test_rule_shows_its_arguments_and_their_defaults(kind, text):
    needs_one = kind in (ClipByGlobalNorm, ClipByNorm, ClipByValue)
    assert repr(kind(1) if needs_one else kind()) == text


@pytest.mark.parametrize("bound", [torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float16)])
def test_rule_by_value_reads_bounds_in_tensors_once(bound):
    rules = ClipByValue(bound), ClipByValue(-bound, bound)
    bound.fill_(9.0)
    assert rules == (ClipByValue(0.5), ClipByValue(0.5))
    assert all(type(rule.max) is float for rule in rules)


@pytest.mark.parametrize("other", [0.0, -0.0])
def test_rule_by_value_keeps_the_sign_of_a_zero_bound(other):
    """Also where the bound of another sign was rounded before."""
    ClipByValue(-0.0, 1.0).bounds[torch.float32]
    ClipByValue(0.0, 1.0).bounds[torch.float32]
    low, high = ClipByValue(other, 1.0).bounds[torch.float32]
    assert (math.copysign(1.0, low), high) == (math.copysign(1.0, other), 1.0)


@pytest.mark.parametrize("is_used", [False, True])
def test_rule_by_value_has_its_bounds_for_fields(is_used):
    """Loggers of experiments take rules apart, and checkpoints have the fields alone."""
    rule = ClipByValue(-1.0, 0.5)
    if is_used:
        assert rule.bounds[torch.float16] == (-1.0, 0.5)
    assert dataclasses.asdict(rule) == {"min": -1.0, "max": 0.5}
    loaded = torch_saved(rule, weights_only=True)
    assert loaded == rule
    assert loaded.bounds[torch.float32] == (-1.0, 0.5)


def test_rule_by_value_names_an_attribute_that_is_missing():
    with pytest.raises(AttributeError, match="'ClipByValue' object has no attribute 'limits'"):
        ClipByValue(1.0).limits  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, lambda step: 2.0), (lambda step: -1.0, 2.0)], ids=["max", "min"]
)
def test_rule_by_value_takes_a_schedule_beside_a_number(low, high):
    assert ClipByValue(low, high).at(0).interval() == (-1.0, 2.0)


@pytest.mark.parametrize(
    "schedule",
    [lambda step: 1.0, lambda *steps: 1.0, lambda step, last=9: 1.0, partial(pow, 2), max],
    ids=["step", "any", "default", "partial", "unreadable"],
)
def test_rule_takes_a_schedule_that_may_be_called_with_the_step(schedule):
    assert ClipByGlobalNorm(schedule).max_norm is schedule


def test_rule_by_value_of_one_schedule_equals_its_copy():
    def schedule(step: int) -> float:
        return 1.0

    rule = ClipByValue(schedule)
    assert rule == ClipByValue(schedule) == copy.copy(rule)
    assert rule != ClipByValue(lambda step: 1.0)
    assert repr(rule) == f"ClipByValue(min=-{schedule!r}, max={schedule!r})"
