"""Every launch goes through Triton's own JIT: argument binding, specialisation and options.

Ahead-of-time compilation spells out types and options by hand; this lets the JIT of the installed
Triton derive them from the launchers' real arguments, for an H100 that is not there.
"""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402

from tritonclip.kernels import chunks, clamp, launch, norm, scale  # noqa: E402
from tritonclip.limit import Limit  # noqa: E402

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing"),
]


class AbsentH100:
    """What the JIT asks of a driver before it launches."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that launchers have compiled, in place of launching them."""
    kernels = []

    def compile_only(kernel, device, programs, occupancy, arguments, **constants):
        options = {**launch.OPTIONS, "maxnreg": occupancy.registers}
        result = kernel.warmup(*arguments, grid=(programs,), **constants, **options)
        kernels.append(result.result() if hasattr(result, "result") else result)

    for module in (norm, scale, clamp):
        monkeypatch.setattr(module, "launch", compile_only)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    triton.runtime.driver.set_active(AbsentH100())
    yield kernels
    if torch.cuda.is_available():
        # Without a GPU there is no other driver to go back to.
        triton.runtime.driver.reset_active()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("grad_scale", [1.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_launch_arguments_bind_through_the_jit(compiled, dtype, grad_scale):
    table = chunks.chunk_table([torch.ones(20000, dtype=dtype), torch.ones(3, dtype=dtype)])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for each, erase in itertools.product((False, True), repeat=2):
        out = torch.empty(norm.count_norms(table, each), dtype=torch.float64)
        norm.norm(table, 2.0, out, each=each)
        limit = Limit(1.0, 2.0, 1e-6, wide, grad_scale, erase_nonfinite=erase)
        if each:
            flag = torch.tensor(True) if erase else None
            scale.scale_each_(table, out, 0, limit, erase=flag)
        else:
            scale.scale_(table, out, limit)
            scale.scale_(table, out, limit, write=False)
    clamp.clamp_(table, -1.0, 1.0, grad_scale)

    assert len(compiled) == 11
    for kernel in compiled:
        assert kernel.metadata.num_warps == launch.OPTIONS["num_warps"]
        assert kernel.metadata.maxnreg in (80, 128)
        assert "st.global" in kernel.asm["ptx"]
