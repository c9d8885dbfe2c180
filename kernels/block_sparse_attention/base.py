"""Blocks of tokens that queries select, per KV head."""

from __future__ import annotations

from typing import NamedTuple

import torch


class BlockSelection(NamedTuple):
    """Tokens to which N queries attend, per KV head: whole blocks, the last of which is the query's
    own and ends after the query."""

    runs: torch.Tensor
    """int32 [N, H, C]: first cell (page * page_size + offset) of each run of tokens, in the order
    of their positions, padded with -1 if fewer runs are visible."""
    hidden: torch.Tensor
    """int64 [N]: number of tokens after the query in its own block."""
    length: int
    """Tokens per run."""
