"""`patch_torch`: torch's functions that clip, replaced in every module that holds them."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tritonclip import torch_compat
from tritonclip.engine.verify import VerificationError
from tritonclip.messages import warn_user
from tritonclip.monitor.recorder import Recorder, as_recorder

_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
# Whose private names stay torch's own, by which its functions call each other.
_OF_TORCH = ("torch.nn.utils", "torch.nn.utils.clip_grad")


class Call(NamedTuple):
    """A call of a patched function: both that can serve it, and its arguments by name."""

    name: str
    ours: Callable[..., Any]
    original: Callable[..., Any]
    arguments: dict[str, Any]


# Chooses one of the two functions of a call, and what is done with its result, if anything.
Observer = Callable[[Call], tuple[Callable[..., Any], Callable[[Any], None] | None]]

# Guards both below.
_lock = threading.RLock()
# Replaced, never changed: calls read it without the lock.
_patches: tuple[TorchPatch, ...] = ()
# What torch's functions are replaced by, by name; made once.
_replacements: dict[str, Callable[..., Any]] = {}


def patch_torch(*, recorder: Recorder | None = None) -> TorchPatch:
    """Replaces torch's functions that clip by this library's, also in code that you cannot edit.

    `clip_grad_norm_`, `clip_grad_value_`, `clip_grads_with_norm_` and `get_total_norm` of
    `torch.nn.utils` are replaced there and in every loaded module that imported them by name, so
    that trainers call tritonclip without a change. Results have torch's types. A call that
    tritonclip refuses is served by torch's function, with one warning for each reason.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> with tritonclip.patch_torch():
        ...     (weight * weight).sum().backward()
        ...     torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
        tensor(10.)

    Args:
        recorder: made by :func:`record`: takes the norm and the limit of each patched call of
            `clip_grad_norm_` and `clip_grads_with_norm_`, for :func:`suggest_max_norm`.

    Returns:
        The patch. Its `remove()`, or the end of a `with` block, gives torch's functions back once
        no other patch is left; printed, it says what was replaced.

    Raises:
        TypeError: a recorder of another kind.

    Notes:
        Not reached: code with functions of its own, such as DeepSpeed, Megatron and apex; names
        that were bound elsewhere than in a module, for example as a default argument; other
        processes, except later forks. docs/trainers.md has more. `python -m tritonclip run
        train.py` patches a script without a change.

    References:
        Liger-Kernel, `apply_liger_kernel_to_llama`; scikit-learn-intelex, `patch_sklearn`.
    """
    return TorchPatch(recorder)


class TorchPatch:
    """What :func:`patch_torch` replaced; also a context manager."""

    def __init__(self, recorder: Recorder | None, observer: Observer | None = None) -> None:
        self.recorder, self.observer = as_recorder(recorder), observer
        # Calls that torch served, by reason.
        self.served_by_torch: Counter[str] = Counter()
        global _patches
        with _lock:
            if not _replacements:
                _replacements.update({name: _replacement(name) for name in _NAMES})
            _patches = (*_patches, self)
            originals = {id(f.__wrapped__): f for f in _replacements.values()}  # type: ignore[attr-defined]
            self._replaced = _exchange(originals)

    def remove(self) -> None:
        """Gives torch's functions back, once no other patch is left; again, does nothing."""
        global _patches
        with _lock:
            if self not in _patches:
                return
            _patches = tuple(patch for patch in _patches if patch is not self)
            if not _patches:
                _exchange({id(f): f.__wrapped__ for f in _replacements.values()})  # type: ignore[attr-defined]

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        lines = [f"<patch_torch: {'active' if self in _patches else 'removed'}>"]
        lines += [f"  {name} in {', '.join(at)}" for name, at in self._replaced.items()]
        lines += [f"  torch served {n} calls: {why}" for why, n in self.served_by_torch.items()]
        return "\n".join(lines)


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of torch that a replacement stands for; another function as it is."""
    is_ours = any(function is ours for ours in _replacements.values())
    original: Callable[..., Any] = function.__wrapped__ if is_ours else function  # type: ignore[attr-defined]
    return original


def _replacement(name: str) -> Callable[..., Any]:
    original, ours = getattr(torch.nn.utils, name), getattr(torch_compat, name)
    names = tuple(inspect.signature(original).parameters)
    # Where the norm before clipping is known to the caller, or becomes known.
    records = name in ("clip_grad_norm_", "clip_grads_with_norm_")

    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        # Read once, for both functions: an iterator, such as model.parameters(). An empty one stays
        # as it is, since both warn of it.
        if args:
            if type(args[0]) is not list and isinstance(args[0], Iterator):
                args = ([*args[0]] or args[0], *args[1:])
        elif isinstance(kwargs.get(names[0]), Iterator):
            kwargs = {**kwargs, names[0]: [*kwargs[names[0]]] or kwargs[names[0]]}
        function, done, observer = ours, None, None
        for patch in _patches:
            observer = patch.observer or observer
        if observer is not None and not torch.compiler.is_compiling():
            call = Call(name, ours, original, dict(zip(names, args, strict=False)) | kwargs)
            function, done = observer(call)
        try:
            result = function(*args, **kwargs)
        except VerificationError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            if function is original:
                raise
            # Whatever raises has changed nothing; where torch refuses too, its error is raised.
            result = original(*args, **kwargs)
            _count_refusal(f"{name}: {error}")
        else:
            if done is not None:
                done(result)
        for patch in _patches:
            if records and patch.recorder is not None:
                given = dict(zip(names, args, strict=False)) | kwargs
                limit = given["max_norm"]
                limit = limit if isinstance(limit, torch.Tensor) else float(limit)
                patch.recorder.add_(given.get("total_norm", result), limit=limit)
        return result

    return clip


def _count_refusal(reason: str) -> None:
    """Counts a call that torch served, and warns of the first."""
    for patch in _patches:
        patch.served_by_torch[reason] += 1
    if all(patch.served_by_torch[reason] == 1 for patch in _patches):
        warn_user(f"torch's own function serves this call, as tritonclip refuses it. {reason}")


def _exchange(replacements: dict[int, Callable[..., Any]]) -> dict[str, list[str]]:
    """Replaces functions, by id, in all loaded modules; their names and modules."""
    found: dict[str, list[str]] = {}
    for path, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or path.partition(".")[0] == "tritonclip":
            continue
        for name, value in list(vars(module).items()):
            other = replacements.get(id(value))
            if other is None or (path in _OF_TORCH and name.startswith("_")):
                continue
            setattr(module, name, other)
            found.setdefault(name, []).append(path)
    return found
