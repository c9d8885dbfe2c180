"""Triton Gumbel noise, from the same integers as the reference."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gumbel_noise import constants, gumbel_noise
from kernels.registry import implements
from kernels.tiles import cdiv

_BLOCK = 1024

_WEYL = tl.constexpr(constants.WEYL)
_MIX_A = tl.constexpr(constants.MIX_A)
_MIX_B = tl.constexpr(constants.MIX_B)
_UNIT = tl.constexpr(constants.UNIT)
_LARGEST_BELOW_ONE = tl.constexpr(constants.LARGEST_BELOW_ONE)


@implements(gumbel_noise, "triton")
def launch_gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Launches a grid of (rows, blocks of columns)."""
    rows = seeds.shape[0]
    noise = torch.empty(rows, vocab_size, dtype=torch.float32, device=seeds.device)
    if rows:
        grid = (rows, cdiv(vocab_size, _BLOCK))
        _gumbel_kernel[grid](seeds, positions, noise, vocab_size, BLOCK=_BLOCK)
    return noise


def hash_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Hashes from which noise is computed, int32 [B, vocab_size]; used to compare
    implementations."""
    rows = seeds.shape[0]
    bits = torch.empty(rows, vocab_size, dtype=torch.int32, device=seeds.device)
    grid = (rows, cdiv(vocab_size, _BLOCK))
    _hash_kernel[grid](seeds, positions, bits, vocab_size, BLOCK=_BLOCK)
    return bits


@dependent_kernel
def _gumbel_kernel(seed_ptr, position_ptr, noise_ptr, vocab_size, BLOCK: tl.constexpr):
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = noise_of(tl.load(seed_ptr + row), tl.load(position_ptr + row), column)
    tl.store(noise_ptr + row * vocab_size + column, noise, mask=column < vocab_size)


@triton.jit
def noise_of(seed, position, column):
    """Noise of a block of columns, fp32; for kernels that sample without storing the noise."""
    bits = _hash(seed, position, column)
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * _UNIT
    uniform = tl.minimum(uniform, _LARGEST_BELOW_ONE)
    # -log1p(-u). The device's log is approximate near 1, so small u take the series of
    # 2 * atanh(u / (2 - u)) instead.
    s = uniform / (2.0 - uniform)
    square = s * s
    series = 2.0 * s * (1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7))))
    exponential = tl.where(uniform < 0.125, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@dependent_kernel
def _hash_kernel(seed_ptr, position_ptr, bits_ptr, vocab_size, BLOCK: tl.constexpr):
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = _hash(tl.load(seed_ptr + row), tl.load(position_ptr + row), column)
    tl.store(
        bits_ptr + row * vocab_size + column,
        bits.to(tl.int32, bitcast=True),
        mask=column < vocab_size,
    )


@triton.jit
def _hash(seed, position, column):
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    zero = low * 0
    key_a = _finalize(position.to(tl.uint32) * _u32(_WEYL) + low, high)
    key_b = _finalize(key_a + _u32(_MIX_B), zero)
    key_b = _finalize(key_b + high, low)
    return _finalize(column.to(tl.uint32) * _u32(_WEYL) + key_a, key_b)


@triton.jit
def _finalize(bits, key):
    bits = (bits ^ (bits >> 16)) * _u32(_MIX_A)
    bits = bits ^ key
    bits = (bits ^ (bits >> 15)) * _u32(_MIX_B)
    return bits ^ (bits >> 16)


@triton.jit
def _u32(value: tl.constexpr):
    return tl.full((), value, tl.uint32)
