"""`patch_torch`: torch's functions that clip run this library's code.

No module gets another object: while a patch is active, torch's function objects have another
`__code__`. So whoever holds one of them calls this library, and torch again after `remove()`.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import utils

from tritonclip import torch_compat
from tritonclip.messages import warn_user
from tritonclip.modes import is_observed
from tritonclip.monitor.recorder import Recorder, as_recorder
from tritonclip.torch_compat import NAMES, originals, torchs


class Call(NamedTuple):
    """A call of a patched function: both that can serve it, and its arguments by name."""

    name: str
    ours: Callable[..., Any]
    original: Callable[..., Any]
    arguments: dict[str, Any]


# Chooses one of the two functions of a call, and what is done with its result, if anything.
Observer = Callable[[Call], tuple[Callable[..., Any], Callable[[Any], None] | None]]
# Guards the variables below.
_lock = threading.RLock()
# The tuple is replaced and never changed, so that calls read it without the lock.
_patches: tuple[TorchPatch, ...] = ()
# torch's functions, each with its own code and its code under a patch; filled once.
_functions: list[tuple[FunctionType, CodeType, CodeType]] = []


def patch_torch(*, recorder: Recorder | None = None) -> TorchPatch:
    """Lets torch's functions that clip run this library's code, also where you cannot edit a call.

    `clip_grad_norm_`, `clip_grad_value_`, `clip_grads_with_norm_` and `get_total_norm` of
    `torch.nn.utils` stay the same objects and get other code, so that trainers call tritonclip
    however they hold the functions. Results have torch's types. A call that tritonclip refuses is
    served by torch's code, with one warning for each reason.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> with tritonclip.patch_torch():
        ...     (weight * weight).sum().backward()
        ...     torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
        tensor(10.)

    Args:
        recorder: made by :func:`record`: takes the norm and the limit of each patched call of
            `clip_grad_norm_` and `clip_grads_with_norm_`, for :func:`suggest_max_norm`. If it
            cannot, a warning says so, and the patch goes on without it.

    Returns:
        The patch. Its `remove()` gives torch's functions their code back, whoever patched them; the
        end of a `with` block does so once no other patch is left, and another block patches again.

    Raises:
        TypeError: a recorder of another kind.

    Notes:
        Not reached: code with functions of its own, such as DeepSpeed, Megatron and apex; calls
        that torch.compile or another tracer follows; other processes, except later forks.
        docs/trainers.md has more. `python -m tritonclip run train.py` patches a script without a
        change, and `%load_ext tritonclip` a notebook.

    References:
        Liger-Kernel, `apply_liger_kernel_to_llama`; scikit-learn-intelex, `patch_sklearn`.
    """
    return TorchPatch(recorder)


def load_ipython_extension(_: object) -> None:
    """`%load_ext tritonclip` in a notebook patches torch's functions."""
    patch_torch()


def unload_ipython_extension(_: object) -> None:
    """`%unload_ext tritonclip` gives them their code back."""
    _activate(())


# Raised by calls that this library refuses, before anything is measured or written. Other errors
# are the call's: of a norm that is not finite, of processes, of memory.
_REFUSALS = (TypeError, ValueError, NotImplementedError)


class TorchPatch:
    """A patch of torch's functions by :func:`patch_torch`; also a context manager."""

    def __init__(self, recorder: Recorder | None, observer: Observer | None = None) -> None:
        self.recorder, self.observer = as_recorder(recorder), observer
        # Calls that torch served, by reason.
        self.served_by_torch: Counter[str] = Counter()
        # Blocks that have begun and not ended.
        self._n_blocks = 0
        self._add()

    def remove(self) -> None:
        """Gives torch's functions their code back, whoever patched them; again, does nothing."""
        _activate(())

    def __enter__(self) -> TorchPatch:
        with _lock:
            self._add()
            self._n_blocks += 1
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._n_blocks -= 1
            if not self._n_blocks:
                _activate(tuple(patch for patch in _patches if patch is not self))

    def _add(self) -> None:
        with _lock:
            if self not in _patches:
                _activate((*_patches, self))

    def record_(self, arguments: Mapping[str, Any], result: Any) -> None:
        """Adds a call to the recorder, which is dropped where it cannot take it."""
        recorder, limit = self.recorder, arguments["max_norm"]
        assert recorder is not None
        try:
            limit = limit if isinstance(limit, torch.Tensor) else float(limit)
            tensors = arguments["parameters"]
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
            norm, order = arguments.get("total_norm", result), arguments.get("norm_type", 2.0)
            recorder.add_call_(tensors, norm, limit, float(order))
        except Exception as error:
            self.recorder = None
            warn_user(
                f"{recorder!r} keeps these steps and records no further call of patch_torch; the "
                f"training goes on: {error}"
            )

    def __repr__(self) -> str:
        state = "active" if self in _patches else "removed"
        lines = [f"<patch_torch: {state}>", *(f"  torch.nn.utils.{name}" for name in torchs)]
        lines += [f"  torch served {n} calls: {why}" for why, n in self.served_by_torch.items()]
        return "\n".join(lines)


def _activate(patches: tuple[TorchPatch, ...]) -> None:
    """Makes these patches the active ones; on an error, nothing changes."""
    global _patches
    with _lock:
        if not _functions:
            # All functions are patched, or none.
            _functions[:] = [_codes_of(name) for name in torchs]
        before = _patches
        try:
            _patches = patches
            _exchange(active=bool(patches))
        except BaseException:
            _patches = before
            _exchange(active=bool(before))
            raise
    replaced = [
        name
        for name in NAMES
        for own in [torchs.get(name)]
        if any(getattr(module, name, own) is not own for module in (utils, utils.clip_grad))
    ]
    if replaced and len(patches) > len(before):
        warn_user(
            f"torch.nn.utils has other functions than torch's for {replaced}, which something put "
            "in their place or loaded again: these stay as they are, and calls of them are not "
            "patched"
        )


def _exchange(*, active: bool) -> None:
    """Gives each function one of its two codes."""
    for function, code, our_code in _functions:
        function.__code__ = our_code if active else code


# Code has as many free variables as the code that it takes the place of, and torch's globals. Our
# function is one of its constants, which a program that empties sys.modules does not reach.
# torch.compile cannot read such a constant, and traces torch's function.
_CODE = """
def outer({free}):
    def {name}(*args, **kwargs):
        if torch.compiler.is_compiling():
            import tritonclip.torch_compat as torch_compat
            return torch_compat.originals["{name}"](*args, **kwargs)
        clip = "clip"
        return clip(*args, **kwargs)
        {free}
    return {name}.__code__
"""


def _codes_of(name: str) -> tuple[FunctionType, CodeType, CodeType]:
    """A function of torch, its own code, and one that calls ours."""
    function = torchs[name]
    free = function.__code__.co_freevars
    scope: dict[str, Any] = {}
    text = _CODE.format(name=name, free=", ".join(free))
    exec(compile(text, "<tritonclip.patch_torch>", "exec"), scope)
    code, clip = scope["outer"](*free), _clip_of(name)
    consts = tuple(clip if const == "clip" else const for const in code.co_consts)
    return function, function.__code__, code.replace(co_consts=consts)


def _clip_of(name: str) -> Callable[..., Any]:
    """The function that serves the calls of one of torch's."""
    original, ours = originals[name], getattr(torch_compat, name)
    names = tuple(inspect.signature(torchs[name]).parameters)
    known = frozenset(names)
    # After these calls the norm before clipping is known.
    records = name in ("clip_grad_norm_", "clip_grads_with_norm_")

    def clip(*args: Any, **kwargs: Any) -> Any:
        # A copy of this code may outlive the patch, and so may a graph that is traced here. torch
        # refuses arguments that only our function takes.
        if not _patches or not known.issuperset(kwargs) or is_observed():
            return original(*args, **kwargs)
        # An iterator such as model.parameters() is read once, for both functions. An empty one
        # stays as it is, because both warn of it.
        if args:
            if type(args[0]) is not list and isinstance(args[0], Iterator):
                args = ([*args[0]] or args[0], *args[1:])
        elif isinstance(kwargs.get(names[0]), Iterator):
            kwargs = {**kwargs, names[0]: [*kwargs[names[0]]] or kwargs[names[0]]}
        function, done, observer = ours, None, None
        for patch in _patches:
            observer = patch.observer or observer
        refusal = None
        try:
            if observer is not None:
                call = Call(name, ours, original, dict(zip(names, args, strict=False)) | kwargs)
                function, done = observer(call)
            result = function(*args, **kwargs)
        except _REFUSALS as error:
            if function is original:
                raise
            refusal = error
        if refusal is not None:
            # Counted before torch's code, which may refuse the call, too.
            reason = f"{name}: {refusal}"
            for patch in _patches:
                patch.served_by_torch[reason] += 1
            # The call that was refused has changed nothing.
            result = original(*args, **kwargs)
            if all(patch.served_by_torch[reason] == 1 for patch in _patches):
                warn_user(
                    f"torch's own function serves this call, as tritonclip refuses it. {reason}"
                )
        elif done is not None:
            done(result)
        if records:
            for patch in _patches:
                if patch.recorder is not None:
                    patch.record_(dict(zip(names, args, strict=False)) | kwargs, result)
        return result

    return clip
