"""LoadMeter: the load of a model on this gateway, for autoscaling."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import NamedTuple

import numpy as np

from router.fleet import Fleet
from router.metrics.stats import ModelStats

WINDOW_S = 10.0
"""Time constant in seconds of the moving averages of arrival rates."""
_DELAY_WINDOW_S = 3.0
"""Time constant in seconds of the moving average of the predicted wait, which jumps with each
step."""
_BATCH = 64
"""Batch slots assumed until a worker has reported them."""
_OUTPUT = 128.0
"""Generated tokens per completion, assumed until a completion has ended."""
_MOST_WAIT_S = 3600.0
"""Maximum predicted wait in seconds in the moving average: an infinite value would never decay."""


class LoadReport(NamedTuple):
    """Load at one point in time as plain numbers, the format of Ray Serve's autoscaling metrics;
    times in seconds.

    A worker-second is one second of work of a worker with average speed.
    """

    num_ready: float = 0.0
    """Number of ready workers."""
    work: float = 0.0
    """Worker-seconds per second required by the requests that recently arrived at this gateway."""
    pending_s: float = 0.0
    """Worker-seconds required by pending requests, which are not assigned to a worker yet."""
    pending_kv: float = 0.0
    """KV cache needed by the prompts of pending requests, in units of a worker's cache."""
    waiting_s: float = 0.0
    """Worker-seconds required by the requests waiting on workers, including other gateways'
    requests."""
    queue_delay_s: float = 0.0
    """Recent average of the predicted wait in seconds on the least busy worker."""
    kv: float = 0.0
    """KV cache that is in use or needed by prompts waiting on workers, in units of a worker's
    cache."""
    num_pending: float = 0.0
    """Number of requests that are not assigned to a worker yet."""
    num_active: float = 0.0
    """Number of requests on workers."""
    num_new: float = 0.0
    """Number of completions started since the last report, including ended ones."""


class LoadMeter:
    """Measures load in worker-seconds, by the fleet's step-time model at full batches.

    A request counts at its arrival with all tokens that it is expected to generate. Counting only
    generated tokens would underestimate a saturated fleet, which cannot generate any faster.

    Args:
        stats: counters of the model.
        fleet: workers of the model.
        clock: time in seconds from an arbitrary epoch.
    """

    def __init__(self, stats: ModelStats, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._fleet = fleet
        self._clock = clock
        self._at = clock()
        self._seen = self._counts()
        self._rates = (0.0, 0.0, 0.0)
        """Rates per second: uncached prompt tokens, completions, generated tokens."""
        self._delay_s = 0.0
        self._num_new = 0.0

    def read(self) -> LoadReport:
        """The current load. Call it about once per second: rates are measured between calls."""
        self._advance()
        stats, table = self._stats, self._fleet.table
        rows = np.flatnonzero(table.eligible)
        prompt_s, token_s = self._costs()
        output = self._output()
        prompts, completions, generated = self._rates
        waiting = np.maximum(table.num_active[rows] - table.work_rows[rows], 0.0)
        pages = table.total_pages[rows]
        tokens = np.maximum(pages, 1.0) * table.page_size[rows]
        taken = (pages - table.free_pages[rows]) / np.maximum(pages, 1.0)
        taken += (table.work_tokens[rows] + table.reserved_tokens[rows]) / tokens
        cache_tokens = float(tokens.mean()) if len(rows) else np.inf
        queue_s = table.queue_s[rows] + table.reserved_s[rows]
        return LoadReport(
            num_ready=float(len(rows)),
            work=prompts * prompt_s + max(completions * output, generated) * token_s,
            pending_s=stats.pending_tokens * prompt_s + stats.pending_requests * output * token_s,
            pending_kv=stats.pending_tokens / cache_tokens,
            waiting_s=float(queue_s.sum() + waiting.sum() * output * token_s),
            queue_delay_s=self._delay_s,
            kv=float(np.clip(taken, 0.0, None).sum()),
            num_pending=float(stats.pending_requests),
            num_active=float(table.num_active[rows].sum()),
            num_new=self._num_new,
        )

    def _costs(self) -> tuple[float, float]:
        """Worker-seconds per prompt token, and per generated token in a full batch."""
        pace, table, stats = self._fleet.pace, self._fleet.table, self._stats
        rows = np.flatnonzero(table.eligible)
        info = self._fleet.info
        places = float(table.max_num_seqs[rows].mean()) if len(rows) else _BATCH
        if not len(rows) and info is not None:
            places = float(info.max_num_seqs)
        factor = float(pace.factors(table.capacity)[rows].mean()) if len(rows) else 1.0
        length = stats.prompt_length.total / max(sum(stats.prompt_length.counts), 1)
        context = places * (length + 0.5 * self._output())
        prompt_s = pace.costs.prefill(length) / length if length else pace.costs.prefill_token
        return prompt_s * factor, pace.costs.decode(places, context) / places * factor

    def _output(self) -> float:
        """Mean number of generated tokens per completion."""
        ended = self._stats.completion_tokens
        return ended.total / count if (count := sum(ended.counts)) else _OUTPUT

    def _counts(self) -> tuple[float, float, float]:
        stats = self._stats
        uncached = stats.prompt_tokens - stats.saved_tokens
        return uncached, stats.started, stats.generation_tokens

    def _advance(self) -> None:
        now = self._clock()
        passed = now - self._at
        if passed <= 0.0:
            return
        counts = self._counts()
        kept = exp(-passed / WINDOW_S)
        prompts, completions, generated = (
            kept * rate + (1.0 - kept) * max(count - before, 0.0) / passed
            for rate, count, before in zip(self._rates, counts, self._seen, strict=True)
        )
        self._rates = (prompts, completions, generated)
        self._num_new = max(counts[1] - self._seen[1], 0.0)
        kept = exp(-passed / _DELAY_WINDOW_S)
        delay_s = self._fleet.expected_wait_s() if self._fleet.ready else 0.0
        self._delay_s = kept * self._delay_s + (1.0 - kept) * min(delay_s, _MOST_WAIT_S)
        self._at, self._seen = now, counts
