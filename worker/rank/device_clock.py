"""Device clock: converts CUDA events to times of the host's clock.

CUDA events only measure time relative to each other. Steps are therefore chained: the times of a
step are computed from the end of the previous step and the time between their events, so the gap
between steps is the one measured on the device. A chain begins at a step whose end is set to
the time at which the host observed it. A new chain begins if the computed end of a step is later
than the time at which the host observed it, or much earlier although the host was waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from worker.plan.plan import RankTimes

_LARGEST_LAG_S = 1e-3
"""Maximum time in seconds between a step's end and its observation by a waiting host: longer than a
wake-up, and so long that clock drift exceeds it only once in thousands of steps."""

_LONGEST_CHAIN_S = 1.0
"""Idle time before a step, in seconds, after which a new chain begins."""


class TimedEvent(Protocol):
    """A completed event with timing enabled."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to another of its kind."""
        ...


class DeviceClock:
    """Converts the times of one rank's steps to the host's clock, in the order of their
    completion."""

    def __init__(self) -> None:
        self._last: tuple[TimedEvent, float] | None = None
        """End of the previous step: its event, and its time in seconds of the host's clock."""

    def place(
        self, events: Sequence[TimedEvent], *, launched: float, seen: float, waited: bool
    ) -> RankTimes:
        """Times of the device's work in a completed step, in seconds of the host's clock.

        Args:
            events: the step's events before its first launch, before its forward pass, after its
                forward pass, and after its last launch.
            launched: time at which the host began to launch the step.
            seen: time at which the host observed the completion of the step.
            waited: whether the host waited for the step, so that `seen` is soon after its end.
        """
        first, prepared, forwarded, last = events
        finished = self._finished(last, launched, seen, waited)
        started = finished - first.elapsed_time(last) / 1e3
        self._last = last, finished
        return RankTimes(
            started,
            started + first.elapsed_time(prepared) / 1e3,
            started + first.elapsed_time(forwarded) / 1e3,
            finished,
        )

    def _finished(self, last: TimedEvent, launched: float, seen: float, waited: bool) -> float:
        if self._last is None:
            return seen
        event, moment = self._last
        if launched - moment > _LONGEST_CHAIN_S:
            return seen
        finished = moment + event.elapsed_time(last) / 1e3
        lag = seen - finished
        return seen if lag < 0.0 or (waited and lag > _LARGEST_LAG_S) else finished
