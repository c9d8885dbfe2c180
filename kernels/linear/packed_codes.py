"""Layout of quantized weights on CUDA, created once when weights are loaded.

Weights are cut into tiles of 64 output by 128 input features, each of which a matmul program copies
with loads of 16 bytes per thread. Codes are stored in 32-bit words, in an order from which two
adjacent features are decoded to a pair of bfloat16 by one shift and a mask:

    4 bits   feature 2 i in bits 4 i to 4 i + 3 of a word; feature 2 i + 1 is 16 bits higher
    8 bits   features 0, 2, 1 and 3 in bytes 0 to 3

Tiles are contiguous in memory. In FP8, rows of the weight are contiguous instead, so that cuBLASLt
reads the same words as a matrix [N, K] of FP8. Since a matmul sums over all features, the order
within each group of four only has to match that of the inputs (`quantize_fp8`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from kernels.linear.base import HALF_BYTES, BlockScales, WeightCode
from kernels.tiles import cdiv

TILE_COLUMNS = 64
"""Number of output features per tile."""
TILE_DEPTH = 128
"""Number of input features per tile."""
_LEAST_GROUP = 16
"""Minimum number of input features that share a scale: the depth of a tensor-core instruction."""
_BYTES_AT_ONCE = 1 << 28
"""Maximum size, in bytes, of the codes of experts that are packed at a time, which limits temporary
memory."""

PackedCode = Literal["e4m3", "e2m1", "uint4", "int8"]
"""Storage formats of packed codes. Decoded 4-bit integers are too large by 128, which `offset`
corrects."""
_KINDS: Mapping[WeightCode, tuple[PackedCode, float]] = {
    "e4m3": ("e4m3", 0.0),
    "e2m1": ("e2m1", 0.0),
    "int8": ("int8", 0.0),
    "uint8": ("int8", -128.0),
    "uint8b128": ("int8", 0.0),
    "uint4": ("uint4", 128.0),
    "uint4b8": ("uint4", 136.0),
}
"""Format of packed codes and offset of decoded values, keyed by the format of the unpacked codes.
"""


class PackedCodes(NamedTuple):
    """A quantized weight [..., N, K] in tiles: (decoded - offset) * scale is the value."""

    words: torch.Tensor
    """int32 [..., N tiles, K tiles, 64, 128 / codes per word]: codes; [..., N, K / 4] for e4m3,
    padded to whole tiles."""
    scales: torch.Tensor
    """[..., N tiles, groups / inner, 64, inner]: scale of each group of input features, where
    `inner` is the number of groups per tile, or 1. fp32, or bf16 if groups are smaller than
    tiles and inputs have 16 bits."""
    zeros: torch.Tensor | None
    """bf16, shaped like `scales`: offsets of decoded values; None if all offsets equal `offset`."""
    code: PackedCode
    """Storage format of the codes."""
    offset: float
    """Offset of decoded values if there are no `zeros`."""
    group: int
    """Number of input features per group; 0 if all share a scale."""
    shape: tuple[int, int]
    """N and K without padding."""
    shared_rows: int
    """Number of adjacent output features that share their scales, starting with the first one."""


def pack_codes(
    codes: torch.Tensor, scaling: BlockScales, *, dtype: torch.dtype
) -> PackedCodes | None:
    """Packs a quantized weight; None if fewer than 16 adjacent features share a scale.

    Args:
        codes: uint8 [..., N, K] or [..., N, K / 2], as in `dequantize`.
        scaling: scales and zero points of the codes.
        dtype: data type of the inputs.
    """
    code, offset = _KINDS[scaling.code]
    depth = codes.shape[-1] * (2 if scaling.code in HALF_BYTES else 1)
    group = _group(scaling, depth)
    if group is None:
        return None
    is_narrow = dtype.itemsize == 2 and 0 < group < TILE_DEPTH
    scales = _tile_groups(scaling.scales, scaling, group, depth)
    zeros = scaling.zeros
    if zeros is not None:
        zeros = _tile_groups(zeros.float() + offset, scaling, group, depth).bfloat16()
    return PackedCodes(
        words=_tile_all_codes(codes, scaling.code),
        scales=scales.bfloat16() if is_narrow else scales,
        zeros=zeros,
        code=code,
        offset=offset,
        group=group,
        shape=(codes.shape[-2], depth),
        shared_rows=scaling.rows,
    )


def _group(scaling: BlockScales, depth: int) -> int | None:
    """Number of features per group, such that groups are aligned with tiles; 0 if all features form
    one group, None if groups would be too small."""
    if scaling.offset + depth <= scaling.block:
        return 0
    shared = math.gcd(scaling.block, scaling.offset)
    if shared % TILE_DEPTH == 0:
        return shared
    power = shared & -shared
    return power if power >= _LEAST_GROUP else None


def _tile_groups(
    values: torch.Tensor, scaling: BlockScales, group: int, depth: int
) -> torch.Tensor:
    """Converts values per block [..., N, blocks] to values per group, in tiles; see
    `PackedCodes.scales`."""
    padded = cdiv(depth, TILE_DEPTH) * TILE_DEPTH
    starts = torch.arange(0, padded, group or padded, device=values.device).clamp_(max=depth - 1)
    values = values.index_select(-1, starts.add_(scaling.offset) // scaling.block)
    inner = TILE_DEPTH // group if 0 < group < TILE_DEPTH else 1
    rows = _tile_rows(values)
    return _in_order(rows.reshape(*rows.shape[:-1], -1, inner).transpose(-3, -2))


def _tile_rows(values: torch.Tensor) -> torch.Tensor:
    """Reshapes [..., N, n] to [..., N tiles, 64, n], padded with zeros."""
    missing = -values.shape[-2] % TILE_COLUMNS
    if missing:
        values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    return values.reshape(*values.shape[:-2], -1, TILE_COLUMNS, values.shape[-1])


def _tile_all_codes(codes: torch.Tensor, code: WeightCode) -> torch.Tensor:
    """Words of codes [..., N, bytes] in tiles; converts a few experts at a time."""
    if codes.ndim == 2:
        return _tile_codes(codes, code)
    count = max(1, _BYTES_AT_ONCE // codes[0].numel())
    return torch.cat([_tile_codes(some, code) for some in codes.split(count)])


def _tile_codes(codes: torch.Tensor, code: WeightCode) -> torch.Tensor:
    step = TILE_DEPTH // 2 if code in HALF_BYTES else TILE_DEPTH
    missing = -codes.shape[-1] % step
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    quads = codes.reshape(*codes.shape[:-1], -1, 4)
    if code in HALF_BYTES:
        even, odd = quads[..., 0::2], quads[..., 1::2]
        quads = torch.cat((even & 15 | odd << 4, even >> 4 | odd & 0xF0), dim=-1)
    else:
        quads = torch.cat((quads[..., 0::2], quads[..., 1::2]), dim=-1)
        if code in ("uint8", "uint8b128"):
            quads ^= 0x80  # to signed integers
    rows = _tile_rows(quads.flatten(-2))
    if code == "e4m3":
        return _in_order(rows.flatten(-3, -2)).view(torch.int32)
    tiles = rows.reshape(*rows.shape[:-1], -1, step).transpose(-3, -2)
    return _in_order(tiles).view(torch.int32)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of `values`."""
    return values.clone(memory_format=torch.contiguous_format)
