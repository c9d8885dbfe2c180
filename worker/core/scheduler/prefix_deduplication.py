"""Prefix deduplication: requests wait for a prefix that another request is computing."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.request import Request

_MIN_FRACTION = 0.25
"""Minimum fraction of a request's uncached tokens that must be shared for the request to wait."""


class PrefixDeduplication:
    """Finds waiting requests that would compute the same tokens as a running prefill.

    Such a request waits until the shared part has been computed, which it would have to compute
    first anyway. It loses little, and all other requests gain. It does not wait for a prompt of
    lower priority, since that may be skipped in favor of more urgent ones. Priorities are compared
    without deadline boosts, which equal requests get at different times.

    Args:
        page_size: tokens per page.
        min_tokens: minimum number of shared uncached tokens for which a request waits.
    """

    def __init__(self, page_size: int, min_tokens: int) -> None:
        self._page_size = page_size
        self._min_tokens = min_tokens
        self._under_way: dict[int, Request] = {}
        """Running prefills by arrival number."""

    def begin_round(self, running: Iterable[Request]) -> None:
        """Collects the running requests that still have to compute full pages of known tokens."""
        size = self._page_size
        self._under_way = {
            request.arrival: request
            for request in running
            if (lease := request.lease) is not None
            and lease.node is not None
            and request.num_prefill >= (lease.num_cached_pages + 1) * size
        }

    def add(self, request: Request) -> None:
        """Adds a newly admitted request to the running prefills."""
        if request.lease is not None and request.lease.node is not None:
            self._under_way[request.arrival] = request

    def still_waits(self, request: Request) -> bool:
        """Whether the prefill that `request` waits for is still computing the tokens that the
        two requests share.

        Takes constant time, so that thousands of requests may wait for one long prompt.
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
        """Whether a running prefill will compute a large part of `request`'s tokens; if so, records
        that `request` waits for it."""
        if self.still_waits(request):
            return True
        cached = len(request.token_ids) - request.queue_entry.num_uncached
        min_shared = max(self._min_tokens, int(_MIN_FRACTION * request.queue_entry.num_uncached))
        end = cached + -(-min_shared // self._page_size) * self._page_size
        if not self._under_way or end >= len(request.token_ids):
            return False
        if request.needs_prompt_logprobs:
            return False
        token_ids = request.token_ids
        for other in self._under_way.values():
            lease = other.lease
            if (
                lease is not None
                and other.priority >= request.priority
                and other.num_prefill >= end
                and lease.num_cached_pages * self._page_size < end
                and other.cache_salt == request.cache_salt
                and other.token_ids[end - 1] == token_ids[end - 1]
                and other.token_ids[:end] == token_ids[:end]
            ):
                request.queue_entry.awaited = other.arrival
                request.queue_entry.awaited_until = max(
                    end - 1, self._last_wait(request, _num_shared(request, other, end))
                )
                return True
        return False

    def _last_wait(self, request: Request, shared: int) -> int:
        """Maximum number of cached tokens at which `request` still waits, given that its first
        `shared` tokens are being computed: with more, too few of its uncached tokens would be
        shared."""
        length = len(request.token_ids)
        by_part = int((shared - _MIN_FRACTION * length) / (1.0 - _MIN_FRACTION))
        return min(shared - self._min_tokens, by_part)


def _num_shared(request: Request, other: Request, equal: int) -> int:
    """Length of the common prefix of `request` and the tokens that `other` prefills, at most all
    but the last token of `request`. The first `equal` tokens must be equal."""
    mine, others = request.token_ids, other.token_ids
    low, high = equal, min(len(mine) - 1, other.num_prefill)
    if mine[low:high] == others[low:high]:
        return high
    while high - low > 1:  # equal up to low, but not up to high
        middle = (low + high) // 2
        if mine[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle
    return low
