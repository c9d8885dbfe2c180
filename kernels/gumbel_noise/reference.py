"""Torch Gumbel noise from a counter-based integer hash.

Row key: two 32-bit words hashed from the seed's halves and the position. Column hash: a 32-bit
multiply-xorshift finalizer over `column * WEYL + key_a`, with `key_b` mixed in halfway so that two
rows whose first keys are close do not share a shifted stream. All arithmetic wraps in int32.
"""

from __future__ import annotations

import torch

from kernels.gumbel_noise.constants import (
    LARGEST_BELOW_ONE,
    MIX_A,
    MIX_B,
    UNIT,
    WEYL,
    signed32,
)
from kernels.registry import op

# Elements of a block per thread: its buffers fit in a core's L2 cache, and torch runs a block of
# fewer elements on one thread.
_BLOCK_ELEMENTS = 1 << 15
# Minimum number of elements for which blocks are computed by all threads.
_PARALLEL_ELEMENTS = 1 << 20


@op
def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise, fp32 [B, vocab_size], for seeds [B] and positions [B], both int64.

    A pure function of (seed, position, column), independent of the batch, the step and the order of
    requests. Uses all 64 bits of a seed, and the low 32 bits of a position. Torch and Triton
    compute the same integers; the logarithms may differ in their last bits.
    """
    rows = seeds.shape[0]
    noise = torch.empty(rows, vocab_size, dtype=torch.float32, device=seeds.device)
    if rows == 0:
        return noise
    keys = _row_keys(seeds, positions)
    # Blocks of columns: scratch memory is small for any vocabulary size.
    parallel = rows * vocab_size >= _PARALLEL_ELEMENTS
    block = _BLOCK_ELEMENTS * torch.get_num_threads() if parallel else _BLOCK_ELEMENTS - 1
    width = max(1, block // rows)
    for start in range(0, vocab_size, width):
        stop = min(start + width, vocab_size)
        bits = _hash_columns(keys, start, stop)
        uniform = bits.bitwise_and_(0x7FFFFFFF).float()
        uniform.add_(0.5).mul_(UNIT).clamp_(max=LARGEST_BELOW_ONE)
        # -log1p(-u) keeps full relative precision for small u: the largest noises, which decide
        # the argmax, are not quantized as -log(u) with u near 1 would be.
        exponential = uniform.neg_().log1p_().neg_()
        torch.neg(exponential.log_(), out=noise[:, start:stop])
    return noise


def hash_bits(seeds: torch.Tensor, positions: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Hashes of columns [start, stop), from which noise is computed: int32 [B, stop - start]."""
    return _hash_columns(_row_keys(seeds, positions), start, stop)


def _hash_columns(keys: tuple[torch.Tensor, torch.Tensor], start: int, stop: int) -> torch.Tensor:
    key_a, key_b = keys
    columns = torch.arange(start, stop, dtype=torch.int32, device=key_a.device)
    bits = columns.mul_(signed32(WEYL)).unsqueeze(0) + key_a.unsqueeze(1)
    return _finalize(bits, key_b.unsqueeze(1))


def _row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # A cast from int64 to int32 keeps the low 32 bits.
    low, high, position = seeds.int(), (seeds >> 32).int(), positions.int()
    zero = torch.zeros_like(low)
    key_a = _finalize(position * signed32(WEYL) + low, high)
    key_b = _finalize(key_a + signed32(MIX_B), zero)
    key_b = _finalize(key_b.add_(high), low)
    return key_a, key_b


def _finalize(bits: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mixes int32 `bits` in place, with `key` mixed in halfway; shifts are logical."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(signed32(MIX_A))
    bits.bitwise_xor_(key)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(signed32(MIX_B))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
