"""Token bitmask: sets logits to -inf for tokens that a grammar or a request forbids."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from kernels.registry import op


@op
def apply_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    mask_rows: torch.Tensor | None = None,
) -> None:
    """Sets logits to -inf, in place, for tokens whose bit is 0.

    Args:
        logits: [S, vocab], with contiguous rows.
        bitmask: int32 [M, ceil(vocab / 32)]: token t is bit t % 32 of word t // 32, the layout of
            xgrammar and llguidance.
        rows: int64 [N]: masked rows of the logits; None for all S rows in order.
        mask_rows: int64 [N]: row of the bitmask for each masked row; None for all M rows in order.
    """
    if mask_rows is not None:
        bitmask = bitmask.index_select(0, mask_rows)
    penalty = _penalty(bitmask, logits.shape[1])
    if rows is None:
        logits.add_(penalty)
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).add_(penalty))


def _penalty(bitmask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Values to add to logits, 0 or -inf by their bits: fp32 [M, vocab]. The bytes of a word are in
    little-endian order."""
    octets = bitmask.view(torch.uint8)
    if not bitmask.is_cuda:
        # A lookup table by byte is 3 to 18 times as fast as booleans and masked_fill_, whose
        # branches depend on the mask.
        penalty = torch.from_numpy(_PENALTY_OF_BYTE.take(octets.numpy(), axis=0))
    else:
        shifts = torch.arange(8, dtype=torch.uint8, device=bitmask.device)
        is_banned = (octets.unsqueeze(-1) >> shifts).bitwise_and_(1) == 0
        penalty = torch.zeros(is_banned.shape, device=bitmask.device)
        penalty.masked_fill_(is_banned, -math.inf)
    return penalty.flatten(1)[:, :vocab_size]


def _penalties() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(0.0), np.float32(-np.inf))


_PENALTY_OF_BYTE: Final = _penalties()


__all__ = ["apply_token_bitmask"]
