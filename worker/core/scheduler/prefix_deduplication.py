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
        self._under_way: dict[int, Request] = {}
        """Prompts under way by arrival."""

    def begin_round(self, running: Iterable[Request]) -> None:
        """Collects the running requests with full pages of known tokens that are not cached yet."""
        size = self._page_size
        self._under_way = {
            request.arrival: request
            for request in running
            if (lease := request.lease) is not None
            and lease.node is not None
            and request.num_prefill >= (lease.num_cached_pages + 1) * size
        }

    def add(self, request: Request) -> None:
        """Adds a request that has just been admitted."""
        if request.lease is not None and request.lease.node is not None:
            self._under_way[request.arrival] = request

    def still_waits(self, request: Request) -> bool:
        """Whether the prompt that `request` was found to wait for is still computing their tokens.

        Takes constant time, so that thousands may wait for one long prompt.
        """
        entry = request.queue_entry
        other = self._under_way.get(entry.awaited)
        return (
            other is not None
            and other.priority >= request.priority
            and other.lease is not None
            and other.lease.num_cached_pages * self._page_size <= entry.awaited_until
        )

    def is_being_computed(self, request: Request) -> bool:
        """Whether a prompt under way is about to compute a good part of `request`'s tokens."""
        if self.still_waits(request):
            return True
        cached = len(request.token_ids) - request.queue_entry.num_uncached
        least = max(self._least_tokens, int(_LEAST_PART * request.queue_entry.num_uncached))
        end = cached + -(-least // self._page_size) * self._page_size
        if not self._under_way or end >= len(request.token_ids):
            return False
        if request.wants_prompt_logprobs:
            return False
        wanted = request.token_ids
        for other in self._under_way.values():
            lease = other.lease
            if (
                lease is not None
                and other.priority >= request.priority
                and other.num_prefill >= end
                and lease.num_cached_pages * self._page_size < end
                and other.cache_salt == request.cache_salt
                and other.token_ids[end - 1] == wanted[end - 1]
                and other.token_ids[:end] == wanted[:end]
            ):
                request.queue_entry.awaited = other.arrival
                request.queue_entry.awaited_until = max(
                    end - 1, self._last_wait(request, _num_shared(request, other, end))
                )
                return True
        return False

    def _last_wait(self, request: Request, shared: int) -> int:
        """Cached tokens up to which a good part of the uncached ones of `request` is shared, if its
        first `shared` tokens are."""
        length = len(request.token_ids)
        by_part = int((shared - _LEAST_PART * length) / (1.0 - _LEAST_PART))
        return min(shared - self._least_tokens, by_part)


def _num_shared(request: Request, other: Request, known: int) -> int:
    """Number of first tokens that are equal, of those that `other` computes as known tokens; the
    first `known` are."""
    mine, others = request.token_ids, other.token_ids
    low, high = known, min(len(mine) - 1, other.num_prefill)
    if mine[low:high] == others[low:high]:
        return high
    while high - low > 1:  # equal up to low, and not up to high
        middle = (low + high) // 2
        if mine[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle
    return low
