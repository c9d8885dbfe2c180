"""Token masks of one bit per token: what a grammar, or a request, leaves to a draw."""

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
    """Sets logits [S, vocab] to -inf, in place, where the bit of the token is 0.

    Args:
        logits: rows side by side.
        bitmask: int32 [M, ceil(vocab / 32)]; token t is bit t % 32 of word t // 32, the layout
            of xgrammar and llguidance.
        rows: int64 [M], the row of the logits that each row of the mask is for; None where M is
            S, for all rows in order.
        mask_rows: int64, rows of the bitmask that stand for its own, one for each of `rows`.
    """
    _APPLY.select(logits)(logits, bitmask, rows, mask_rows)


__all__ = ["apply_token_bitmask"]
