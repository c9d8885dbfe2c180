"""Urgency of waiting requests: their priority, raised when the next token is nearly due."""

from __future__ import annotations

from math import inf
from typing import NamedTuple, Protocol

from worker.core.request import Request

BOOST = 2
"""Number of levels by which a request is raised near its deadline."""
MAX_LEVEL = 9


class Forecast(Protocol):
    """Predicts latencies from previous steps."""

    def first_token_s(self, num_tokens: int) -> float:
        """Predicted time from admission to first token, in seconds, with `num_tokens`
        to compute."""
        ...


class RequestUrgency(NamedTuple):
    """Level and deadline of a queued request at a given time."""

    level: int
    deadline_s: float
    """Deadline of the next token; infinite if there is no SLO, or if it can no longer be met."""
    until_s: float
    """Time at which level and deadline become outdated; infinite if they never do."""


class Urgency:
    """Determines the urgency of requests from their deadlines.

                  ──────────────────┬──── margin ────┬─ predicted ─┐
                   its priority     │ + 2, at most 9 │             deadline
                                                     └ too late: its priority, without a boost

    A request that can no longer meet its deadline yields to those that can: serving it first would
    not help it and would delay the others.

    Args:
        margin_s: length, in seconds, of the period before the latest start time in which a request
            is more urgent.
        forecast: predicts the time to the first token, which determines the latest start time.
    """

    def __init__(self, margin_s: float, forecast: Forecast) -> None:
        self._margin_s = margin_s
        self._forecast = forecast

    def of_request(self, request: Request, now: float) -> RequestUrgency:
        """Level and deadline of `request` at time `now`."""
        deadline = request.due_s
        if deadline == inf:
            return RequestUrgency(request.priority, inf, inf)
        last_moment = deadline - self._forecast.first_token_s(
            request.queue_entry.num_uncached or len(request.token_ids)
        )
        if now >= last_moment:
            return RequestUrgency(request.priority, inf, inf)
        if now >= last_moment - self._margin_s:
            level = max(request.priority, min(MAX_LEVEL, request.priority + BOOST))
            return RequestUrgency(level, deadline, last_moment)
        return RequestUrgency(request.priority, deadline, last_moment - self._margin_s)
