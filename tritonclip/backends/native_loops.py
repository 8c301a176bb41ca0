"""The C extension, `native.c`, where it was built: loops over the memory of CPU gradients.

It is built where a C compiler is found when tritonclip is installed; its loops run in the threads
of the OpenMP library that PyTorch has loaded, so that no second pool competes with them.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

# Codes of the dtypes that it has loops for.
CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}

# `_native.pyi` has its functions; None where it was not built.
loops: Any = None
if find_spec("tritonclip.backends._native") is not None:
    from tritonclip.backends import _native

    loops = _native


def _share_threads() -> bool:
    """Lets loops run in PyTorch's threads; False where its OpenMP library cannot be called."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # GCC's interface, which LLVM's library has too. Already loaded: nothing is read.
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return False
    loops.share(ctypes.cast(function, ctypes.c_void_p).value)
    return True


# Whether large lists are shared by threads.
has_threads = loops is not None and _share_threads()
