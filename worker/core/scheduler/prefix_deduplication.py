"""Prompts that share a prefix: one computes it, the others come when it is cached."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.request import Request

_LEAST_PART = 0.25
"""Of what a request has to compute, for which it waits."""


class PrefixDeduplication:
    """Knows which prompts are under way, and who would compute the same beside them.

    Such a request waits while the prompt makes its way through the part that they share, which it
    would have to compute itself before anything else. So it loses little, and all others gain. For
    one of lower priority nobody waits: that may be left out of steps for more urgent ones. What
    deadlines add to a level makes no difference here: equals rise one after the other.

    Args:
        page_size: tokens per page.
        least_tokens: to share beyond what is cached; for less nobody waits.
    """

    def __init__(self, page_size: int, least_tokens: int) -> None:
        self._page_size = page_size
        self._least_tokens = least_tokens
        self._under_way: list[Request] = []

    def begin_round(self, running: Iterable[Request]) -> None:
        """Looks for prompts with full pages that are not cached yet."""
        size = self._page_size
        self._under_way = [
            request
            for request in running
            if (lease := request.lease) is not None
            and lease.node is not None
            and request.num_prefill >= (lease.num_cached_pages + 1) * size
        ]

    def add(self, request: Request) -> None:
        """A request has just been admitted."""
        if request.lease is not None and request.lease.node is not None:
            self._under_way.append(request)

    def is_being_computed(self, request: Request) -> bool:
        """Whether a prompt under way is about to compute much of what `request` would."""
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
