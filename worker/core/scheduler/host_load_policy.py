"""Policy for cached pages in host memory: whether to copy them back or recompute them."""

from __future__ import annotations

from collections import deque

from worker.core.cache.host import HostPool
from worker.core.cache.lease import Match
from worker.core.request import Request
from worker.core.step_forecast import StepForecast
from worker.protocol.host_cache import HostCachePolicy
from worker.protocol.page_groups import ONE_GROUP, PageGroups

_WEIGHT = 0.2
"""Weight of the latest copies in the moving average of copy times."""
_FORGETTING = 0.999
"""Factor by which the estimated copy time decays in each step without copies, so that copying is
retried some hundreds of steps after a slow copy."""


_SHORT_S = 0.002
"""Maximum duration of copies that a step waits for, in seconds. If copies would take longer, the
step does not wait, and the request gets its first row one or two steps later; a step takes 10 ms or
more."""


class HostLoadPolicy:
    """Compares the measured time of copies with the predicted time to recompute the same tokens.

    Until both times are known, pages are always copied, so that copies can be measured.

    Args:
        policy: "always" copies unconditionally; "auto" copies only if it is at least as fast.
        page_size: tokens per page.
        host: the host-memory tier.
        forecast: predicts the time to compute tokens.
        groups: groups of layers with separate pages.
    """

    def __init__(
        self,
        policy: HostCachePolicy,
        page_size: int,
        host: HostPool,
        forecast: StepForecast,
        groups: PageGroups = ONE_GROUP,
    ) -> None:
        self._always = policy == "always"
        self._page_size = page_size
        self._host = host
        self._forecast = forecast
        self._groups = groups
        self._page_s: float | None = None
        """Estimated seconds per copied page; None before the first copies."""
        self._launched: deque[tuple[int, int]] = deque()
        """Plans whose loads have not completed, and the number of pages of each, oldest first."""

    def pays(self, match: Match) -> bool:
        """Whether copying back the host part of a match is at least as fast as recomputing its
        tokens."""
        if self._always:
            return True
        num_alone, size = match.num_alone, self._page_size
        num_lost = (match.num_pages - num_alone) * size
        return self._part(match.num_host * size, num_lost, num_alone * size) <= 1.0

    def cost(self, num_tokens: int) -> int:
        """Cost of evicting the first `num_tokens` of a request, in tokens to compute: `num_tokens`
        or, if copying is faster, as many as could be computed while they are copied back."""
        return int(num_tokens * min(1.0, self._part(num_tokens, num_tokens, 0)))

    def is_short(self, num_pages: int) -> bool:
        """Whether copying pages back is fast enough for the step to wait for it."""
        return self._page_s is not None and self._page_s * num_pages <= _SHORT_S

    def launched(self, seq: int, num_pages: int) -> None:
        """Records that Plan `seq` copies `num_pages` pages back."""
        if num_pages:
            self._launched.append((seq, num_pages))

    def completed(self, seq: int, loading: int, seconds: float) -> None:
        """Records the loads that have completed with the result of step `seq`.

        Args:
            seq: number of the step.
            loading: first Plan whose loads have not completed; 0 if all have.
            seconds: duration of the loads that have completed.
        """
        num_pages = 0
        while self._launched and self._launched[0][0] <= seq:
            if loading and self._launched[0][0] >= loading:
                break
            num_pages += self._launched.popleft()[1]
        self.observe(num_pages, seconds)

    def observe(self, num_pages: int, seconds: float) -> None:
        """Records that `num_pages` pages were copied back in `seconds`."""
        if not num_pages:
            if self._page_s is not None:
                self._page_s *= _FORGETTING
            return
        self._host.note_load(seconds)
        newest = seconds / num_pages
        before = newest if self._page_s is None else self._page_s
        self._page_s = before + _WEIGHT * (newest - before)

    def note_resumed(self, request: Request, match: Match) -> None:
        """Counts the tokens of a preempted request that is readmitted with `match`."""
        size = self._page_size
        self._host.note_resumed(
            request.preemption.num_computed, len(match.pages) * size, match.num_host * size
        )

    def note_hit(self, match: Match) -> None:
        """Counts the tokens of a match that are copied back."""
        self._host.note_hit(match.num_host * self._page_size)

    def _part(self, num_copied: int, num_computed: int, num_cached: int) -> float:
        """Ratio of the time to copy the pages of `num_copied` tokens to the time to compute
        `num_computed` tokens after `num_cached` cached ones; 0 while either time is unknown."""
        computing = self._forecast.prefill_s(num_computed, num_cached)
        if self._page_s is None or computing is None:
            return 0.0
        copying = self._page_s * self._num_copies(num_copied)
        return copying / computing if computing > 0.0 else float(copying > 0.0) * 2.0

    def _num_copies(self, num_tokens: int) -> int:
        """Number of pages to copy for a prefix of `num_tokens`. With windows, only pages within the
        window count; with states, a snapshot is added, which is as large as several pages."""
        groups = self._groups
        num_blocks = num_tokens // self._page_size
        num_pages = groups.num_full * num_blocks + groups.snapshot_pages
        if not groups.num_window:
            return num_pages
        return num_pages + groups.num_window * min(num_blocks, -(-groups.window // self._page_size))
