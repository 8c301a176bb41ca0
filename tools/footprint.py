"""Where the memory of this process is."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

from tritonclip.engine.plan_cache import plans


def resident() -> float:
    """MiB of memory that the process holds."""
    with Path("/proc/self/statm").open() as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: bytes of all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def memory() -> str:
    """Where the memory is: a leak grows in use; what is free in arenas is fragmentation."""
    gc.collect()
    known = f"{resident():.0f} MiB resident"
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is not None:
        read.restype = MallocInfo
        info = read()
        used, free = (info.uordblks + info.hblkhd) / 2**20, info.fordblks / 2**20
        known += f", {used:.1f} in use and {free:.1f} free in malloc"
    return f"{known}, {sys.getallocatedblocks():,} Python objects, {len(plans)} plans"
