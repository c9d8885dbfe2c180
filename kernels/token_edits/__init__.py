"""Token edits: logit biases, and bans of tokens that would complete bad words, for all rows of a
step in one launch."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.token_edits import reference
from kernels.token_edits.base import EditRows, TokenEdits

_APPLY = registry.register(
    "apply_token_edits_",
    reference.apply_token_edits_,
    triton="kernels.token_edits.triton_kernel:apply_token_edits_",
)


def apply_token_edits_(
    logits: torch.Tensor, edits: TokenEdits, rows: EditRows, token_pool: torch.Tensor
) -> None:
    """Adds the values of all edits that apply to fp32 logits [R, vocab], in place.

    Several values for one token may be added in any order, since all but one are -inf. The work
    follows the edits that the rows have, not the largest that a slot could hold.

    Args:
        logits: fp32 [R, vocab].
        edits: edits of all slots.
        rows: edited rows.
        token_pool: int32 [slots, positions]: tokens of all requests.
    """
    _APPLY.select(logits)(logits, edits, rows, token_pool)


__all__ = ["EditRows", "TokenEdits", "apply_token_edits_"]
