"""Token edits by slot, and the rows that they apply to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NONE = -1
"""Token id of unused edits, and wildcard among the tokens before an edited one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEdits:
    """Up to E edits per slot: each adds a value to a token's logit if given tokens were drawn
    last."""

    tokens: torch.Tensor
    """int32 [slots, E]: edited tokens; NONE for unused edits. A slot has at most one edit of a
    token with a finite value."""
    values: torch.Tensor
    """fp32 [slots, E]: values to add, finite or -inf."""
    before: torch.Tensor
    """int32 [slots, E, L]: tokens that must precede the new token, aligned at the end; NONE matches
    any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EditRows:
    """Edited rows of a step's logits, int64 [n] each."""

    rows: torch.Tensor
    """Rows of the logits."""
    slots: torch.Tensor
    """Slots of the requests."""
    cells: torch.Tensor
    """Cells of the new tokens in the flat token pool."""
    num_output: torch.Tensor
    """Number of output tokens before the new one; only these can match `TokenEdits.before`."""
