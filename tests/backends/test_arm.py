"""The loops of `native/` on an ARM processor: cross-compiled, and run by QEMU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from helpers.cases import FLOATS, assert_bits, normal
from tritonclip.backends.native import CODES

NATIVE = Path(__file__).parents[2] / "native"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
# As setup.py has them.
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror")

needs_emulator = pytest.mark.skipif(
    shutil.which(EMULATOR) is None, reason=f"{EMULATOR} is not installed"
)
pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed"
)


def compiled(folder, *options):
    made = folder / "loops"
    source = Path(__file__).with_name("arm_loops.c")
    given = (*FLAGS, f"-I{NATIVE}", *options, source, "-lm", "-o", made)
    subprocess.run([COMPILER, *map(str, given)], check=True)
    return made


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("arm"), "-static")


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """The instructions of each function that was not inlined."""
    text = compiled(tmp_path_factory.mktemp("assembly"), "-S").read_text()
    return dict(re.findall(r"^(\w+):\n(.*?)^\t\.size", text, re.DOTALL | re.MULTILINE))


def special(dtype):
    """Elements whose sum is no number: NaN, infinities, subnormal and largest ones, zeros."""
    info = torch.finfo(dtype)
    few = [torch.nan, torch.inf, -torch.inf, info.max, -info.max, info.tiny, 0.0, -0.0]
    few += [info.smallest_normal * (1 + info.eps) / 4, info.tiny * info.eps, 1.5]
    return torch.tensor(few, dtype=torch.float64).to(dtype).repeat(7)


@needs_emulator
@pytest.mark.parametrize("values", ["normal", "special"])
@pytest.mark.parametrize("n", [0, 1, 7, 33, 1000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_loops_are_right_on_arm(program, dtype, n, values):
    x = normal(n, dtype=dtype) if values == "normal" else special(dtype)[:n]
    n, factor, low, high = x.numel(), 0.3, -0.5, 0.75
    given = [EMULATOR, str(program), *map(str, (CODES[dtype], factor, low, high))]
    done = subprocess.run(given, input=bytes(x.view(torch.uint8).tolist()), capture_output=True)
    assert done.returncode == 0
    parts = torch.frombuffer(bytearray(done.stdout[:24]), dtype=torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact = x.double()
    expected = [exact.square().sum(), exact.abs().sum(), exact.abs().amax() if n else 0.0]
    # Half types: 4.2e-7 (`loops.h`); sums of float64 are rounded 1,000 times at most.
    torch.testing.assert_close(
        parts, torch.tensor(expected, dtype=torch.float64), rtol=4.2e-7, atol=0, equal_nan=True
    )
    if n:
        own = torch.frombuffer(bytearray(done.stdout[24:]), dtype=dtype).view(3, n)
        multiplied = (x.to(wide) * torch.tensor(factor, dtype=wide)).to(dtype)
        clamped = x.clamp(low, high)
        assert_bits(own, [multiplied, clamped, clamped])


@pytest.mark.parametrize(
    ("dtype", "instructions"),
    [
        ("float16", (r"fcvtl2\tv\d+\.4s", r"fmul\tv\d+\.4s", r"fcvtn2\tv\d+\.8h")),
        ("bfloat16", (r"u(xtl|shll)2\tv\d+\.4s", r"fmul\tv\d+\.4s", r"(xtn|uzp[12])2?\tv\d+")),
        ("float32", (r"fmul\tv\d+\.4s",)),
        ("float64", (r"fmul\tv\d+\.2d",)),
    ],
)
def test_elements_are_multiplied_in_vectors_on_arm(assembly, dtype, instructions):
    loop = assembly[f"multiply_{dtype}_plain"]
    for one in instructions:
        assert re.search(one, loop), one
    # But for the factor, no number is converted or compared alone.
    assert len(re.findall(r"\tfcvt\t[hs]\d+", loop)) <= 1
    assert not re.search(r"\tfcmp\ts", loop)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_elements_are_measured_in_vectors_on_arm(assembly, dtype):
    loop = assembly[f"measure_{dtype}_plain"]
    assert re.search(r"fcvtl2?\tv\d+\.2d", loop)
    # The largest element alone is widened by itself.
    assert len(re.findall(r"\tfcvt\t[ds]\d+, [hs]\d+", loop)) <= 1
