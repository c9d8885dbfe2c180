"""Block sizes of the Triton attention kernels: plain tables, so that results never depend on
a tuning run."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionBlocks(NamedTuple):
    """Tile sizes and launch parameters of one kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


MIN_DOT_ROWS = 16
"""Fewest rows of a matrix-unit product; a group of query heads is padded to it."""

INVARIANT_SPLIT_TOKENS = 256
"""Keys per split in batch-invariant mode, whatever the batch."""

MAX_INVARIANT_PARTIALS = 4096
"""Queries x splits of one launch in batch-invariant mode, which bounds its partial outputs."""

MIN_SPLIT_TOKENS = 128
"""Otherwise: fewest keys that are worth a split of their own."""

MAX_SPLITS = 32

# (largest head_dim, whether elements have 4 bytes) -> blocks
_DECODE = {
    (64, False): AttentionBlocks(MIN_DOT_ROWS, 64, 4, 2),
    (128, False): AttentionBlocks(MIN_DOT_ROWS, 64, 4, 2),
    (256, False): AttentionBlocks(MIN_DOT_ROWS, 32, 4, 2),
    (64, True): AttentionBlocks(MIN_DOT_ROWS, 32, 4, 2),
    (128, True): AttentionBlocks(MIN_DOT_ROWS, 32, 4, 1),
    (256, True): AttentionBlocks(MIN_DOT_ROWS, 16, 4, 1),
}
_EXTEND = {
    (64, False): AttentionBlocks(128, 64, 4, 2),
    (128, False): AttentionBlocks(128, 64, 8, 2),
    (256, False): AttentionBlocks(64, 32, 8, 1),
    (64, True): AttentionBlocks(32, 32, 4, 2),
    (128, True): AttentionBlocks(32, 32, 8, 1),
    (256, True): AttentionBlocks(16, 16, 4, 1),
}

MAX_VALUE_DIM = 512
"""Dimensions of a latent vector, at most: a program holds it whole."""

# (whether of decodes, whether elements have 4 bytes) -> blocks, of (query, head) pairs
_LATENT = {
    (True, False): AttentionBlocks(MIN_DOT_ROWS, 32, 4, 2),
    (False, False): AttentionBlocks(32, 16, 4, 1),
    (True, True): AttentionBlocks(MIN_DOT_ROWS, 16, 4, 1),
    (False, True): AttentionBlocks(MIN_DOT_ROWS, 16, 4, 1),
}


def decode_blocks(head_dim: int, dtype: torch.dtype) -> AttentionBlocks:
    """Blocks of the decode kernel."""
    return _lookup(_DECODE, head_dim, dtype)


def extend_blocks(head_dim: int, dtype: torch.dtype) -> AttentionBlocks:
    """Blocks of the extend kernel."""
    return _lookup(_EXTEND, head_dim, dtype)


def latent_blocks(value_dim: int, dtype: torch.dtype, *, is_decode: bool) -> AttentionBlocks:
    """Blocks of the kernel that attends to latents of so many dimensions."""
    assert value_dim <= MAX_VALUE_DIM, f"no Triton attention to latents of {value_dim} dimensions"
    return _LATENT[is_decode, dtype.itemsize == 4]


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products stay fp32 (not TF32); for narrower types the setting has no effect."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _lookup(
    table: dict[tuple[int, bool], AttentionBlocks], head_dim: int, dtype: torch.dtype
) -> AttentionBlocks:
    for (limit, wide), blocks in table.items():
        if head_dim <= limit and wide == (dtype.itemsize == 4):
            return blocks
    raise ValueError(f"no Triton attention for head_dim {head_dim} (at most 256), {dtype}")
