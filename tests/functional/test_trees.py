"""Nested structures keep their form, and what is no tensor is refused by its place."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from tritonclip import functional

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any = None


pytree.register_dataclass(Layer)


@dataclass
class Unregistered:
    weight: Any


def three():
    return torch.tensor([3.0])


def four():
    return torch.tensor([4.0])


class Mine(torch.Tensor):
    """A subclass that the library knows nothing about."""


TREES = {
    "tensor": lambda: torch.tensor([3.0, 4.0]),
    "list": lambda: [three(), four()],
    "list-with-none": lambda: [None, three(), None, four()],
    "tuple": lambda: (three(), four()),
    "dict": lambda: {"b": three(), "a": four()},
    "ordered": lambda: OrderedDict(b=three(), a=four()),
    "default": lambda: defaultdict(list, b=three(), a=four()),
    "named-tuple": lambda: Pair(three(), four()),
    "nested": lambda: {"a": [three(), (four(), None)], "b": {}},
    "dataclass": lambda: Layer(three(), four()),
    "dataclass-in-list": lambda: [three(), {"layer": Layer(four(), None)}, []],
    "dataclass-of-dataclass": lambda: Layer(Layer(three()), {"a": [four()]}),
}
FUNCTIONS = {
    "value": lambda tree: functional.clip_by_value(tree, -2.0, 2.0),
    "norm": lambda tree: functional.clip_by_norm(tree, 2.0),
    "average": lambda tree: functional.clip_by_average_norm(tree, 2.0),
    "rms": lambda tree: functional.clip_by_rms(tree, 2.0),
    "global": lambda tree: functional.clip_by_global_norm(tree, 2.0)[0],
}


def assert_alike(ours, tree):
    """The same types, keys, order and other values, with tensors where tensors were."""
    assert type(ours) is type(tree)
    if isinstance(tree, dict):
        assert list(ours) == list(tree)
        ours, tree = list(ours.values()), list(tree.values())
    elif isinstance(tree, Layer):
        ours, tree = list(vars(ours).values()), list(vars(tree).values())
    if isinstance(tree, (list, tuple)):
        assert len(ours) == len(tree)
        for one, other in zip(ours, tree, strict=True):
            assert_alike(one, other)
    elif isinstance(tree, torch.Tensor):
        assert ours is not tree
    else:
        assert ours == tree


@pytest.mark.covering(1)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", TREES)
def test_structure_is_kept(name, function):
    tree = TREES[name]()
    assert_alike(FUNCTIONS[function](tree), tree)


@pytest.mark.parametrize("name", TREES)
def test_all_tensors_of_a_structure_have_one_norm(name):
    assert float(functional.global_norm(TREES[name]())) == 5.0


def test_values_stand_in_their_places():
    tree: Any = {"a": [three(), (four(), None)], "layer": Layer(torch.tensor([12.0]))}
    clipped, norm = functional.clip_by_global_norm(tree, 1.3)
    assert float(norm) == 13.0
    expected = [0.3, 0.4, 1.2]
    found = [clipped["a"][0], clipped["a"][1][0], clipped["layer"].weight]
    torch.testing.assert_close(torch.cat(found), torch.tensor(expected))


def test_gradients_of_torch_func_are_clipped_as_one_tree():
    layer = torch.nn.Linear(3, 2)
    parameters = {"layer": dict(layer.state_dict()), "scale": torch.ones(())}

    def loss(parameters):
        out = torch.func.functional_call(layer, parameters["layer"], torch.ones(4, 3))
        return (out * parameters["scale"]).square().sum() * 100

    gradients = torch.func.grad(loss)(parameters)
    clipped, norm = functional.clip_by_global_norm(gradients, 1.0)
    assert float(norm) > 1.0
    torch.testing.assert_close(functional.global_norm(clipped), torch.tensor(1.0))
    assert clipped.keys() == gradients.keys()


def test_registered_classes_are_taken_apart():
    class Box:
        def __init__(self, inside):
            self.inside = inside

    pytree.register_pytree_node(
        Box, lambda box: ([box.inside], None), lambda inside, _: Box(*inside)
    )
    tree: Any = {"a": Box(three()), "b": [four()]}
    clipped, norm = functional.clip_by_global_norm(tree, 1.0)
    assert float(norm) == 5.0
    torch.testing.assert_close(clipped["a"].inside, torch.tensor([0.6]))


REFUSED: dict[str, Any] = {
    "number": (lambda: [three(), 2.0], r"x\[1\] must be a tensor or None, got float"),
    "number-in-dict": (lambda: {"a": {"b": 1}}, r"x\['a'\]\['b'\] must be a tensor"),
    "generator": (
        lambda: iter(x for x in [three()]),
        "x must .* got generator; .*: make a list of it",
    ),
    "values": (lambda: {"a": three()}.values(), "x must .* got dict_values; .*: make a list of it"),
    "array": (lambda: [np.ones(3)], r"x\[0\] must .* got ndarray; .*: make a tensor of an array"),
    "module": (lambda: torch.nn.Linear(2, 2), "x must be .* got Linear; .*: pass its parameters"),
    "in-dataclass": (lambda: [Layer([three(), "no"])], r"x\[0\]\.weight\[1\] must be a tensor"),
    "dataclass": (
        lambda: [Unregistered(three())],
        r"x\[0\] must .*: register its class by torch\.ut",
    ),
    "sparse": (lambda: [three().to_sparse()], r"x\[0\] has .*to_dense\(\).*in place with clip_"),
    "subclass": (lambda: [three().as_subclass(Mine)], r"x\[0\] is a Mine, a tensor subclass"),
    "bool": (lambda: torch.tensor([True]), "has dtype torch.bool"),
    "csr": (lambda: torch.eye(2).to_sparse_coo().to_sparse_csr(), "has layout torch.sparse_csr"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "function",
    [lambda x: functional.clip_by_norm(x, 1.0), lambda x: functional.clip_by_value(x, max=1.0)],
    ids=["norm", "value"],
)
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_plain_tensor_is_refused_by_its_place(make, message, function):
    with pytest.raises(TypeError, match=message):
        function(make())


def test_integers_are_refused_by_norm_and_complex_ones_by_value():
    with pytest.raises(TypeError, match=r"x\[0\] has dtype torch.int64; expected a floating"):
        functional.clip_by_norm([torch.tensor([3])], 1.0)
    with pytest.raises(TypeError, match="tensors has dtype"):
        functional.global_norm(torch.tensor([3]))
    with pytest.raises(TypeError, match="has no order; expected a real one: clip by norm"):
        functional.clip_by_value(torch.tensor([3j]), -1.0, 1.0)
