"""Prefix deduplication: of prompts that share a prefix one computes it, the others wait for it."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.request import Request

_LEAST_PART = 0.25
"""Least part of a request's uncached tokens that is shared for it to wait."""


class PrefixDeduplication:
    """Finds waiting requests that would compute the same tokens as a prompt under way.

    Such a request waits until that prompt has computed the shared part, which it would have to
    compute itself before anything else. So it loses little, and all others gain. It does not wait
    for a prompt of lower priority, which may be left out of steps for more urgent ones. Priorities
    are compared without what deadlines add, since that comes to equal requests one after the other.

    Args:
        page_size: tokens per page.
        least_tokens: least number of shared uncached tokens for which a request waits.
    """

    def __init__(self, page_size: int, least_tokens: int) -> None:
        self._page_size = page_size
        self._least_tokens = least_tokens
        self._under_way: list[Request] = []

    def begin_round(self, running: Iterable[Request]) -> None:
        """Collects the running requests with full pages of known tokens that are not cached yet."""
        size = self._page_size
        self._under_way = [
            request
            for request in running
            if (lease := request.lease) is not None
            and lease.node is not None
            and request.num_prefill >= (lease.num_cached_pages + 1) * size
        ]

    def add(self, request: Request) -> None:
        """Adds a request that has just been admitted."""
        if request.lease is not None and request.lease.node is not None:
            self._under_way.append(request)

    def is_being_computed(self, request: Request) -> bool:
        """Whether a prompt under way is about to compute a good part of `request`'s tokens."""
        cached = len(request.token_ids) - request.queue_entry.num_uncached
        least = max(self._least_tokens, int(_LEAST_PART * request.queue_entry.num_uncached))
        end = cached + -(-least // self._page_size) * self._page_size
        if not self._under_way or end >= len(request.token_ids):
            return False
        if request.wants_prompt_logprobs:
            return False
        wanted = request.token_ids[:end]
        for other in self._under_way:
            lease = other.lease
            if (
                lease is not None
                and other.priority >= request.priority
                and other.num_prefill >= end
                and lease.num_cached_pages * self._page_size < end
                and other.cache_salt == request.cache_salt
                and other.token_ids[:end] == wanted
            ):
                return True
        return False
