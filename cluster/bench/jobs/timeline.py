"""Timeline of a stage: throughput, running requests and prefix cache hit rate over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.bench.client import Record
from cluster.bench.report import Result

_BINS = 60
_MIDDLE = (0.1, 0.9)
"""Range of requests for which the pace is measured, as fractions of all requests in order."""


def timeline(records: Sequence[Record], began: float) -> Result:
    """Output tokens per second, running requests and prefix cache hit rate, per bin of time since
    `began`.

    Running requests are counted at the end of the bin. The hit rate covers completed requests sent
    within the bin; None if there are none. Tokens are distributed evenly over the events of a
    request.
    """
    if not records:
        return {"seconds": [], "tokens_per_s": [], "running": [], "hit_rate": []}
    starts = np.array([record.start - began for record in records])
    ends = starts + np.array([record.latency for record in records])
    edges = np.linspace(0.0, max(float(ends.max()), 1e-3), _BINS + 1)
    tokens = np.zeros(_BINS)
    for record, start in zip(records, starts.tolist(), strict=True):
        if record.ttft and not record.error:
            times = start + record.ttft + np.cumsum([0.0, *record.itl])
            tokens += np.histogram(times, edges)[0] * (record.output_len / len(times))
    done = [not record.error for record in records]
    cached, prompts = (
        np.histogram(starts, edges, weights=np.array(counts) * done)[0]
        for counts in ([r.cached_tokens for r in records], [r.prompt_len for r in records])
    )
    running = np.searchsorted(np.sort(starts), edges[1:]) - np.searchsorted(
        np.sort(ends), edges[1:], side="right"
    )
    return {
        "seconds": edges[1:].tolist(),
        "tokens_per_s": (tokens / np.diff(edges)).tolist(),
        "running": running.tolist(),
        "hit_rate": [
            c / p if p else None for c, p in zip(cached.tolist(), prompts.tolist(), strict=True)
        ],
    }


def pace(records: Sequence[Record], arrivals: Sequence[float]) -> float:
    """Ratio of the completion rate to the arrival rate of requests; below 1, the queue grows.

    Unlike throughput over a short interval, it does not depend on request latency.
    """
    ends = sorted(record.start + record.latency for record in records)
    first, last = (int(part * (len(ends) - 1)) for part in _MIDDLE)
    arrival_s, completion_s = arrivals[last] - arrivals[first], ends[last] - ends[first]
    return arrival_s / completion_s if arrival_s and completion_s else 1.0
