"""How loops are read from assembly, on texts that are written by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from grpo_kernels.backends.triton import sass

# Two loops one after the other, every access of the second under a predicate, and what is around them.
NVIDIA_TEXT = """
.text.kernel:
        /*0000*/                   LDG.E R3, desc[UR14][R6.64] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR14][R14.64] ;
        /*0020*/                   LDG.E.64 R8, desc[UR14][R14.64+0x800] ;
        /*0030*/                   MUFU.EX2 R6, R6 ;
        /*0040*/                   SHFL.BFLY PT, R9, R0, 0x10, 0x1f ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/               @P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0080*/               @P5 LDG.E.U16 R23, desc[UR14][R14.64] ;
        /*0090*/              @!P5 STG.E.U16 desc[UR14][R14.64], R23 ;
        /*00a0*/                   BRA.U UP0, `(.L_x_2) ;
.L_x_3:
        /*00b0*/                   STG.E desc[UR14][R2.64], R3 ;
        /*00c0*/                   EXIT ;
.L_x_4:
        /*00d0*/                   BRA `(.L_x_4) ;
"""
# A loop around two others, the second with addresses that a mask chooses; a jump back that is no loop; and a loop whose
# end stands before its header.
AMD_TEXT = """
.LBB0_1:                                ; =>This Loop Header: Depth=1
                                        ;     Child Loop BB0_2 Depth 2
	s_load_dword s61, s[4:5], 0x0
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	global_load_dwordx4 v[14:17], v[8:9], off
	v_exp_f32_e32 v1, v14
	v_mov_b32_dpp v3, v7 row_shr:8 row_mask:0xf
	s_barrier
	buffer_store_dwordx2 v[14:15], v11, s[4:7], 0 offen
	s_cbranch_scc1 .LBB0_2
.LBB0_3:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	v_cndmask_b32_e64 v32, v22, v32, s[6:7]
	buffer_load_ushort v33, v32, s[52:55], 0 offen
	s_cbranch_vccnz .LBB0_3
	s_branch .LBB0_1
.LBB0_4:
	global_load_dword v2, v3, s[2:3]
	s_branch .LBB0_4
.LBB0_5:                                ;   in Loop: Header=BB0_6 Depth=1
	s_cbranch_scc0 .LBB0_7
.LBB0_6:                                ; =>This Inner Loop Header: Depth=1
	global_load_dwordx4 v[14:17], v[8:9], off
	s_cbranch_execz .LBB0_5
	v_exp_f32_e32 v1, v14
	s_branch .LBB0_5
.LBB0_7:
	s_endpgm
"""


def test_loops_of_nvidia_assembly() -> None:
    assert list(sass.loops(NVIDIA_TEXT, sass.SASS, itemsize=2)) == [
        sass.Loop(False, 6, (128, 64), (), 1, 1, 1, 2),
        sass.Loop(True, 3, (16,), (16,), 0, 0, 0, 2),
    ]


def test_loops_of_amd_assembly() -> None:
    assert list(sass.loops(AMD_TEXT, sass.GCN, itemsize=2)) == [
        sass.Loop(False, 6, (128,), (64,), 1, 1, 1, 2),
        sass.Loop(True, 3, (16,), (), 0, 0, 0, 2),
        sass.Loop(False, 5, (128,), (), 1, 0, 0, 2),
    ]


def test_the_bulk_of_a_kernel_is_without_masks_where_such_a_loop_is() -> None:
    sweep, tail = sass.Loop(False, 9, (128,), (), 0, 0, 0, 2), sass.Loop(True, 9, (16,), (), 0, 0, 0, 2)
    zeros, masked = sass.Loop(False, 3, (), (128,), 0, 0, 0, 2), sass.Loop(True, 9, (128,), (128,), 0, 0, 0, 2)
    reading = sass.Reading("kernel", 32, 0, 0, 0, 128, 1.0, (sweep, tail, zeros, masked))
    assert reading.bulk == [sweep, zeros, masked]
    assert reading.main_loops(reads=True, writes=True) == [masked]
    assert (zeros.elements, masked.elements, masked.bytes_per_element) == (8, 8, 4.0)
