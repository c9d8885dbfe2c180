"""What kernels may take of a GPU once they are compiled, by kernel and compute capability.

Who makes one leaner lowers its row; who needs more says why.
"""

from __future__ import annotations

CAPABILITIES = (80, 89, 90, 100)
SHARED_LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may take (CUDA C++ guide, table 30)."""
OLD_PRODUCT, HOPPER, BLACKWELL = "mma.sync", "wgmma.mma_async", "tcgen05.mma"

PRODUCTS: dict[str, dict[int, str]] = {
    "_extend_kernel": {80: OLD_PRODUCT, 89: OLD_PRODUCT, 90: HOPPER, 100: BLACKWELL},
    "_matmul_kernel": {80: OLD_PRODUCT, 89: OLD_PRODUCT, 90: HOPPER, 100: BLACKWELL},
    "_multiply_kernel": dict.fromkeys(CAPABILITIES, OLD_PRODUCT),
    "_split_kernel": dict.fromkeys(CAPABILITIES, OLD_PRODUCT),
}
"""Instruction that multiplies matrices in bfloat16. Tiles of 16 rows are too small for wgmma: the
rows of decodes are, those of experts need not be."""

REGISTERS: dict[str, int] = {
    "_extend_kernel": 255,
    "_matmul_kernel": 255,
    "_multiply_kernel": 64,
    "_split_kernel": 112,
    "_penalty_kernel": 118,
    "_histogram_kernel": 102,
    "_draw_kernel": 97,
    "_collect_kernel": 95,
}
"""Most of a thread, on any GPU; of kernels that are not here, `OTHER_REGISTERS`."""
OTHER_REGISTERS = 80

SPILLS: dict[tuple[str, int], int] = {
    ("_extend_kernel", 80): 48,  # tiles of 128 queries times heads of 128 leave no register
    ("_extend_kernel", 89): 72,
    ("_extend_kernel", 100): 16,  # heads of 256 with a cap
    ("_search_kernel", 100): 16,  # a bisection of 4 warps, once per row
}
"""Bytes of a thread that registers do not hold; of others none."""
