"""Torch reference of token edits."""

from __future__ import annotations

import torch

from kernels.token_edits.base import NONE, EditRows, TokenEdits


def apply_token_edits_(
    logits: torch.Tensor, edits: TokenEdits, rows: EditRows, token_pool: torch.Tensor
) -> None:
    """Compares the tokens before each edit with the rows' latest tokens, and adds values."""
    before = edits.before.index_select(0, rows.slots)
    back = torch.arange(before.shape[2], 0, -1, device=before.device)
    drawn = back <= rows.num_output.unsqueeze(1)
    cells = (rows.cells.unsqueeze(1) - back).clamp_(min=0)
    latest = torch.where(drawn, token_pool.view(-1)[cells].long(), NONE - 1).unsqueeze(1)
    tokens = edits.tokens.index_select(0, rows.slots).long()
    fits = ((before == latest) | (before == NONE)).all(dim=-1) & (tokens != NONE)
    values = torch.where(fits, edits.values.index_select(0, rows.slots), 0.0)
    places = (rows.rows.unsqueeze(1).expand_as(tokens), tokens.clamp(min=0))
    logits.index_put_(places, values, accumulate=True)
