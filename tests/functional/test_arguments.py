"""Nested structures keep their form; arguments that have no meaning are refused, with a remedy."""

import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from helpers.cases import FUNCTIONS, untouched
from helpers.refusals import Refused, each_refused
from tritonclip import functional

X, T = torch.ones(2, 3), torch.tensor
F8 = torch.float8_e4m3fn
# With arguments that types refuse.
norm: Any = functional.clip_by_norm
value: Any = functional.clip_by_value
BY_LIMIT: list[Callable[..., Any]] = [
    norm,
    functional.clip_by_average_norm,
    functional.clip_by_rms,
    functional.clip_by_global_norm,
    lambda x, norm: functional.clip_by_global_norm(x, 1.0, use_norm=norm),
]


def limits(*wrong: Any, by: Any = BY_LIMIT) -> list[Any]:
    return [partial(clip, X, limit) for clip in by for limit in wrong]


def norms(name: str, *wrong: Any) -> list[Any]:
    return [partial(norm, X, 1.0, **{name: one}) for one in wrong]


def bounds(name: str, *wrong: Any) -> list[Any]:
    return [partial(value, X, **{name: one}) for one in wrong]


REFUSED: list[Refused] = [
    (ValueError, "must be 0 or more", *limits(-1.0, math.nan, T(-1.0), T([1.0, -2.0]))),
    (TypeError, "clip in float32 or bfloat16", partial(norm, X.to(F8), 1.0)),
    (ValueError, "max_norm must be 0 or more", partial(norm, X, T(math.nan))),
    (TypeError, "must be a number", *limits(True, "1", None, 1j, T(1), by=BY_LIMIT[:4])),
    (TypeError, "must be a number or a floating", *limits(T([1j]), T(1.0).to(F8), by=BY_LIMIT[:4])),
    (ValueError, r"one-element tensor.*got shape \(3,\)", *limits(torch.ones(3))),
    (ValueError, r"norms over dim; got shape \(3,\)", partial(norm, X, torch.ones(3), dim=1)),
    (ValueError, r"got shape \(2, 2, 1\)", partial(norm, X, torch.ones(2, 2, 1), dim=1)),
    (
        ValueError,
        r"each at most once; got .* for a tensor of shape \(2, 3\)",
        *norms("dim", 2, -3, (), (0, 0), (1, -1)),
    ),
    (
        TypeError,
        r"dim must be an integer, a sequence of integers or None",
        *norms("dim", True, 1.0, "1", (0, True), [0.0], T(1)),
    ),
    (
        ValueError,
        "norm_type must be from 1 to inf, got",
        *norms("norm_type", 0.0, 0.5, -math.inf, math.nan, -2),
    ),
    # ClipByValue takes one for both sides, torch.clamp for the lower one.
    (
        TypeError,
        r"one without a name.*clip_by_value\(x, -0\.5, 0\.5\)",
        *(partial(value, X, bound) for bound in (0.5, None, T(0.5))),
    ),
    (
        TypeError,
        "expected both bounds, or one by its name",
        partial(value, X, 0.0, 1.0, 2.0),
        partial(value, X, 0.0, 1.0, max=1.0),
        partial(value, X, 0.0, min=0.0),
    ),
    (ValueError, "expected a bound, got None for both", partial(value, X, min=None, max=None)),
    (ValueError, "got min=1.0 and max=0.5", partial(value, X, min=1.0, max=0.5)),
    (ValueError, "no bound, got NaN", partial(value, X, min=0.0, max=math.nan)),
    (ValueError, "whole for torch.int64, got 0.5", partial(value, X.long(), min=0.5, max=2)),
    (ValueError, "max must be of integers for", partial(value, X.int(), max=T(0.5))),
    (TypeError, "min must be a", *bounds("min", True, "1", 1j, T([True]), T([1j]))),
    (
        ValueError,
        "does not broadcast to x of shape",
        *bounds("min", torch.zeros(2), torch.zeros(2, 2, 3), torch.zeros(4, 3)),
    ),
    (TypeError, "got float", partial(functional.clip_by_global_norm, [X, 1.0], 1.0)),
]


@each_refused(REFUSED)
def test_an_argument_is_refused_and_nothing_changes(call, error, message):
    with untouched([X]), pytest.raises(error, match=message):
        call()


def test_nan_as_a_known_norm_is_a_measurement():
    (clipped,), _ = functional.clip_by_global_norm([X], 1.0, use_norm=T(math.nan))
    assert bool(clipped.isnan().all())


def test_dir_shows_the_functions_only():
    assert dir(functional) == sorted(functional.__all__)


@pytest.mark.parametrize("name", ["clip", "adaptive_clip_grad"])
def test_functional_knows_names_from_elsewhere(name):
    with pytest.raises(AttributeError, match=rf"\.functional' .*'{name}'; here it is"):
        getattr(functional, name)


def test_other_names_get_pythons_errors():
    missing = "^module 'tritonclip.functional' has no attribute 'it'$"
    module: Any = functional
    with pytest.raises(AttributeError, match=missing):
        _ = module.it
    with pytest.raises(ImportError, match="cannot import name 'it'"):
        exec("from tritonclip.functional import it")


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
    assert_alike(FUNCTIONS[function](tree, 2.0), tree)


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


NO_TENSORS: dict[str, Any] = {
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
@pytest.mark.parametrize(("make", "message"), NO_TENSORS.values(), ids=NO_TENSORS)
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
