"""The C extension of `native/`, where it was built: loops over the memory of CPU gradients.

It is built where a C compiler is found when tritonclip is installed; its loops run in the threads
of the OpenMP library that PyTorch has loaded, so that no second pool competes with them.
"""

import ctypes
import importlib
import os
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

# Codes of the dtypes that it has loops for.
CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Of the functions and their arguments, as in `native/module.c`: a binary may be older.
INTERFACE = 3

_MODULE = "tritonclip.backends._native"
_REBUILD = (
    "install a C compiler (gcc or clang) and Python's headers, and then, in a checkout of "
    "tritonclip, run pip install --force-reinstall --no-cache-dir --no-deps ."
)


def load() -> tuple[Any, str]:
    """The extension, whose functions `_native.pyi` has; or None, and why, with a remedy."""
    if find_spec(_MODULE) is None:
        root = Path(__file__).parents[2]
        if (root / "native" / "module.c").exists():
            return None, (
                f"tritonclip is imported from its sources in {root}, where its C "
                "extension was not built: run Python in another folder, or, with gcc or clang and "
                "Python's headers, install them in place by pip install -e ."
            )
        return None, f"tritonclip was installed without its C extension: {_REBUILD}"
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        return None, f"its C extension cannot be loaded ({error}): {_REBUILD}"
    if getattr(module, "INTERFACE", None) != INTERFACE:
        return None, f"its C extension was built from another version: {_REBUILD}"
    return module, ""


loops, fault = load()


def _share_threads() -> bool:
    """Lets loops run in PyTorch's threads; False where its OpenMP library cannot be called."""
    # First as PyTorch itself looks it up, so that a library that was preloaded serves both.
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        with suppress(OSError, AttributeError, TypeError):
            # GCC's interface, which LLVM's library has too. Already loaded: nothing is read.
            function = ctypes.CDLL(library).GOMP_parallel
            loops.share(ctypes.cast(function, ctypes.c_void_p).value)
            return True
    return False


# Whether large lists are shared by threads.
has_threads = loops is not None and _share_threads()
if has_threads and hasattr(os, "register_at_fork"):
    # A forked process has none of these threads: it would wait for them.
    os.register_at_fork(after_in_child=partial(loops.share, 0))


def describe() -> str:
    """Whether the extension serves, for a report."""
    if loops is None or has_threads:
        return fault or "built"
    return (
        f"built; lists of {loops.SHARED:,} elements or more take PyTorch's operators, as the "
        "threads of its OpenMP library cannot be shared"
    )
