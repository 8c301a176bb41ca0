"""`patch_torch`: torch's functions that clip, replaced in every module that holds them."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from tritonclip import torch_compat
from tritonclip.engine.verify import VerificationError
from tritonclip.messages import warn_user

if TYPE_CHECKING:
    from tritonclip.monitor.recorder import Recorder

_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
# Whose private names stay torch's own, by which its functions call each other.
_OF_TORCH = ("torch.nn.utils", "torch.nn.utils.clip_grad")
# Guards the two below.
_lock = threading.RLock()
_patches: list[TorchPatch] = []
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
            `clip_grad_norm_`, for :func:`suggest_max_norm`.

    Returns:
        The patch. Its `remove()`, or the end of a `with` block, gives torch's functions back once
        no other patch is left; printed, it says what was replaced.

    Notes:
        Not reached: code that copied the functions, such as DeepSpeed and Megatron, the method
        `clip_grad_norm_` of FSDP1, and names that were bound elsewhere than in a module, for
        example as a default argument. Threads may clip meanwhile.

    References:
        Liger-Kernel, `apply_liger_kernel_to_llama`; scikit-learn-intelex, `patch_sklearn`.
    """
    return TorchPatch(recorder)


class TorchPatch:
    """What :func:`patch_torch` replaced; also a context manager."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        # Calls that torch served, by reason.
        self.served_by_torch: Counter[str] = Counter()
        with _lock:
            if not _replacements:
                _replacements.update({name: _replacement(name) for name in _NAMES})
            _patches.append(self)
            originals = {id(f.__wrapped__): f for f in _replacements.values()}  # type: ignore[attr-defined]
            self._replaced = _exchange(originals)

    def remove(self) -> None:
        """Gives torch's functions back, once no other patch is left; again, does nothing."""
        with _lock:
            if self not in _patches:
                return
            _patches.remove(self)
            if not _patches:
                _exchange({id(f): f.__wrapped__ for f in _replacements.values()})  # type: ignore[attr-defined]

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        # Read once, for both functions.
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        kwargs = {k: list(v) if isinstance(v, Iterator) else v for k, v in kwargs.items()}
        try:
            result = ours(*args, **kwargs)
        except VerificationError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            # Whatever raises has changed nothing; where torch refuses too, its error is raised.
            result, reason = original(*args, **kwargs), f"{name}: {error}"
            for patch in list(_patches):
                patch.served_by_torch[reason] += 1
            if sum(patch.served_by_torch[reason] for patch in list(_patches)) == len(_patches):
                warn_user(
                    f"torch's own function serves this call, as tritonclip refuses it. {reason}"
                )
        if name == "clip_grad_norm_":
            for patch in list(_patches):
                if patch.recorder is not None:
                    limit = args[1] if len(args) > 1 else kwargs["max_norm"]
                    is_tensor = isinstance(limit, torch.Tensor)
                    patch.recorder.add_(result, limit=limit if is_tensor else float(limit))
        return result

    return clip


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
