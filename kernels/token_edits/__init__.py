"""Token edits: logit biases, and bans of tokens that would complete bad words, for all rows of a
step in one launch."""

from __future__ import annotations

import torch

from kernels.registry import op
from kernels.token_edits.base import EditRows, TokenEdits


@op
def apply_token_edits_(
    logits: torch.Tensor, edits: TokenEdits, rows: EditRows, token_pool: torch.Tensor
) -> None:
    """Adds the values of all edits that apply to fp32 logits [R, vocab], in place.

    Several values for one token may be added in any order, since all but one are -inf. The work
    depends on the edits that the rows have, not on the maximum that a slot can hold.

    Args:
        logits: fp32 [R, vocab]: logits to edit.
        edits: edits of all slots.
        rows: edited rows.
        token_pool: int32 [slots, positions]: tokens of all requests.
    """
    if rows.most_biases:
        owner, number = _lists(rows.num_biases)
        cells = rows.slots[owner] * edits.biases.shape[1] + number
        tokens = edits.bias_tokens.view(-1)[cells].long()
        values = edits.biases.view(-1)[cells]
        logits.index_put_((rows.rows[owner], tokens), values, accumulate=True)
    if rows.most_words:
        _ban(logits, edits, rows, token_pool)


def _ban(logits: torch.Tensor, edits: TokenEdits, rows: EditRows, token_pool: torch.Tensor) -> None:
    """Bans the last tokens of words whose other tokens are the most recently sampled ones."""
    owner, number = _lists(rows.num_words)
    cells = rows.slots[owner] * edits.word_ends.shape[1] + number
    word_ends = edits.word_ends.view(-1)
    ends = word_ends[cells].long()
    starts = torch.where(number > 0, word_ends[(cells - 1).clamp(min=0)].long(), 0)
    num_before = ends - starts - 1
    possible = num_before <= rows.num_output[owner]
    owner, starts, num_before = owner[possible], starts[possible], num_before[possible]
    first = rows.slots[owner] * edits.words.shape[1] + starts
    word, position = _lists(num_before)
    wanted = edits.words.view(-1)[first[word] + position]
    sampled = token_pool.view(-1)[(rows.cells[owner] - num_before)[word] + position]
    num_different = torch.zeros_like(num_before).index_add_(0, word, (wanted != sampled).long())
    fits = num_different == 0
    tokens = edits.words.view(-1)[(first + num_before)[fits]].long()
    values = torch.full(tokens.shape, float("-inf"), device=logits.device)
    logits.index_put_((rows.rows[owner[fits]], tokens), values, accumulate=True)


def _lists(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All items of lists with `counts` [n] items: each item's list and its index within the
    list."""
    owner = torch.repeat_interleave(counts)
    firsts = counts.cumsum(0) - counts
    return owner, torch.arange(len(owner), device=counts.device) - firsts[owner]


__all__ = ["EditRows", "TokenEdits", "apply_token_edits_"]
