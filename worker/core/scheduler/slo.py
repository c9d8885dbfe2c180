"""Deadlines: when a waiting request's next token is due, and what that makes of its urgency."""

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
        """Seconds from admission to the first token of a request with so many to compute."""
        ...


class Standing(NamedTuple):
    """How a request stands in the queue at some moment."""

    level: int
    deadline_s: float
    """Infinite where there is none, or none that can still be met."""
    until_s: float
    """When it will stand otherwise."""


class Urgency:
    """Places requests by their deadlines.

                  ──────────────────┬──── margin ────┬─ predicted ─┐
                   its priority     │ + 2, at most 9 │             deadline
                                                     └ too late: its priority, as if without one

    Who cannot meet the deadline any more yields to those that can: nothing is gained by going
    first, and everybody behind would be late as well.

    Args:
        margin_s: time before the last moment at which a request becomes more urgent.
        forecast: of steps, from which the last moment follows.
    """

    def __init__(self, margin_s: float, forecast: Forecast) -> None:
        self._margin_s = margin_s
        self._forecast = forecast

    def standing(self, request: Request, now: float) -> Standing:
        """Where `request` stands from `now` on."""
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
