"""Tile sizes of the Triton attention kernels: plain tables, so that results never depend on a
tuning run."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton


class AttentionBlocks(NamedTuple):
    """Tile sizes and launch parameters of one kind of rows."""

    rows: int
    """Rows of a tile: queries times heads that share a kv head, both padded."""
    keys: int
    """Keys of one product."""
    warps: int
    stages: int
    least_split: int
    """Fewest keys that are worth a program of their own, a multiple of `keys`."""


_WGMMA = 90
"""Compute capability from which on products are of whole warp groups: Hopper's."""
MIN_DOT_ROWS = 16
"""Fewest rows of a matrix-unit product; a group of query heads is padded to it."""

INVARIANT_SPLIT_TOKENS = 256
"""Fewest keys per split in batch-invariant mode, whatever the batch."""

MAX_INVARIANT_SPLITS = 32
"""Splits of a query's keys in batch-invariant mode."""

MAX_INVARIANT_PARTIALS = 8192
"""Queries x splits of one launch in batch-invariant mode, which bounds its partial outputs."""

# (largest head_dim, whether elements have 4 bytes) -> rows, keys, warps, stages. Three stages fetch
# pages ahead of keys. Before wgmma (compute capability 9.0) 64 keys of 128 dimensions would spill.
# Measured on an H100 (8 kv heads, groups of 4): of decodes two stages take 2 to 9 % less time than
# three; of Hopper's long extends two programs of 4 warps, which take turns at products and
# exponentials, 15 % less than one of 8, though each spills 456 bytes; a step of decodes beside a
# chunk of 512 tokens 30 % less in small tiles.
_Sizes = dict[tuple[int, bool], tuple[int, int, int, int]]
_DECODE: _Sizes = {
    (128, False): (MIN_DOT_ROWS, 32, 4, 3),
    (256, False): (MIN_DOT_ROWS, 32, 4, 2),
    (512, False): (MIN_DOT_ROWS, 32, 8, 1),
    (64, True): (MIN_DOT_ROWS, 32, 4, 2),
    (128, True): (MIN_DOT_ROWS, 32, 4, 1),
    (256, True): (MIN_DOT_ROWS, 16, 4, 1),
    (512, True): (MIN_DOT_ROWS, 16, 8, 1),
}
_DECODE_WGMMA: _Sizes = {**_DECODE, (128, False): (MIN_DOT_ROWS, 64, 4, 2)}
_LONG: _Sizes = {
    (64, False): (128, 32, 4, 3),
    (128, False): (128, 32, 8, 3),
    (256, False): (64, 32, 8, 1),
    (512, False): (32, 16, 8, 1),
    (64, True): (32, 32, 4, 2),
    (128, True): (32, 32, 8, 1),
    (256, True): (16, 16, 4, 1),
    (512, True): (16, 16, 8, 1),
}
_LONG_WGMMA: _Sizes = {
    **_LONG,
    (64, False): (128, 64, 4, 3),
    (128, False): (128, 64, 8, 3),
}
_LONG_HOPPER: _Sizes = {
    **_LONG,
    (64, False): (128, 64, 8, 3),
    (128, False): (128, 64, 4, 3),
}
_SHORT: _Sizes = {**_LONG, (64, False): (64, 32, 4, 3), (128, False): (64, 32, 4, 3)}
_SHORT_WGMMA: _Sizes = {**_LONG, (64, False): (64, 64, 4, 3), (128, False): (64, 64, 4, 3)}
_SHORT_HOPPER: _Sizes = {**_SHORT_WGMMA, (128, False): (64, 64, 4, 2)}
_SHORT_ROWS, _SHORT_ROWS_HOPPER = 64, 256
"""Queries of a row times heads that share a kv head, up to which tiles are small."""

MAX_HEAD_DIM = 512
"""Dimensions of queries and keys, at most: a program holds them whole."""

MAX_VALUE_DIM = 512
"""Dimensions of a latent vector, at most: a program holds it whole."""

# (whether of decodes, whether elements have 4 bytes) -> blocks, of (query, head) pairs
_LATENT = {
    (True, False): AttentionBlocks(MIN_DOT_ROWS, 32, 4, 2, 128),
    (False, False): AttentionBlocks(32, 16, 4, 1, 128),
    (True, True): AttentionBlocks(MIN_DOT_ROWS, 16, 4, 1, 128),
    (False, True): AttentionBlocks(MIN_DOT_ROWS, 16, 4, 1, 128),
}


def decode_blocks(head_dim: int, dtype: torch.dtype, group: int) -> AttentionBlocks:
    """Tiles of one query.

    Args:
        head_dim: of queries and keys.
        dtype: of both.
        group: query heads that share a kv head, padded to a power of 2.
    """
    table = _DECODE_WGMMA if _generation() >= _WGMMA else _DECODE
    return _find(table, head_dim, dtype, group, 128)


def extend_blocks(
    head_dim: int, dtype: torch.dtype, group: int, mean_queries: float
) -> AttentionBlocks:
    """Tiles of several queries of one row.

    Args:
        head_dim: of queries and keys.
        dtype: of both.
        group: query heads that share a kv head, padded to a power of 2.
        mean_queries: of a row. Decodes beside a prompt leave most of a large tile empty.
    """
    rows, generation = mean_queries * group, _generation()
    if generation // 10 == _WGMMA // 10:
        table = _SHORT_HOPPER if rows <= _SHORT_ROWS_HOPPER else _LONG_HOPPER
    elif generation > _WGMMA:
        table = _SHORT_WGMMA if rows <= _SHORT_ROWS else _LONG_WGMMA
    else:
        table = _SHORT if rows <= _SHORT_ROWS else _LONG
    return _find(table, head_dim, dtype, group, 256)


def latent_blocks(value_dim: int, dtype: torch.dtype, *, is_decode: bool) -> AttentionBlocks:
    """Blocks of the kernel that attends to latents of so many dimensions."""
    assert value_dim <= MAX_VALUE_DIM, f"no Triton attention to latents of {value_dim} dimensions"
    return _LATENT[is_decode, dtype.itemsize == 4]


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products stay fp32 (not TF32); for narrower types the setting has no effect."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _generation() -> int:
    """Compute capability of the current device, 90 for 9.0; 0 where there is none (the
    interpreter)."""
    try:
        architecture = triton.runtime.driver.active.get_current_target().arch
    except (RuntimeError, AssertionError):  # no driver, or no library of it
        return 0
    return architecture if isinstance(architecture, int) else 0


def _find(
    table: _Sizes, head_dim: int, dtype: torch.dtype, group: int, least_split: int
) -> AttentionBlocks:
    for (limit, wide), (rows, keys, warps, stages) in table.items():
        if head_dim <= limit and wide == (dtype.itemsize == 4):
            return AttentionBlocks(max(rows, group), keys, warps, stages, least_split)
    raise AssertionError(f"no Triton attention for head_dim {head_dim}, {dtype}")
