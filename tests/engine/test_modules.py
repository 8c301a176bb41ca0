"""The parameters of a module are found in torch's order, and marks on modules are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tritonclip
from helpers.cases import grad_of, untouched
from tritonclip import ClipByNorm


class Renamed(nn.Module):
    """Has other parameters than its modules say."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield "weight", self.inner.weight


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    return model


def shared() -> nn.Module:
    layer = nn.Linear(2, 2)
    return nn.ModuleDict({"a": nn.Sequential(layer, nn.ReLU()), "b": layer, "c": nn.Linear(2, 1)})


def cyclic() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    object.__getattribute__(model, "_modules")["loop"] = model
    return model


MODELS: dict[str, Any] = {
    "empty": nn.Module,
    "nested": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    ),
    "tied": tied,
    "shared": shared,
    "cyclic": cyclic,
    "lists": lambda: nn.ParameterList([nn.Parameter(torch.zeros(i)) for i in range(3)]),
    "absent": lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False)),
    "renamed": Renamed,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_parameters_of_a_module_are_those_of_torch_in_order(make):
    model = make()
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, i + 1)
    norms = tritonclip.clip_(model, ClipByNorm(torch.inf))
    expected = tritonclip.clip_(list(model.parameters()), ClipByNorm(torch.inf))
    assert torch.equal(norms, expected)


def marked(name: str) -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.get_submodule(name).need_clip = False
    return model


CALLS: dict[str, Any] = {
    "clip_": lambda m: tritonclip.clip_(m, 1.0),
    "clip_grad_norm_": lambda m: tritonclip.clip_grad_norm_(m, 1.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"module \(a Sequential\) has need_clip = False"),
        ("1.0", r"for p in module\.1\.0\.parameters\(\): p\.need_clip = False"),
    ],
    ids=["itself", "inner"],
)
def test_marks_on_modules_are_refused(call, name, message):
    model = marked(name)
    with untouched(map(grad_of, model.parameters())), pytest.raises(ValueError, match=message):
        call(model)


def test_marks_are_found_when_the_plan_is_known():
    """True is as no mark."""
    model = marked("1")
    model[1].need_clip = True
    tritonclip.clip_(model, 0.0)
    assert not any(grad_of(p).any() for p in model.parameters())
    model[1].need_clip = False
    with pytest.raises(ValueError, match="need_clip = False"):
        tritonclip.clip_(model, 1.0)


def test_a_call_leaves_the_module_as_it_was():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model[1][0].bias.need_clip = False
    before = [{*vars(module)} for module in model.modules()]
    tritonclip.clip_(model, 1.0)
    assert [{*vars(module)} for module in model.modules()] == before
