"""Token edits by slot, and the rows to which they apply."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEdits:
    """Biases and bad words of each slot, as ragged lists in rows of fixed size.

    A slot has up to B biases, and up to N words with W tokens in total. The actual numbers of
    biases and words are in `EditRows`; cells after them are undefined.
    """

    bias_tokens: torch.Tensor
    """int32 [slots, B]: biased tokens, each once per slot."""
    biases: torch.Tensor
    """fp32 [slots, B]: values to add, finite."""
    words: torch.Tensor
    """int32 [slots, W]: tokens of the slot's words, one word after another."""
    word_ends: torch.Tensor
    """int32 [slots, N]: end of each word in `words`. A word has at least two tokens; its last one
    is banned if the others are the most recently sampled ones."""


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
    """Number of output tokens before the new one; only these can match a word."""
    num_biases: torch.Tensor
    """Number of biases of the slot."""
    num_words: torch.Tensor
    """Number of words of the slot."""
    most_biases: int
    """Largest of `num_biases`."""
    most_words: int
    """Largest of `num_words`."""
