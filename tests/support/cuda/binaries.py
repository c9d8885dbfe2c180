"""What kernels may take of a GPU once they are compiled, by kernel and compute capability.

Who makes one leaner lowers its row; who needs more says why.
"""

from __future__ import annotations

CAPABILITIES = (80, 89, 90, 100)
SHARED_LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may take (CUDA C++ guide, table 30)."""
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Instruction that multiplies matrices in bfloat16."""
MULTIPLYING: dict[str, int] = {
    "_attention_kernel": 32,
    "_matmul_kernel": 0,
    "_multiply_kernel": 16,
}
"""Kernels with products; and tiles of how many rows are too small for more than mma.sync: those of
single queries are, those of heads of 512 dimensions, and those of experts need not be."""


def product(kernel: str, tile_rows: int, capability: int) -> str:
    """Instruction by which a kernel's binary is to multiply; empty where by none."""
    if kernel not in MULTIPLYING:
        return ""
    return PRODUCTS[80 if tile_rows <= MULTIPLYING[kernel] else capability]


REGISTERS: dict[str, int] = {
    # Each thread holds a part of the output, and with splits the merged one; nothing is spilt.
    "_attention_kernel": 255,
    "_matmul_kernel": 255,
    # Tiles of 64 rows and 128 columns by four warps.
    "_multiply_kernel": 224,
    "_schedule_kernel": 96,
    "_penalty_kernel": 118,
    "_histogram_kernel": 102,
    "_sample_kernel": 97,
    "_collect_kernel": 95,
}
"""Most of a thread, on any GPU; of kernels that are not here, `OTHER_REGISTERS`."""
OTHER_REGISTERS = 80

SPILLS: dict[tuple[str, int], int] = {
    ("_search_kernel", 100): 16,  # a bisection of 4 warps, once per row
    ("_multiply_kernel", 89): 8,  # one slot of the stack, in one of 60 variants
    # Two programs a multiprocessor: measured 15 % quicker than one of twice the warps, without any.
    # Of those that mask by a window, too.
    ("_attention_kernel", 90): 560,
}
"""Bytes of a thread that registers do not hold; of others none."""
