"""Rows of a step, and the inputs that are gathered for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """B rows of a step, and bounds of their sizes on the host."""

    slots: torch.Tensor
    """int64 [B]: slots of the rows."""
    starts: torch.Tensor
    """int64 [B]: position of each row's first token in the step."""
    query_start: torch.Tensor
    """int64 [B + 1]: offsets of the rows' tokens among all tokens."""
    num_tokens: int
    """Number of tokens of all rows."""
    longest_query: int
    """Maximum number of tokens of a row, or an upper bound."""
    num_pages: int
    """Number of leading pages of each row that the step reads."""
    page_size: int
    """Tokens per page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTensors:
    """Inputs of T tokens in B rows."""

    input_ids: torch.Tensor
    """int32 [T]: token ids."""
    positions: torch.Tensor
    """int64 [T]: positions of the tokens."""
    slot_mapping: torch.Tensor
    """int64 [T]: cell of each token in the KV cache, page * page_size + offset."""
    page_rows: torch.Tensor
    """int32 [B, pages]: rows of the page table."""
    seq_lens: torch.Tensor
    """int32 [B]: number of tokens in the cache, including the step's."""

    @classmethod
    def allocate(cls, rows: StepRows) -> Self:
        """Uninitialized tensors for a step, on the device of its rows."""
        num_rows, num_tokens, device = len(rows.slots), rows.num_tokens, rows.slots.device
        return cls(
            input_ids=torch.empty(num_tokens, dtype=torch.int32, device=device),
            positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
            page_rows=torch.empty(num_rows, rows.num_pages, dtype=torch.int32, device=device),
            seq_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
        )
