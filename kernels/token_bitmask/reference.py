"""Torch token mask."""

from __future__ import annotations

import torch


def apply_token_bitmask_(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None,
    mask_rows: torch.Tensor | None,
) -> None:
    """Unpack the bits, then fill."""
    if mask_rows is not None:
        bitmask = bitmask.index_select(0, mask_rows)
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    bits = (bitmask.unsqueeze(-1) >> shifts).bitwise_and_(1)
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    if rows is None:
        logits[: banned.shape[0]].masked_fill_(banned, float("-inf"))
    else:
        logits.index_copy_(
            0, rows, logits.index_select(0, rows).masked_fill_(banned, float("-inf"))
        )
