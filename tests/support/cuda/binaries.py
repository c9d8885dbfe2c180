"""GPU resource budgets of compiled kernels, by kernel and compute capability.

When a kernel needs less, lower its row; when it needs more, give the reason.
"""

from __future__ import annotations

CAPABILITIES = (80, 89, 90, 100)
SHARED_LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Maximum shared memory per program (CUDA C++ Programming Guide, table 30)."""
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Matrix-multiply instruction for bfloat16."""
MULTIPLYING: dict[str, int] = {
    "_attention_kernel": 32,
    "_matmul_kernel": 0,
    "_multiply_kernel": 16,
    "_solve_kernel": -1,
    "_states_kernel": -1,
    "_pair_kernel": 16,
    "_solve_by_channel_kernel": -1,
    "_states_by_channel_kernel": -1,
    "_skinny_matmul_kernel": 0,
    "_packed_matmul_kernel": 0,
    "_packed_multiply_kernel": 0,
    "_fp8_multiply_kernel": 0,
    "_expanded_kernel": 0,
}
"""Kernels with matmuls, and the maximum number of tile rows for which mma.sync suffices. It
suffices for single queries and for heads of 512 dimensions, and is optional for experts. Chunks of
linear attention always have 64 rows."""


def product(kernel: str, tile_rows: int, capability: int) -> str:
    """Expected matrix-multiply instruction of a kernel's binary; empty if there is none."""
    if kernel not in MULTIPLYING:
        return ""
    return PRODUCTS[80 if tile_rows <= MULTIPLYING[kernel] else capability]


REGISTERS: dict[str, int] = {
    # Each thread holds part of the output, and with splits also the merged one; nothing is spilled.
    "_attention_kernel": 255,
    "_expanded_kernel": 255,
    "_matmul_kernel": 255,
    # With tiles of 64 rows before Hopper; its matmuls take the decoded weights from registers.
    "_skinny_matmul_kernel": 168,
    "_packed_matmul_kernel": 255,
    "_packed_multiply_kernel": 255,
    # Each thread holds a block's sums in addition to the total; nothing is spilled.
    "_fp8_multiply_kernel": 255,
    # Tiles of 64 rows and 128 columns by four warps.
    "_multiply_kernel": 224,
    # Square matrices of 64 rows, and their powers; nothing is spilled.
    "_solve_kernel": 255,
    # A state of 128 rows and 32 columns, and the operands of its four matmuls.
    "_states_kernel": 255,
    # Queries, keys and their decays of a block of positions, twice; nothing is spilled.
    "_pair_kernel": 255,
    "_solve_by_channel_kernel": 255,
    "_states_by_channel_kernel": 255,
    "_fade_kernel": 160,
    "_steps_by_channel_kernel": 112,
    "_steps_kernel": 128,
    "_inputs_kernel": 112,
    "_schedule_kernel": 96,
    "_penalty_kernel": 118,
    "_histogram_kernel": 102,
    "_sample_kernel": 112,
    # 4,096 candidates and their weights of 8 bytes, by eight warps.
    "_narrow_kernel": 128,
    "_search_kernel": 112,
}
"""Maximum registers per thread on any GPU; other kernels may use `OTHER_REGISTERS`."""
OTHER_REGISTERS = 80

SPILLS: dict[tuple[str, int], int] = {
    # One or two stack slots, with tiles of 128 rows in a few formats. Without them, half as many
    # programs would fit on a multiprocessor.
    ("_packed_multiply_kernel", 80): 16,
    ("_packed_multiply_kernel", 89): 8,
    # Two programs per multiprocessor were 15 % faster than one with twice the warps and no spills,
    # when it spilled 456 bytes. 216 bytes without window masks.
    ("_attention_kernel", 90): 304,
}
"""Maximum spilled bytes per thread; 0 for other kernels."""
