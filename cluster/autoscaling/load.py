"""The load of a model: what its workers have to do, in units of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.serving.load import LoadReport


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLoad:
    """The load of one model. Tokens are weighed by what they cost, requests are not counted."""

    num_ready: int = 0
    """Workers that take requests."""
    work: float = 0.0
    """Workers that what arrives keeps busy: seconds of their time per second."""
    backlog_s: float = 0.0
    """Seconds of a worker's time that wait, at workers and at gateways."""
    queue_delay_s: float = 0.0
    """How long the next request is expected to wait."""
    kv: float = 0.0
    """Workers whose KV caches running and waiting requests fill."""
    active: bool = False
    """Whether there is any request, wherever it is."""
    visited: bool = False
    """Whether any came of late, which may be over already."""


def combined(reports: Sequence[LoadReport]) -> FleetLoad:
    """The load that the gateways of a model report together.

    Each tells of the requests that came to itself, which add up, and of the same workers, of which
    the most is taken: a gateway that has just begun knows less.
    """
    if not reports:
        return FleetLoad()
    return FleetLoad(
        num_ready=round(max(r.num_ready for r in reports)),
        work=sum(r.work for r in reports),
        backlog_s=sum(r.pending_s for r in reports) + max(r.waiting_s for r in reports),
        queue_delay_s=max(r.queue_delay_s for r in reports),
        kv=sum(r.pending_kv for r in reports) + max(r.kv for r in reports),
        active=any(r.num_pending or r.num_active for r in reports),
        visited=any(r.num_new for r in reports),
    )
