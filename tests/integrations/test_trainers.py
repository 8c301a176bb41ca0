"""What the integrations log of a clipped optimizer, and what they say without their packages."""

import importlib
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.cases import normal, parameter
from tritonclip import ClipByValue, ClippedOptimizer
from tritonclip.integrations.trainers import metrics_of, wrapper_in


def made(clip=1.0):
    groups = [{"params": [parameter(normal(4, seed=i))]} for i in range(2)]
    return ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), clip)


def test_metrics_of_has_norm_coefficient_limit_and_share():
    optimizer = made()
    optimizer.step()

    summary = optimizer.stats.summary()

    names = ("norm", "coefficient", "limit", "clipped_share")
    assert metrics_of(optimizer) == {f"clip/{name}": summary[name] for name in names}


def test_metrics_of_has_the_norms_of_groups_with_a_rule():
    optimizer = made(clip=0.5)
    optimizer.param_groups[1]["clip"] = 0.25
    optimizer.step()

    metrics = metrics_of(optimizer, "norms/")

    assert metrics["norms/group1_norm"] == float(optimizer.stats.group_norms[1])
    assert metrics["norms/group1_coefficient"] < 1


def test_metrics_of_by_value_count_skipped_steps():
    optimizer = made(ClipByValue(0.5))
    optimizer.nonfinite = "skip"
    optimizer.param_groups[0]["params"][0].grad.fill_(math.nan)
    optimizer.step()

    assert metrics_of(optimizer) == {"clip/skipped_steps": 1}


def test_metrics_of_is_empty_where_nothing_was_measured():
    by_value = made(ClipByValue(0.5))
    by_value.step()

    assert metrics_of(made()) == {}
    assert metrics_of(by_value) == {}


def test_metrics_of_a_skipped_step_are_nan():
    optimizer = made(clip=1.0)
    optimizer.nonfinite = "skip"
    optimizer.param_groups[1]["clip"] = 0.5
    grad = optimizer.param_groups[0]["params"][0].grad
    seen = []
    for value in (9.0, math.nan, 9.0):
        grad.fill_(value)
        optimizer.step()
        seen.append(metrics_of(optimizer))
    before, skipped, after = seen

    counts = {"clip/clipped_share": 1.0, "clip/skipped_steps": 1}
    assert before["clip/skipped_steps"] == 0
    assert not any(map(math.isnan, [*before.values(), *after.values()]))
    assert {name: skipped.pop(name) for name in counts} == counts
    assert set(skipped) == set(after) - set(counts)
    assert all(map(math.isnan, skipped.values()))


def test_wrapper_in_looks_through_the_wrappers_of_trainers():
    optimizer: Any = made()
    prepared = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    bare = SimpleNamespace(optimizer=optimizer.optimizer)

    assert wrapper_in(prepared) is optimizer
    assert wrapper_in(bare) is None
    assert wrapper_in(None) is None


def hide(package, monkeypatch):
    """Makes an import of a package fail, whatever of it was imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def error_of_import(integration, monkeypatch):
    """The error of an integration that is imported anew."""
    name = f"tritonclip.integrations.{integration}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    return caught.value


@pytest.mark.parametrize(
    ("module", "packages"),
    [("lightning", ("lightning", "pytorch_lightning")), ("transformers", ("transformers",))],
    ids=["lightning", "transformers"],
)
def test_integration_names_the_extra_of_a_package_that_is_missing(module, packages, monkeypatch):
    for package in packages:
        hide(package, monkeypatch)
    error = error_of_import(module, monkeypatch)
    assert f"needs {module}, which could not be imported" in str(error)
    assert 'expected the extra: pip install "tritonclip[integrations]"' in str(error)
    assert (error.name or "").partition(".")[0] == module
    assert type(error.__cause__) is ModuleNotFoundError


def test_integration_says_what_a_package_lacks_itself(tmp_path, monkeypatch):
    """Rather than that pytorch_lightning is missing, too."""
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("import nothing_of_this_name\n")
    hide("lightning", monkeypatch)
    monkeypatch.delitem(sys.modules, "lightning")
    monkeypatch.syspath_prepend(tmp_path)
    hide("pytorch_lightning", monkeypatch)
    error = error_of_import("lightning", monkeypatch)
    assert error.name == "nothing_of_this_name"
    assert 'pip install "tritonclip[integrations]"' in str(error)
