"""Tile sizes of the Triton attention kernels: constant tables, so that results do not depend on
autotuning."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton


class AttentionBlocks(NamedTuple):
    """Tile sizes and launch parameters for one kind of rows."""

    rows: int
    """Number of rows per tile: queries times the heads that share a KV head, both padded."""
    keys: int
    """Number of keys per tile."""
    warps: int
    stages: int
    least_split: int
    """Minimum number of keys of a split, a multiple of `keys`."""


_WGMMA = 90
"""Minimum compute capability (9.0, Hopper) at which warp groups issue MMA instructions (wgmma)."""
MIN_DOT_ROWS = 16
"""Minimum number of rows in a tensor-core matmul, to which groups of query heads are padded."""

INVARIANT_SPLIT_TOKENS = 256
"""Minimum number of keys per split in batch-invariant mode."""

MAX_INVARIANT_SPLITS = 32
"""Maximum number of splits of a query's keys in batch-invariant mode."""

MAX_INVARIANT_PARTIALS = 8192
"""Maximum number of (query, split) pairs of a launch in batch-invariant mode, which bounds the
partial outputs."""

# (largest head_dim, whether elements have 4 bytes) -> rows, keys, warps, stages. With three stages,
# page ids are prefetched before keys. Without wgmma (before compute capability 9.0), 64 keys of 128
# dimensions would spill registers. Measured on an H100 (8 KV heads, groups of 4): decodes take 2 to
# 9 % less time with two stages than with three. Long extends take 15 % less time with two programs
# of 4 warps, which alternate between matmuls and exponentials, than with one of 8 warps, although
# each spilled 456 bytes (now 216). A step of decodes with a chunk of 512 tokens takes 30 % less
# time with small tiles.
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
# Converted keys take registers: with 64 keys, a multiprocessor of compute capability 9.0 holds two
# programs instead of four.
_DECODE_FP8: _Sizes = {**_DECODE, (128, False): (MIN_DOT_ROWS, 32, 4, 2)}
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
"""Maximum number of rows (a row's queries times the heads that share a KV head) for which tiles are
small."""

MAX_HEAD_DIM = 512
"""Maximum head size; a program holds all dimensions of queries and keys."""

MAX_VALUE_DIM = 512
"""Maximum size of a latent vector; a program holds all its dimensions."""

# (whether rows are decodes, whether elements have 4 bytes) -> blocks of (query, head) pairs
_LATENT = {
    (True, False): AttentionBlocks(MIN_DOT_ROWS, 32, 4, 2, 128),
    (False, False): AttentionBlocks(32, 16, 4, 1, 128),
    (True, True): AttentionBlocks(MIN_DOT_ROWS, 16, 4, 1, 128),
    (False, True): AttentionBlocks(MIN_DOT_ROWS, 16, 4, 1, 128),
}
# whether rows are decodes -> blocks for FP8 caches, which would spill registers with fewer warps
_LATENT_FP8 = {
    True: AttentionBlocks(MIN_DOT_ROWS, 32, 8, 2, 128),
    False: AttentionBlocks(32, 16, 8, 1, 128),
}


def decode_blocks(
    head_dim: int, dtype: torch.dtype, group: int, *, is_fp8: bool
) -> AttentionBlocks:
    """Tile sizes for decodes: each tile has one query.

    Args:
        head_dim: dimensions of queries and keys.
        dtype: data type of queries, and of keys unless they are FP8.
        group: number of query heads that share a KV head, padded to a power of 2.
        is_fp8: whether the cache is FP8.
    """
    table = _DECODE_WGMMA if compute_capability() >= _WGMMA else _DECODE
    table = _DECODE_FP8 if is_fp8 else table
    return _find(table, head_dim, dtype, group, 128)


def extend_blocks(
    head_dim: int, dtype: torch.dtype, group: int, mean_queries: float
) -> AttentionBlocks:
    """Tile sizes for extends: tiles of several queries of one row.

    Args:
        head_dim: dimensions of queries and keys.
        dtype: data type of queries and keys.
        group: number of query heads that share a KV head, padded to a power of 2.
        mean_queries: mean number of queries per row; decodes that are batched with a prompt would
            leave most of a large tile empty.
    """
    rows, generation = mean_queries * group, compute_capability()
    if generation // 10 == _WGMMA // 10:
        table = _SHORT_HOPPER if rows <= _SHORT_ROWS_HOPPER else _LONG_HOPPER
    elif generation > _WGMMA:
        table = _SHORT_WGMMA if rows <= _SHORT_ROWS else _LONG_WGMMA
    else:
        table = _SHORT if rows <= _SHORT_ROWS else _LONG
    return _find(table, head_dim, dtype, group, 256)


def latent_blocks(
    value_dim: int, dtype: torch.dtype, *, is_decode: bool, is_fp8: bool
) -> AttentionBlocks:
    """Tile sizes of the kernel for latents of `value_dim` dimensions.

    Args:
        value_dim: dimensions of values.
        dtype: data type of queries.
        is_decode: whether rows are decodes.
        is_fp8: whether the cache is FP8.
    """
    assert value_dim <= MAX_VALUE_DIM, f"no Triton attention to latents of {value_dim} dimensions"
    if is_fp8 and dtype.itemsize == 2:
        return _LATENT_FP8[is_decode]
    return _LATENT[is_decode, dtype.itemsize == 4]


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of `tl.dot`: fp32 matmuls do not use TF32; narrower types are not affected."""
    return "ieee" if dtype == torch.float32 else "tf32"


def compute_capability() -> int:
    """Compute capability of the current device as an integer, such as 90 for 9.0; 0 if there is no
    device (in Triton's interpreter)."""
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
