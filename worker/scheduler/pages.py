"""How many pages requests take."""

from __future__ import annotations

from worker.request import Request


def num_still_needed(request: Request, page_size: int) -> int:
    """Pages a running request will take to compute all its known tokens and a page beyond."""
    assert request.lease is not None
    num_tokens = min(request.limit, len(request.token_ids) + page_size)
    return max(0, -(-num_tokens // page_size) - len(request.lease.pages))
