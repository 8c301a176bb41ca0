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


AMD = """
	buffer_load_dwordx4 v[4:7], v1, s[20:23], 0 offen
	buffer_load_dwordx4 v[8:11], v1, s[24:27], 0 offen ; a comment
	v_pk_fma_f32 v[12:13], v[6:7], v[6:7], v[12:13]
	s_cbranch_vccz .LBB0_2
	.loc	1 131 20
.LBB0_1:
	v_cndmask_b32_e32 v0, v30, v17, vcc
	buffer_load_dwordx4 v[4:7], v0, s[20:23], 0 offen
	v_mov_b32_e32 v0, v2
	buffer_store_dwordx4 v[4:7], v0, s[20:23], 0 offen
	s_cbranch_scc1 .LBB0_1
.LBB0_2:
	buffer_load_ushort v3, v0, s[20:23], 0 offen
"""


def test_amds_assembly_is_read_as_well():
    """A load is masked by the offset that v_cndmask gives it, and no other."""
    code = codegen.as_sass(AMD)
    assert codegen.loads_by_loop(code, 16) == {("read", False): 2, ("write", True): 1}
    assert codegen.loads_by_loop(code, 2) == {("read", False): 1}
    assert codegen.widest(code, "STG") == 16


@pytest.mark.codegen
@pytest.mark.parametrize("chip", [codegen.CHIPS[1], codegen.CHIPS[-1]], ids=lambda chip: chip.name)
def test_codegen_reads_every_kernel_and_loop(chip):
    pytest.importorskip("triton", reason="triton is not installed")
    rows = codegen.rows_of(chip, torch.float32)
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
        needed = chip.tb_per_s * 1e12 * 650e-9 / chip.multiprocessors
        assert row.get("bytes_needed") == round(needed)
        assert row.get("bytes_needed_busy") == round(needed * 1000 / 650)
