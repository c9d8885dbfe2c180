"""The load of a model at this gateway, for whoever decides how many workers there are."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import NamedTuple

import numpy as np

from router.fleet import Fleet
from router.metrics.stats import ModelStats

WINDOW_S = 10.0
"""Time after which what arrived weighs 1/e."""
_DELAY_WINDOW_S = 3.0
"""Time after which an expected wait, which jumps from step to step, weighs 1/e."""
_BATCH = 64
"""Requests of a full batch, until a worker has reported it."""
_OUTPUT = 128.0
"""Tokens of a completion, until one has ended."""
_MOST_WAIT_S = 3600.0


class LoadReport(NamedTuple):
    """One moment. All but plain numbers would be lost on the way; times are seconds."""

    num_ready: float = 0.0
    """Workers that take requests."""
    work: float = 0.0
    """A worker's time for what came to this gateway of late, per second."""
    pending_s: float = 0.0
    """A worker's time for what no worker has yet."""
    pending_kv: float = 0.0
    """KV cache for what no worker has yet, in caches of a worker."""
    waiting_s: float = 0.0
    """A worker's time for what waits at workers, whoever sent it."""
    queue_delay_s: float = 0.0
    """How long requests of late were expected to wait at the best of them."""
    kv: float = 0.0
    """Parts of their KV caches that are taken, added up, and what those need that wait there."""
    num_pending: float = 0.0
    """Requests that no worker has yet."""
    num_active: float = 0.0
    """Requests at workers."""
    num_new: float = 0.0
    """Requests that came since the report before; they may have ended since."""


class LoadMeter:
    """Weighs tokens by what they cost in full batches, as the fleet's step-time model has it.

    What arrives counts with the completion that it is expected to become, so that a fleet at its
    limit, which generates no faster, is not taken to be at its target.

    Args:
        stats: of the model.
        fleet: its workers.
        clock: seconds from some fixed moment.
    """

    def __init__(self, stats: ModelStats, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._fleet = fleet
        self._clock = clock
        self._at = clock()
        self._seen = self._counts()
        self._rates = (0.0, 0.0, 0.0)
        """Rates per second: prompt tokens to compute, requests, tokens generated."""
        self._delay_s = 0.0
        self._num_new = 0.0

    def read(self) -> LoadReport:
        """The load now. To be called every second or so: rates are taken between two calls."""
        self._advance()
        stats, table = self._stats, self._fleet.table
        rows = np.flatnonzero(table.eligible)
        prompt_s, token_s = self._costs()
        output = self._output()
        prompts, requests, generated = self._rates
        waiting = np.maximum(table.num_active[rows] - table.work_rows[rows], 0.0)
        pages = table.total_pages[rows]
        tokens = np.maximum(pages, 1.0) * table.page_size[rows]
        taken = (pages - table.free_pages[rows]) / np.maximum(pages, 1.0)
        taken += (table.work_tokens[rows] + table.reserved_tokens[rows]) / tokens
        cache_tokens = float(tokens.mean()) if len(rows) else np.inf
        queue_s = table.queue_s[rows] + table.reserved_s[rows]
        return LoadReport(
            num_ready=float(len(rows)),
            work=prompts * prompt_s + max(requests * output, generated) * token_s,
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
        """A worker's seconds per prompt token, and per generated one in a full batch."""
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
        """Tokens of a completion."""
        ended = self._stats.completion_tokens
        return ended.total / count if (count := sum(ended.counts)) else _OUTPUT

    def _counts(self) -> tuple[float, float, float]:
        stats = self._stats
        uncached = stats.prompt_tokens - stats.hit_tokens
        return uncached, sum(stats.prompt_length.counts), stats.generation_tokens

    def _advance(self) -> None:
        now = self._clock()
        passed = now - self._at
        if passed <= 0.0:
            return
        counts = self._counts()
        kept = exp(-passed / WINDOW_S)
        prompts, requests, generated = (
            kept * rate + (1.0 - kept) * max(count - before, 0.0) / passed
            for rate, count, before in zip(self._rates, counts, self._seen, strict=True)
        )
        self._rates = (prompts, requests, generated)
        self._num_new = max(counts[1] - self._seen[1], 0.0)
        kept = exp(-passed / _DELAY_WINDOW_S)
        delay_s = self._fleet.expected_wait_s() if self._fleet.ready else 0.0
        self._delay_s = kept * self._delay_s + (1.0 - kept) * min(delay_s, _MOST_WAIT_S)
        self._at, self._seen = now, counts
