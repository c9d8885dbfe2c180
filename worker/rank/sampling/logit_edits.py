"""Edits of single rows of logits: allowed tokens, bad words, tokens that come too early, biases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.plan.plan import TokenRules
from worker.rank.transfer import to_device

_ANY = -1
"""Stands before a bad word that is shorter than others: it equals every token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEdit:
    """What one step edits in one row of the logits."""

    row: int
    edits: SlotEdits
    cell: int
    """Where the new token will stand in the flat token pool."""
    num_output: int
    """Tokens generated before it."""


class SlotEdits:
    """One slot's edits, on the device from its admission on.

    Token ids beyond the vocabulary are left out: no draw could yield them.
    """

    def __init__(self, rules: TokenRules, vocab_size: int, device: torch.device) -> None:
        self._min_tokens = rules.min_tokens
        self._allowed = _ids(rules.allowed_token_ids, vocab_size, device)
        self._stops = _ids(rules.stop_token_ids, vocab_size, device)
        words = [word for word in rules.bad_words if word[-1] < vocab_size]
        self._bad_tokens = _ids([w[0] for w in words if len(w) == 1], vocab_size, device)
        self._phrases = _Phrases.of([word for word in words if len(word) > 1], device)
        self._biased = _ids(rules.bias_token_ids, vocab_size, device)
        if self._biased is not None:
            kept = zip(rules.bias_token_ids, rules.biases, strict=True)
            biases = torch.tensor([bias for token, bias in kept if token < vocab_size])
            self._biases = to_device(biases.float(), device)

    @property
    def is_empty(self) -> bool:
        """Whether no step edits anything."""
        edits = (self._allowed, self._stops, self._bad_tokens, self._phrases, self._biased)
        return all(edit is None for edit in edits)

    def apply(self, logits: torch.Tensor, step: RowEdit, flat_tokens: torch.Tensor) -> None:
        """Edits the row in place, in vLLM's order."""
        row = logits[step.row]
        if self._allowed is not None:
            kept = row.index_select(0, self._allowed)
            row.fill_(-math.inf).index_copy_(0, self._allowed, kept)
        if self._bad_tokens is not None:
            row.index_fill_(0, self._bad_tokens, -math.inf)
        if self._phrases is not None:
            self._phrases.apply(row, flat_tokens, step)
        if self._stops is not None and step.num_output < self._min_tokens:
            row.index_fill_(0, self._stops, -math.inf)
        if self._biased is not None:
            row.index_add_(0, self._biased, self._biases)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phrases:
    """Bad words of several tokens: their last tokens [w], and what stands before, [w, longest]."""

    last: torch.Tensor
    before: torch.Tensor
    """Aligned at the end, filled up with _ANY."""

    @staticmethod
    def of(words: Sequence[Sequence[int]], device: torch.device) -> _Phrases | None:
        if not words:
            return None
        longest = max(map(len, words)) - 1
        before = [[_ANY] * (longest + 1 - len(word)) + list(word[:-1]) for word in words]
        return _Phrases(
            last=to_device(torch.tensor([word[-1] for word in words]), device),
            before=to_device(torch.tensor(before, dtype=torch.int32), device),
        )

    def apply(self, row: torch.Tensor, flat_tokens: torch.Tensor, step: RowEdit) -> None:
        # Only output counts: a bad word that begins in the prompt is none.
        length = min(self.before.shape[1], step.num_output)
        cut = self.before.shape[1] - length
        latest = flat_tokens[step.cell - length : step.cell]
        fits = (self.before[:, cut:] == latest) | (self.before[:, cut:] == _ANY)
        completes = fits.all(dim=-1) & (self.before[:, :cut] == _ANY).all(dim=-1)
        row.index_add_(0, self.last, torch.where(completes, -math.inf, 0.0))


def _ids(token_ids: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor | None:
    known = [token_id for token_id in token_ids if token_id < vocab_size]
    return to_device(torch.tensor(known), device) if known else None
