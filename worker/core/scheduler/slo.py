"""Urgency of waiting requests: their priority, raised where the next token is nearly due."""

from __future__ import annotations

from math import inf
from typing import NamedTuple, Protocol

from worker.core.request import Request

BOOST = 2
"""Levels that a request gains near its deadline."""
MAX_LEVEL = 9


class Forecast(Protocol):
    """Predicts times from what earlier steps took."""

    def first_token_s(self, num_tokens: int) -> float:
        """Predicted seconds from admission to first token, with `num_tokens` to compute."""
        ...


class Standing(NamedTuple):
    """Level and deadline of a request in the queue, as of some moment."""

    level: int
    deadline_s: float
    """When the next token is due; infinite without an SLO, or where that cannot be met any more."""
    until_s: float
    """Moment from which on this standing no longer holds; infinite for never."""


class Urgency:
    """Places requests by their deadlines.

                  ──────────────────┬──── margin ────┬─ predicted ─┐
                   its priority     │ + 2, at most 9 │             deadline
                                                     └ too late: its priority, as if without one

    A request that can no longer meet its deadline yields to those that can: to go first would gain
    it nothing, and make those behind it late as well.

    Args:
        margin_s: seconds before the last moment from which on a request is more urgent.
        forecast: predicts the time to the first token, from which the last moment follows.
    """

    def __init__(self, margin_s: float, forecast: Forecast) -> None:
        self._margin_s = margin_s
        self._forecast = forecast

    def standing(self, request: Request, now: float) -> Standing:
        """Standing of `request` from `now` on."""
        deadline = request.due_s
        if deadline == inf:
            return Standing(request.priority, inf, inf)
        last_moment = deadline - self._forecast.first_token_s(
            request.queue_entry.num_uncached or len(request.token_ids)
        )
        if now >= last_moment:
            return Standing(request.priority, inf, inf)
        if now >= last_moment - self._margin_s:
            level = max(request.priority, min(MAX_LEVEL, request.priority + BOOST))
            return Standing(level, deadline, last_moment)
        return Standing(request.priority, deadline, last_moment - self._margin_s)
