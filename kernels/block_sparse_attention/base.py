"""Blocks of tokens that queries select, per KV head."""

from __future__ import annotations

from typing import NamedTuple

import torch


class BlockSelection(NamedTuple):
    """Tokens that N queries attend to, per KV head: whole blocks, the last of which is the query's
    own and ends after it."""

    runs: torch.Tensor
    """int32 [N, H, C]: first cells page * page_size + offset of runs of tokens, in the order of
    their positions, then -1 if fewer are visible."""
    hidden: torch.Tensor
    """int64 [N]: number of tokens after the query in its own block."""
    length: int
    """Tokens per run."""
