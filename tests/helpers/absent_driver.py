"""A CUDA driver that does nothing, under Triton's own launcher: both ways of launching leave there
what they hand over. Run as a program, because Triton links itself to the first driver of a process:

    python -m helpers.absent_driver FOLDER float32 bfloat16
"""

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from helpers.absent_gpu import absent_gpu, kernel_module, replaced_launch
from tritonclip.backends import native, triton
from tritonclip.backends.interface import Clip

STREAM = 0x7F00DEADBEE0


def build(folder: Path) -> ctypes.CDLL:
    """Makes the driver this process's, before Triton asks for one."""
    source, library = Path(__file__).with_suffix(".c"), folder / "libcuda.so.1"
    given = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run([os.environ.get("CC", "cc"), *given], check=True)
    (folder / "libcuda.so").symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def launching() -> Iterator[Any]:
    """Lets Triton's launcher launch on an absent GPU of 132 multiprocessors."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime import driver

    with (
        absent_gpu(90),
        patch.object(kernel_module("launch"), "multiprocessors", lambda device: 132),
    ):
        driver.active.launcher_cls, driver.active.utils = CudaLauncher, CudaUtils()
        driver.active.get_current_stream = lambda device=0: STREAM
        yield driver.active


def handed(driver: ctypes.CDLL) -> list[int]:
    """What the last launch was handed."""
    return [*(ctypes.c_uint64 * 64).in_dll(driver, "handed")]


def set_parameters(driver: ctypes.CDLL, widths: list[int]) -> None:
    """Tells the driver how many parameters to read, and their bytes."""
    ctypes.c_int.in_dll(driver, "n_parameters").value = len(widths)
    kept = (ctypes.c_int * 32).in_dll(driver, "widths")
    for i, width in enumerate(widths):
        kept[i] = width


class Compared:
    """Launches each kernel as Triton does, and as a table does from the second time on."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver, self.real = driver, kernel_module("launch").launch
        self.kernels: list[str] = []
        self.differing: list[str] = []

    def __call__(self, kernel, device, programs, occupancy, arguments, **constants) -> Any:
        """In place of `launch.launch`."""
        given = kernel, device, programs, occupancy, arguments
        set_parameters(self.driver, [])
        runner = self.real(*given, **constants)
        bits = re.findall(r"\.param \.[a-z](\d+)", runner.compiled.asm["ptx"])
        set_parameters(self.driver, [int(n) // 8 for n in bits])
        self.real(*given, **constants)
        theirs = handed(self.driver)
        numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        for own in (numbers, arguments):
            started = runner.start(programs, len(arguments))(STREAM, *own)
            if not started or handed(self.driver) != theirs:
                self.differing.append(
                    f"{kernel.fn.__name__}, {started}: {theirs}, {handed(self.driver)}"
                )
        assert theirs[1] == programs
        assert theirs[8] == STREAM
        assert all(theirs[9:11])
        set_parameters(self.driver, [])
        self.kernels.append(kernel.fn.__name__)
        return runner


def launch_all(dtype: torch.dtype, number: Any) -> None:
    """Every kernel, with every kind of argument; those of a table twice."""
    lay_out, wide = kernel_module("tables").lay_out, torch.promote_types(dtype, torch.float32)
    table = lay_out(torch.device("cpu"), dtype, [16384 * 500, 3], [1 << 44, 1 << 45])
    batch = triton.TritonBatch([], table, wide)
    flag = torch.tensor(True)
    for _ in range(2):
        for erase in (False, True):
            clip = Clip(2.0, 1e-6, number, number, erase)
            batch.scale_(batch.norm(2.0, "all"), clip)
            clip = clip._replace(erase=flag if erase else None, of="each")
            batch.scale_(batch.norm(2.0, "each"), clip)
        batch.combine(batch.norm(2.0, "all"), 2.0, "all", number)
        batch.clamp_(-1.0, 1.0, number)
        batch.clip_(2.0, 1e-6, 0.5, number)


def clip_again(driver: ctypes.CDLL) -> bool:
    """Whether a known clip hands over its table, and a place for the coefficient behind norms."""
    lay_out = kernel_module("tables").lay_out
    table = lay_out(torch.device("cpu"), torch.float32, [16384 * 500], [1 << 44])
    batch = triton.TritonBatch([], table, torch.float32)
    batch.clip_(2.0, 1e-6, 0.5, 4.0)
    ((key, start),) = [item for item in table.starts.items() if item[0][0] == "scale"]

    def start_scale(*arguments: Any) -> bool:
        set_parameters(driver, [8] * 7 + [4, 4, 8, 8, 8])
        return bool(start(*arguments))

    table.starts[key] = start_scale
    total = batch.clip_(2.0, 1e-6, 0.5, 4.0)
    programs, *_ = handed(driver)[1:]
    *tables, norms, norm, coefficient, n_chunks, n_norms = handed(driver)[9:18]
    numbers = struct.pack("<3q", *handed(driver)[18:21])
    expected = [*table.addresses], total.data_ptr(), norms + 8 * programs, 500, 396, 396
    given = tables, norm, coefficient, n_chunks, n_norms, programs
    return bool(given == expected and struct.unpack("<3d", numbers) == (0.5, 1e-6, 4.0))


def launch_others(dtype: torch.dtype) -> None:
    """The kernels of units."""
    row = torch.empty(64, 512, dtype=dtype)
    layout = triton.TritonLayout([row], [row])
    layout.dtype = torch.promote_types(dtype, torch.float32)
    batch = layout.bind([row, row], None)
    batch.scale_(batch.norm(2.0, "rows"), Clip(2.0, 1e-3, 0.1, 1.0, of="rows"))


def main(folder: str, *dtypes: str) -> None:
    """Prints the kernels that were compared, launches in all, and what differed."""
    driver = build(Path(folder))
    with launching():
        with replaced_launch(compared := Compared(driver)):
            for dtype in dtypes:
                for number in (1.0, torch.tensor(2.0)):
                    launch_all(getattr(torch, dtype), number)
                launch_others(getattr(torch, dtype))
        clipped = clip_again(driver)
    n_launches = ctypes.c_int.in_dll(driver, "n_launches").value
    found = {"kernels": compared.kernels, "n": n_launches, "differing": compared.differing}
    print(json.dumps(found | {"clipped": clipped, "native": native.loops is not None}))


if __name__ == "__main__":
    main(*sys.argv[1:])
