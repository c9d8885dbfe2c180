"""Triton LoRA: two launches, both over tiles of tokens with one adapter.

    shrink   tile x rank x split of the input     s = A x, a partial sum per split
    expand   tile x block of output features      out += B (sum of the splits)

Tiles are data on the device: CUDA graphs contain as many as a step of their size may need, and
programs of unused tiles exit. No tile depends on the number of tokens, so a token's result does not
depend on other tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.lora.base import TILE_TOKENS, LoraTiles, LoraWeights
from kernels.lora.reference import add_lora_
from kernels.registry import implements
from kernels.tiles import cdiv

_DEPTH = 128
"""Input features per `tl.dot`."""
_SPLIT_DEPTH = 1024
"""Input features per program: few, since a decode step has few tiles, and needs many programs to
read A, which dominates its time."""
_MOST_RANK = 64
"""Maximum rank per `tl.dot`; larger ranks are divided into blocks."""
_COLUMNS = 64
"""Output features per `tl.dot`; no block of `LoraWeights.blocks` is wider."""


@implements(add_lora_, "triton")
def launch_add_lora(
    out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, tiles: LoraTiles
) -> torch.Tensor:
    """Launches grids of (tiles, blocks of ranks, splits of the input), then (tiles, blocks of
    output features)."""
    assert out.is_contiguous(), "tokens are rows"
    assert x.is_contiguous(), "tokens are rows"
    num_tiles, (num_tokens, depth) = len(tiles.slots), x.shape
    if not num_tiles or not num_tokens:
        return out
    width, rank = weights.a.shape[1], weights.rank
    # The largest power of 2 that divides the rank, which is a multiple of 16.
    block_rank = min(rank & -rank, _MOST_RANK)
    num_splits = cdiv(depth, _SPLIT_DEPTH)
    shrunk = torch.empty(num_splits, num_tokens, width, dtype=torch.float32, device=x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    _shrink_kernel[(num_tiles, width // block_rank, num_splits)](
        x, weights.a, shrunk, tiles.slots, tiles.tokens, num_tokens,
        DEPTH=depth, WIDTH=width, SPLIT=_SPLIT_DEPTH, PRECISION=precision,
        BLOCK_T=TILE_TOKENS, BLOCK_R=block_rank, BLOCK_K=_DEPTH,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _expand_kernel[(num_tiles, len(weights.blocks))](
        out, shrunk, weights.b, weights.blocks, tiles.slots, tiles.tokens, num_tokens,
        NUM_SPLITS=num_splits, WIDTH=width, RANK=rank, OUT=out.shape[1], PRECISION=precision,
        BLOCK_T=TILE_TOKENS, BLOCK_R=block_rank, BLOCK_N=_COLUMNS,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@dependent_kernel(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_ptr", "token_ptr"]
)
def _shrink_kernel(
    x_ptr, a_ptr, shrunk_ptr, slot_ptr, token_ptr, num_tokens,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    tile = tl.program_id(0)
    slot = tl.load(slot_ptr + tile)
    if slot == 0:
        return
    token = tl.load(token_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    is_token = token >= 0
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    a_row = ((slot - 1).to(tl.int64) * WIDTH + rank) * DEPTH
    total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, DEPTH), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < DEPTH
        x = tl.load(
            x_ptr + token[:, None] * DEPTH + k[None, :],
            mask=is_token[:, None] & inside[None, :],
            other=0.0,
        )
        a = tl.load(a_ptr + a_row[None, :] + k[:, None], mask=inside[:, None], other=0.0)
        total = tl.dot(x, a, total, input_precision=PRECISION)
    row = (split * num_tokens + token) * WIDTH
    tl.store(shrunk_ptr + row[:, None] + rank[None, :], total, mask=is_token[:, None])


@dependent_kernel(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_ptr", "token_ptr"]
)
def _expand_kernel(
    out_ptr, shrunk_ptr, b_ptr, block_ptr, slot_ptr, token_ptr, num_tokens,
    NUM_SPLITS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    tile = tl.program_id(0)
    slot = tl.load(slot_ptr + tile)
    if slot == 0:
        return
    token = tl.load(token_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    is_token = token >= 0
    block = block_ptr + tl.program_id(1) * 3
    column = tl.load(block) + tl.arange(0, BLOCK_N)
    inside = column < tl.load(block + 1)
    group = tl.load(block + 2)
    b_first = (slot - 1).to(tl.int64) * RANK * OUT
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for first in tl.static_range(0, RANK, BLOCK_R):
        rank = first + tl.arange(0, BLOCK_R)
        cell = token[:, None] * WIDTH + group * RANK + rank[None, :]
        shrunk = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            shrunk += tl.load(
                shrunk_ptr + split * num_tokens.to(tl.int64) * WIDTH + cell,
                mask=is_token[:, None],
                other=0.0,
            )
        b = tl.load(
            b_ptr + b_first + rank[:, None] * OUT + column[None, :],
            mask=inside[None, :],
            other=0.0,
        )
        total = tl.dot(shrunk.to(b.dtype), b, total, input_precision=PRECISION)
    cell = token[:, None] * OUT + column[None, :]
    mask = is_token[:, None] & inside[None, :]
    before = tl.load(out_ptr + cell, mask=mask, other=0.0)
    tl.store(out_ptr + cell, (before.to(tl.float32) + total).to(before.dtype), mask=mask)
