"""Token masks of one bit per token: what a grammar, or a request, leaves to a draw."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.token_bitmask import reference

_APPLY = registry.register(
    "apply_token_bitmask_",
    reference.apply_token_bitmask_,
    triton="kernels.token_bitmask.triton_kernel:apply_token_bitmask_",
)


def apply_token_bitmask_(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> None:
    """Set logits [R, vocab] to -inf, in place, where a token's bit is 0.

    `bitmask` is int32 [S, ceil(vocab / 32)], bit i of word w for token 32 * w + i: xgrammar's
    layout. Row i of it masks row i of the logits, or `rows[i]`; `mask_rows[i]` replaces row i of
    the bitmask. Both are int64 [n] on the logits' device. All ones leave a row as it is.
    """
    _APPLY.select(logits)(logits, bitmask, rows, mask_rows)


__all__ = ["apply_token_bitmask_"]
