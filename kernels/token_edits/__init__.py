"""Biases of tokens, and bans of tokens that would complete a phrase: all rows of a step at once."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.token_edits import reference
from kernels.token_edits.base import NONE, EditRows, TokenEdits

_APPLY = registry.register(
    "apply_token_edits_",
    reference.apply_token_edits_,
    triton="kernels.token_edits.triton_kernel:apply_token_edits_",
)


def apply_token_edits_(
    logits: torch.Tensor, edits: TokenEdits, rows: EditRows, token_pool: torch.Tensor
) -> None:
    """Add to fp32 logits [R, vocab], in place, what the rows' slots ask for.

    `token_pool` [slots, positions] int32 holds the tokens that were drawn. Values on one token may
    be added in any order: all but one of them are -inf.
    """
    _APPLY.select(logits)(logits, edits, rows, token_pool)


__all__ = ["NONE", "EditRows", "TokenEdits", "apply_token_edits_"]
