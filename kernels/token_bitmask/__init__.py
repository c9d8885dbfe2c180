"""Token bitmask: sets logits of tokens that a grammar, or a request, forbids to -inf."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.token_bitmask import reference

_APPLY = registry.register(
    "apply_token_bitmask",
    reference.apply_token_bitmask,
    triton="kernels.token_bitmask.triton_kernel:apply_token_bitmask",
)


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
    _APPLY.select(logits)(logits, bitmask, rows, mask_rows)


__all__ = ["apply_token_bitmask"]
