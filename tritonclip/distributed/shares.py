"""DTensors taken apart: the local pieces of a gradient list, and the sharding that they are of.

    shares = shares_of(parameters, grads, holders, label)   None for plain tensors of one process
    shares.tensors                                          the pieces, which verbs read and write
    shares.sharding.pieces[i].weight                        1 / the processes that hold this piece
    shares.sharding.domain.groups                           to be reduced over, one after the other

A `Sharding` is kept for lists alike: DTensors keep their spec from step to step, so a list that was
met before is recognised by the identity of its specs.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from tritonclip.distributed.domain import Holders
from tritonclip.distributed.sharding import Sharding, dtype_of, mesh_of, sharding_of

CAPACITY = 32
_NOBODY = Holders()
# The parts of a DTensor, read directly: `to_local` and `placements` call Python for each.
_get_spec, _get_local = attrgetter("_spec"), attrgetter("_local_tensor")
_PLAIN = frozenset({Tensor, Parameter})


class Shares(NamedTuple):
    """The pieces of a gradient list that lie here.

    Attributes:
        tensors: plain, one a gradient.
        wrappers: the DTensors around them, whose versions count too.
        absent: the parameters without a gradient.
        sharding: how the list lies over processes.
    """

    tensors: list[Tensor]
    wrappers: list[Tensor]
    absent: list[Tensor]
    sharding: Sharding


class _Known(NamedTuple):
    """A sharding, and the list that it was made for: specs of parameters and gradients."""

    specs: list[Any]
    forms: list[Any]
    said: list[int | None]
    # Kept alive for the key, which has their ids.
    group: object
    meshes: tuple[Any, ...]
    sharding: Sharding

    def has(self, specs: list[Any], forms: list[Any]) -> bool:
        """Whether these are its very specs."""
        return all(map(is_, specs, self.specs)) and all(map(is_, forms, self.forms))

    def serves(self, specs: list[Any], forms: list[Any], said: list[int | None]) -> bool:
        """Whether a list of as many parameters is laid out alike."""
        if said != self.said:
            return False
        return self.has(specs, forms) or (
            all(map(_alike, specs, self.specs)) and all(map(_alike, forms, self.forms))
        )


_known: OrderedDict[tuple[object, ...], _Known] = OrderedDict()


def shares_of(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    holders: Holders | None,
    label: Callable[[int], str],
) -> Shares | None:
    """The local pieces of gradients; None where there is no DTensor and nobody named a group.

    Args:
        parameters: all that are to be clipped, with and without a gradient.
        grads: of each parameter, or None.
        holders: the user's group and copies; None without.
        label: names the i-th parameter in messages.

    Raises:
        TypeError: a Partial gradient that is no sum.
        ValueError: meshes or groups that cannot be reduced over; a wrong number of copies.
    """
    # Where nobody imported it, nothing is a DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None and holders is None:
        return None
    kind: Any = () if module is None else module.DTensor
    if holders is None and not any(isinstance(one, kind) for one in (*parameters, *grads)):
        return None
    # Of plain parameters the dtype: a spec has it.
    specs = _specs(parameters)
    if specs is None:
        specs = [p._spec if isinstance(p, kind) else p.dtype for p in parameters]
    forms = _specs(grads)
    if forms is None:
        # False where there is no gradient, None where it is plain.
        forms = [g._spec if isinstance(g, kind) else False if g is None else None for g in grads]
    user = holders or _NOBODY
    said = _said(parameters, user.copies)
    ends = [getattr(spec, "placements", spec) for spec in (*specs[:1], *specs[-1:])]
    key = len(specs), *ends, id(user.group), *map(id, user.meshes)
    known = _known.get(key)
    if known is None or not known.serves(specs, forms, said):
        sharding = sharding_of(specs, forms, said, user, label)
    elif known.has(specs, forms):
        return _shares(parameters, grads, kind, known.sharding)
    else:
        # Other specs, of the same content: from now on these are recognised at once.
        sharding = known.sharding
    _keep(key, _Known(specs, forms, said, user.group, user.meshes, sharding))
    return _shares(parameters, grads, kind, sharding)


def without_mesh(tensor: Tensor) -> Tensor:
    """A plain tensor with all elements of a DTensor; others as they are."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        whole: Tensor = tensor.full_tensor()
        return whole
    return tensor


def _said(parameters: Sequence[Tensor], copies: Any) -> list[int | None]:
    """The user's numbers of holders."""
    if copies is None:
        return [None] * len(parameters)
    find = copies.get if isinstance(copies, Mapping) else copies
    return [find(parameter) for parameter in parameters]


def _alike(a: Any, b: Any) -> bool:
    """Whether two specs place a tensor alike; meshes are compared by identity, for their groups."""
    if a is b:
        return True
    mesh = mesh_of(a)
    if mesh is None or mesh is not mesh_of(b):
        return False
    return bool(a.placements == b.placements) and dtype_of(a) == dtype_of(b)


def _keep(key: tuple[object, ...], known: _Known) -> None:
    _known.pop(key, None)
    _known[key] = known
    while len(_known) > CAPACITY:
        try:
            _known.popitem(last=False)
        except KeyError:
            # Emptied by another thread.
            break


def _specs(tensors: Sequence[Tensor | None]) -> list[Any] | None:
    """The specs of DTensors; None where others are among them."""
    try:
        return list(map(_get_spec, tensors))
    except AttributeError:
        return None


def _shares(
    parameters: Sequence[Tensor], grads: Sequence[Tensor | None], kind: Any, sharding: Sharding
) -> Shares:
    there: list[Any] = [g for g in grads if g is not None]
    if not sharding.mixed:
        wrappers, tensors = there, list(map(_get_local, there))
    else:
        wrappers = [g for g in there if isinstance(g, kind)]
        tensors = [g._local_tensor if isinstance(g, kind) else g for g in there]
    if not _PLAIN.issuperset(map(type, tensors)):
        # Results of collectives that may still run.
        tensors = [t.wait() if hasattr(t, "trigger_wait") else t for t in tensors]
    absent = [parameters[i] for i in sharding.absent]
    return Shares(tensors, wrappers, absent, sharding)
