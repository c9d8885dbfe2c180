"""Places what CUDA events measure on the host's clock.

Events tell only how long after each other they happened. Steps are therefore chained: a step's
moments lie as far behind the end of the step before as its events do, so that the gap between two
steps is exactly what the device saw. The chain begins at the moment when the host saw a step's end.
It is corrected where it would claim that a step ended after the host knew, or long before the host,
which waited for it, woke up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from worker.plan.plan import RankTimes

_LARGEST_LAG_S = 1e-3
"""How far a step's end may lie before the moment when the host saw it: more than waking up takes,
and so little that the two clocks' drift shows in one step of thousands."""

_LONGEST_CHAIN_S = 1.0
"""Beyond so much idle time nothing is gained by measuring from the step before."""


class TimedEvent(Protocol):
    """A completed event that was recorded with its time."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to another of its kind."""
        ...


class DeviceClock:
    """Takes steps in the order of their completion."""

    def __init__(self) -> None:
        self._last: tuple[TimedEvent, float] | None = None
        """The end of the step before, as event and as moment."""

    def place(
        self, events: Sequence[TimedEvent], *, launched: float, seen: float, waited: bool
    ) -> RankTimes:
        """Times of the device's work in a completed step, in seconds of the host's clock.

        Args:
            events: before its first launch, before its forward pass, after that, and after its
                last launch.
            launched: when the host began to launch it.
            seen: when the host knew that it had completed.
            waited: whether the host had to wait, so that it knew soon.
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
