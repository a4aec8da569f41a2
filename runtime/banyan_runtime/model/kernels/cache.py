"""Weights that are brought into a GPU's cache before they are asked for, while memory would be idle. Hints: they change no number.

Of compute capability 9.0 on, which is where kernels begin before others end.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PIECE: tl.constexpr = tl.constexpr("""
    {
        .reg .pred first; .reg .u32 thread;
        mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
    }
""")
_LINE: tl.constexpr = tl.constexpr("""
    {
        prefetch.global.L2 [$1];
        mov.u32 $0, 0;
    }
""")
LINE_BITS: tl.constexpr = tl.constexpr(1024)


@triton.jit
def piece(pointer, count):
    """Elements, in one instruction of one thread: 16 bytes aligned, and as many times 16 bytes."""
    tl.inline_asm_elementwise(
        _PIECE, "=r,l,r", [pointer.to(tl.int64), count * (pointer.dtype.element_ty.primitive_bitwidth // 8)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def lines(pointers):
    """The line that each of them lies in."""
    tl.inline_asm_elementwise(_LINE, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
