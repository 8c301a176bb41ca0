"""Figures of compiled kernels are read from their machine code."""

from __future__ import annotations

import pytest
import torch

from bench import codegen

SASS = """
        /*0000*/                   LDG.E.128 R4, desc[UR8][R2.64] ;
        /*0010*/                   LDG.E.128 R8, desc[UR8][R2.64+0x1000] ;
        /*0020*/                   LDG.E.128 R12, desc[UR8][R2.64+0x2000] ;
        /*0030*/                   FADD R20, R5, R20 ;
        /*0040*/                   LDG.E.128 R4, desc[UR8][R2.64+0x3000] ;
        /*0050*/              @!P0 BRA 0x70 ;
        /*0060*/                   FADD R20, R4, R20 ;
        /*0070*/              @!P1 LDG.E.128 R4, desc[UR8][R2.64] ;
        /*0080*/                   STG.E.128 desc[UR8][R2.64], R4 ;
"""


@pytest.mark.parametrize(
    ("code", "width"),
    [("", 0), ("LDG.E.U8 R4", 1), ("LDG.E R4", 4), ("LDG.E.U8 R4; LDG.E.64 R6", 8)],
)
def test_widest_load_goes_by_the_suffix(code, width):
    assert codegen.widest(code, "LDG") == width


def test_loads_in_flight_end_where_the_first_is_used():
    assert codegen.widest(SASS, "LDG") == codegen.widest(SASS, "STG") == 16
    assert codegen.loads_by_loop(SASS, 16) == {("read", False): 3, ("write", True): 1}


@pytest.mark.codegen
def test_codegen_reads_every_kernel_and_loop():
    pytest.importorskip("triton", reason="triton is not installed")
    rows = codegen.rows_of(codegen.CHIPS[1], torch.float32)
    assert [(row.get("kernel"), row.get("loop")) for row in rows] == [
        ("norm", "read"),
        ("scale", "write"),
        ("norm, each", "read"),
        ("scale, each", "write"),
        ("clamp", "read"),
        ("clamp", "write"),
    ]
    for row in rows:
        assert row.get("load_bits") == 128
        assert row.get("spilled_bytes") == 0
        assert row.get("bytes_needed") == round(3.35e12 * 650e-9 / 132)
