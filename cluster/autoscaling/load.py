"""Load of a model, in units of workers and of their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.serving.load import LoadReport


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLoad:
    """Load of one model. It is measured by the cost of tokens, not by the number of requests."""

    num_ready: int = 0
    """Workers that take requests."""
    work: float = 0.0
    """Offered load: seconds of workers' time per second that arriving requests need, which is how
    many workers they keep busy."""
    backlog_s: float = 0.0
    """Seconds of a worker's time that queued requests need, at workers and at gateways."""
    queue_delay_s: float = 0.0
    """Seconds that the next request is expected to wait."""
    kv: float = 0.0
    """Number of workers whose KV caches running and waiting requests fill."""
    active: bool = False
    """Whether there is any unfinished request."""
    visited: bool = False
    """Whether any request came recently; it may be finished."""


def combined(reports: Sequence[LoadReport]) -> FleetLoad:
    """The load of a model from the reports of its gateways, at least one.

    What gateways report of their own requests adds up. What they report of workers concerns the
    same ones: the largest value is taken, as a gateway that has just started knows less.
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
