"""The rows of a step, and the tensors that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """The B rows of a step, and what the host knows of their sizes."""

    slots: torch.Tensor
    """[B] int64."""
    starts: torch.Tensor
    """[B] int64: the position of each row's first token of the step."""
    query_start: torch.Tensor
    """[B + 1] int64: running sums of the rows' tokens."""
    num_tokens: int
    """The last of these sums."""
    longest_query: int
    """The most tokens of a row."""
    num_pages: int
    """Leading pages of each row that the step reads."""
    page_size: int
    """Tokens of a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTensors:
    """Inputs of T tokens in B rows."""

    input_ids: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int64."""
    slot_mapping: torch.Tensor
    """[T] int64: page * page_size + offset of each token."""
    page_rows: torch.Tensor
    """[B, pages] int32: the rows of the page table."""
    seq_lens: torch.Tensor
    """[B] int32: tokens in the cache, the step's included."""

    @classmethod
    def allocate(cls, num_rows: int, num_tokens: int, num_pages: int, device: torch.device) -> Self:
        """Room for a step, without content."""
        return cls(
            input_ids=torch.empty(num_tokens, dtype=torch.int32, device=device),
            positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
            page_rows=torch.empty(num_rows, num_pages, dtype=torch.int32, device=device),
            seq_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
        )
