"""Copy or compute: what is quicker for pages in host memory."""

from __future__ import annotations

from worker.core.cache.host import HostPool
from worker.core.cache.lease import Match
from worker.core.request import Request
from worker.core.step_forecast import StepForecast
from worker.wire.host_cache import HostCachePolicy

_WEIGHT = 0.2
"""Of the newest copies in the estimate of their time."""
_FORGETTING = 0.999
"""Part of the estimate that remains after a step without copies: where copying once took long, it
is tried again hundreds of steps later."""


class HostLoadPolicy:
    """Prices copies from host memory by those of late, computing by the steps of late.

    Until both are known everything is copied, which is how its time comes to be known.

    Args:
        policy: "always" asks for no price.
        page_size: tokens per page.
        host: the tier; None without one.
        forecast: prices computing.
    """

    def __init__(
        self,
        policy: HostCachePolicy,
        page_size: int,
        host: HostPool | None,
        forecast: StepForecast,
    ) -> None:
        self._always = policy == "always"
        self._page_size = page_size
        self._host = host
        self._forecast = forecast
        self._page_s: float | None = None
        """Seconds per page copied."""

    def choose(self, match: Match) -> Match:
        """The match as it is to be used: all of it, or its part on the device."""
        if not match.num_host or self._always:
            return match
        num_cached = len(match.pages) * self._page_size
        if self._part(match.num_host * self._page_size, num_cached) <= 1.0:
            return match
        return match._replace(host_node=None, num_host=0)

    def cost(self, num_tokens: int) -> int:
        """Tokens that are computed in the time in which the first so many come back, evicted."""
        if self._host is None:
            return num_tokens
        return int(num_tokens * min(1.0, self._part(num_tokens, 0)))

    def observe(self, num_pages: int, seconds: float) -> None:
        """A step copied so many pages back in that time."""
        if not num_pages:
            if self._page_s is not None:
                self._page_s *= _FORGETTING
            return
        assert self._host is not None
        self._host.note_load(seconds)
        newest = seconds / num_pages
        before = newest if self._page_s is None else self._page_s
        self._page_s = before + _WEIGHT * (newest - before)

    def note_resumed(self, request: Request, match: Match) -> None:
        """A request that was preempted comes again, with what `match` has of it."""
        if self._host is None:
            return
        size = self._page_size
        self._host.note_resumed(
            request.preemption.num_computed, len(match.pages) * size, match.num_host * size
        )

    def _part(self, num_tokens: int, num_cached: int) -> float:
        """Time to copy so many tokens' pages, in times to compute them after `num_cached`."""
        computing = self._forecast.prefill_s(num_tokens, num_cached)
        if self._page_s is None or computing is None:
            return 0.0
        copying = self._page_s * num_tokens / self._page_size
        return copying / computing if computing > 0.0 else float(copying > 0.0) * 2.0
