"""What is measured of an op, and the op that no model's dimensions matter to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import kernels

_DRAFTS, _SHORTEST, _LONGEST = 8, 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One op on one shape."""

    op: str
    shape: str
    run: Callable[[], object]
    num_bytes: float
    """Each input read once, each output written once."""
    num_flops: float = 0.0


def ngram_case(rows: int, context: int, device: torch.device) -> Case:
    """Prompt lookup in `rows` requests of `context` tokens each."""
    pool = torch.randint(100, (rows, context), dtype=torch.int32, device=device)
    slots = torch.arange(rows, device=device)
    newest = torch.full((rows,), context - 1 - _DRAFTS, device=device)
    return Case(
        op="draft_ngrams",
        shape=f"{rows} requests, {context} tokens each",
        run=lambda: kernels.draft_ngrams(
            pool,
            slots,
            newest,
            count=_DRAFTS,
            shortest=_SHORTEST,
            longest=_LONGEST,
            num_tokens=context,
        ),
        num_bytes=4.0 * (pool.numel() + rows * _DRAFTS),
    )
