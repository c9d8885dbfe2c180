"""Load of a model, in units of workers and of their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.serving.load import LoadReport


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLoad:
    """Load of one model, measured by the cost of tokens rather than by the number of requests."""

    num_ready: int = 0
    """Number of workers that are ready for requests."""
    work: float = 0.0
    """Offered load: seconds of worker time needed per second for arriving requests, which is the
    number of workers that they keep busy."""
    backlog_s: float = 0.0
    """Worker time in seconds for queued requests, at workers and at gateways."""
    queue_delay_s: float = 0.0
    """Expected queueing delay of the next request in seconds."""
    kv: float = 0.0
    """Number of workers whose KV caches would be filled by running and waiting requests."""
    active: bool = False
    """Whether there are unfinished requests."""
    visited: bool = False
    """Whether requests arrived recently, finished or not."""


def combined(reports: Sequence[LoadReport]) -> FleetLoad:
    """The load of a model, combined from at least one report of its gateways.

    Values about the gateways' requests are added. Values about workers describe the same workers,
    so the maximum is used: a gateway that has just started has incomplete data.
    """
    return FleetLoad(
        num_ready=round(max(r.num_ready for r in reports)),
        work=sum(r.work for r in reports),
        backlog_s=sum(r.pending_s for r in reports) + max(r.waiting_s for r in reports),
        queue_delay_s=max(r.queue_delay_s for r in reports),
        kv=sum(r.pending_kv for r in reports) + max(r.kv for r in reports),
        active=any(r.num_pending or r.num_active for r in reports),
        visited=any(r.num_new for r in reports),
    )
