"""`patch_torch`: makes torch's functions that clip run this library's code.

No module gets another object. While a patch is active, torch's function objects have another
`__code__`, so whoever holds one of them calls this library, and torch again after `remove()`.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import utils

from tritonclip import torch_compat
from tritonclip.messages import warn_user
from tritonclip.modes import is_observed, n_dispatch_modes
from tritonclip.monitor.recorder import Recorder, as_recorder
from tritonclip.torch_compat import NAMES, originals, torchs


class Call(NamedTuple):
    """A call of a patched function: two functions that can serve it, and its arguments by name."""

    name: str
    ours: Callable[..., Any]
    original: Callable[..., Any]
    arguments: dict[str, Any]


# Chooses one of the two functions of a call, and returns a function for its result, or None.
Observer = Callable[[Call], tuple[Callable[..., Any], Callable[[Any], None] | None]]
# Guards the state below.
_lock = threading.RLock()
# The active patches: a tuple that is only replaced, because calls read it without the lock.
_patches: tuple[TorchPatch, ...] = ()
# Made once: each function of torch with its code and the code that it gets by a patch.
_functions: list[tuple[FunctionType, CodeType, CodeType]] = []


def patch_torch(*, recorder: Recorder | None = None) -> TorchPatch:
    """Makes torch's functions that clip run this library's code, even if you cannot edit a call.

    `clip_grad_norm_`, `clip_grad_value_`, `clip_grads_with_norm_` and `get_total_norm` of
    `torch.nn.utils` stay the same objects and get other code, so that trainers call tritonclip
    however they imported the functions. Results have torch's types. A call that tritonclip refuses
    is served by torch's code, with one warning for each reason.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> with tritonclip.patch_torch():
        ...     (weight * weight).sum().backward()
        ...     torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
        tensor(10.)

    Args:
        recorder: a recorder made by :func:`record`, which takes the norm and the limit of each
            patched call of `clip_grad_norm_` and `clip_grads_with_norm_`, for
            :func:`suggest_max_norm`. If it cannot, a warning says so, and the patch drops it.

    Returns:
        The patch. Its `remove()` gives torch's functions their code back, whoever patched them. The
        end of a `with` block does so once no other patch is left; another block patches again.

    Raises:
        TypeError: a recorder of another kind.

    Notes:
        The patch does not reach code with its own functions, such as DeepSpeed, Megatron and apex;
        calls that torch.compile or another tracer follows; and other processes, except later forks.
        docs/trainers.md has more. `python -m tritonclip run train.py` patches an unchanged script,
        and `%load_ext tritonclip` a notebook.

    References:
        Liger-Kernel, `apply_liger_kernel_to_llama`; scikit-learn-intelex, `patch_sklearn`.
    """
    return TorchPatch(recorder)


def load_ipython_extension(_: object) -> None:
    """`%load_ext tritonclip` in a notebook patches torch's functions."""
    patch_torch()


def unload_ipython_extension(_: object) -> None:
    """`%unload_ext tritonclip` gives torch's functions their code back."""
    _activate(())


# This library raises these when it refuses a call, before anything is measured or written. Other
# errors belong to the call: a norm that is not finite, or trouble with processes or memory.
_REFUSALS = (TypeError, ValueError, NotImplementedError)


class TorchPatch:
    """A patch of torch's functions by :func:`patch_torch`; also a context manager."""

    def __init__(
        self,
        recorder: Recorder | None,
        observer: Observer | None = None,
        losses: Losses | None = None,
    ) -> None:
        self.recorder, self.observer, self.losses = as_recorder(recorder), observer, losses
        # The number of calls that torch served, by reason.
        self.served_by_torch: Counter[str] = Counter()
        # The number of blocks that have begun and not ended.
        self._n_blocks = 0
        self._add()

    def remove(self) -> None:
        """Gives torch's functions their code back, whoever patched them; may be called again."""
        _activate(())

    def __enter__(self) -> TorchPatch:
        with _lock:
            self._add()
            self._n_blocks += 1
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            # A stack of contexts may end a block that did not begin.
            self._n_blocks = max(self._n_blocks - 1, 0)
            if not self._n_blocks:
                _activate(tuple(patch for patch in _patches if patch is not self))

    def _add(self) -> None:
        with _lock:
            if self not in _patches:
                _activate((*_patches, self))

    def record_(self, recorder: Recorder, arguments: Mapping[str, Any], result: Any) -> None:
        """Adds a call to the patch's recorder, and drops the recorder if that fails."""
        limit = arguments["max_norm"]
        try:
            limit = limit if isinstance(limit, Tensor) else float(limit)
            tensors = arguments["parameters"]
            tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
            norm, order = arguments.get("total_norm", result), arguments.get("norm_type", 2.0)
            loss = None if self.losses is None else self.losses.total()
            recorder.add_call_(tensors, norm, limit, float(order), loss=loss)
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


# The most losses of a step, and the most losses scaled by a GradScaler, that are remembered.
_MOST_LOSSES, _MOST_SCALED = 1000, 16


class Losses(threading.local):
    """The losses on which a thread of an unchanged script called `backward` before it clips.

    Losses add up as their gradients do: those of micro-batches, or of both halves of a critic. A
    loss that a GradScaler scaled counts as it was before. Calls that pass gradients to `backward`,
    tensors of other classes, and tensors computed from a scaled loss are left out.
    """

    def __init__(self) -> None:
        # Numbers, or tensors without graphs on a device, for which the host does not wait.
        self.found: deque[float | Tensor] = deque(maxlen=_MOST_LOSSES)
        self._total: float | Tensor | None = None

    def watch(self) -> Callable[[], None]:
        """Notes losses until the returned function is called."""
        autograd: Any = torch.autograd
        scaler_type: Any = torch.amp.GradScaler
        backward, scale = autograd.backward, scaler_type.scale
        # References to scaled losses, and the losses before.
        scaled: deque[tuple[weakref.ref[Tensor], float | Tensor]] = deque(maxlen=_MOST_SCALED)

        # Most calls enter no other function of Python, because that takes time, and torch.compile
        # would trace it where it breaks its graph at Tensor.backward.
        @torch.compiler.disable(recursive=False)
        @functools.wraps(backward)
        def backward_noted(
            tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any
        ) -> None:
            backward(tensors, grad_tensors, *rest, **named)
            try:
                if grad_tensors is not None or n_dispatch_modes():
                    self._total = None
                elif type(tensors) is not Tensor or scaled:
                    add(tensors)
                else:
                    self.found.append(tensors.item() if tensors.is_cpu else tensors.detach())
            except Exception as error:
                _warn_of_loss(error)

        @torch.compiler.disable
        def add(tensors: Any) -> None:
            self._total = None
            for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
                # A copy, since another thread may scale a loss meanwhile.
                known = [loss for one, loss in [*scaled] if one() is tensor]
                if known or (type(tensor) is Tensor and not scaled):
                    self.found.append(known[0] if known else tensor.detach())

        @functools.wraps(scale)
        def scale_noted(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if type(outputs) is Tensor and result is not outputs:
                scaled.append((weakref.ref(result), outputs.detach()))
            return result

        def end() -> None:
            autograd.backward, scaler_type.scale = backward, scale

        autograd.backward, scaler_type.scale = backward_noted, scale_noted
        return end

    def total(self) -> float | Tensor | None:
        """The sum of the losses whose gradients a call clips; None if no loss is known."""
        found = [*self.found]
        if found:
            # The sum is kept, because several calls that clip may follow one backward pass.
            self._total = None
            self.found.clear()
            try:
                self._total = sum(found)
            except RuntimeError as error:
                # They lie on two devices, or the next replay of a CUDA graph overwrote them.
                _warn_of_loss(error)
        return self._total


def _warn_of_loss(error: Exception) -> None:
    warn_user(f"a loss is not recorded, and the training goes on: {error}", once=True)


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The copy that always runs torch's code, for a function of torch's; others as they are."""
    found = (originals[name] for name, torchs_own in torchs.items() if function is torchs_own)
    return next(found, function)


def _activate(patches: tuple[TorchPatch, ...]) -> None:
    """Makes these patches the active ones; on an error, nothing changes."""
    global _patches
    with _lock:
        if not _functions:
            # This makes the code of all functions, or raises and keeps none.
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


# Code must have as many free variables as the code that it replaces, and it sees torch's globals.
# Our function is one of its constants, so that it survives a program that empties sys.modules.
# torch.compile cannot read such a constant, so there the code calls the copy of torch's function.
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
    """A function of torch, its own code, and code that calls our function."""
    function = torchs[name]
    free = function.__code__.co_freevars
    scope: dict[str, Any] = {}
    text = _CODE.format(name=name, free=", ".join(free))
    exec(compile(text, "<tritonclip.patch_torch>", "exec"), scope)
    code, clip = scope["outer"](*free), _clip_of(name)
    consts = tuple(clip if const == "clip" else const for const in code.co_consts)
    return function, function.__code__, code.replace(co_consts=consts)


def _clip_of(name: str) -> Callable[..., Any]:
    """Makes the function that serves the calls of one of torch's functions."""
    original, ours = originals[name], getattr(torch_compat, name)
    names = tuple(inspect.signature(torchs[name]).parameters)
    known = frozenset(names)
    # Only these calls get or return the norm before clipping.
    records = name in ("clip_grad_norm_", "clip_grads_with_norm_")

    def clip(*args: Any, **kwargs: Any) -> Any:
        # Copies of the code, and graphs that are made here, outlive the patch. torch has to refuse
        # arguments that only our function takes.
        if not _patches or not known.issuperset(kwargs) or is_observed():
            return original(*args, **kwargs)
        # An iterator, such as model.parameters(), is read once for both functions. An empty one
        # stays as it is, because both functions warn of it.
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
            # This counts before torch's code runs, because torch may refuse the call as well.
            reason = f"{name}: {refusal}"
            for patch in _patches:
                patch.served_by_torch[reason] += 1
            # The refused call has changed nothing.
            result = original(*args, **kwargs)
            if all(patch.served_by_torch[reason] == 1 for patch in _patches):
                warn_user(
                    f"torch's own function serves this call, as tritonclip refuses it. {reason}"
                )
        elif done is not None:
            done(result)
        if records:
            # Two patches have the same one where a cell of a notebook is run twice.
            recorders: list[Recorder] = []
            for patch in _patches:
                recorder = patch.recorder
                if recorder is not None and recorder not in recorders:
                    recorders.append(recorder)
                    named = dict(zip(names, args, strict=False)) | kwargs
                    patch.record_(recorder, named, result)
        return result

    return clip
