"""Frequency, presence and repetition penalties, from counts of tokens on the device."""

from __future__ import annotations

import torch

from kernels.penalties.base import PenaltyRows
from kernels.registry import op


@op
def apply_penalties_(
    logits: torch.Tensor,
    rows: PenaltyRows,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    token_pool: torch.Tensor,
) -> None:
    """Applies penalties, in place, to the logits of tokens in the requests' prompts and outputs;
    other logits are not written. The repetition penalty comes first, as in vLLM.

    Args:
        logits: fp32 [R, vocab].
        rows: penalized rows and their penalties.
        in_prompt: bool [slots, vocab]: whether each token is in the prompt.
        counts: int32 [slots, vocab]: occurrences of each token in the output, without drafts.
        token_pool: int32 [slots, positions]: prompt, output and drafts; a row's drafts count as
            output.
    """
    # Gathers the logits of each request's tokens and scatters them back, in time linear in the
    # number of tokens of all rows; Triton reads the whole vocabulary instead.
    owner = torch.repeat_interleave(rows.ends)
    firsts = rows.ends.cumsum(0) - rows.ends
    slots = rows.slots[owner]
    positions = torch.arange(len(owner), device=owner.device) - firsts[owner]
    # Repeated tokens are computed several times, with the same result.
    tokens = token_pool[slots, positions].long()
    cells, places = (slots, tokens), (rows.rows[owner], tokens)
    count = counts[cells]
    for back in range(1, rows.most_drafts + 1):
        drafts = token_pool[rows.slots, (rows.ends - back).clamp(min=0)]
        count += (tokens == drafts[owner]) & (rows.num_drafts >= back)[owner]
    in_output = count > 0
    seen = in_prompt[cells].logical_or_(in_output)
    found = logits[places]
    repetition = rows.repetition[owner]
    repeated = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(seen, repeated, found)
    found -= count * rows.frequency[owner]
    found -= in_output * rows.presence[owner]
    logits.index_put_(places, found)


@op
def count_tokens_(counts: torch.Tensor, rows: PenaltyRows, tokens: torch.Tensor) -> None:
    """Adds sampled tokens, int64 [R], of the penalized rows to `counts` [slots, vocab]."""
    sampled = tokens.index_select(0, rows.rows)
    cells = rows.slots * counts.shape[1] + sampled
    counts.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))


__all__ = ["PenaltyRows", "apply_penalties_", "count_tokens_"]
