"""Conversion of device times of steps to the host's clock."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from worker.plan.plan import RankTimes
from worker.rank.device_clock import DeviceClock


@dataclass(frozen=True)
class Event:
    ms: float
    """An event on the device's clock."""

    def elapsed_time(self, end_event: Event) -> float:
        return end_event.ms - self.ms


def place(
    clock: DeviceClock, start: float, end: float, seen: float, waited: bool = True
) -> RankTimes:
    events = [Event(ms) for ms in (start, start + 0.01, end - 0.5, end)]
    return clock.place(events, launched=seen - 0.003, seen=seen, waited=waited)


def test_gaps_are_the_devices_however_late_the_host_looks() -> None:
    clock = DeviceClock()
    first = place(clock, 100.0, 104.0, 7.0)
    assert msgspec.structs.astuple(first) == pytest.approx((6.996, 6.99601, 6.9995, 7.0))
    second = place(clock, 104.02, 108.0, 7.0042)  # woke up 0.2 ms late
    assert second.started - first.finished == pytest.approx(20e-6)
    assert second.finished == pytest.approx(7.004)
    third = place(clock, 108.0, 112.0, 7.5, waited=False)  # the host was busy with other things
    assert third.started == pytest.approx(second.finished)
    assert third.finished == pytest.approx(7.008)


def test_the_chain_follows_the_hosts_clock() -> None:
    clock = DeviceClock()
    place(clock, 0.0, 4.0, 7.0)
    # A device clock that runs ahead: no step ends after the host has observed its end.
    assert place(clock, 4.0, 8.1, 7.004).finished == 7.004
    # A clock that lags by more than a wake-up.
    assert place(clock, 8.1, 12.0, 7.010).finished == 7.010


def test_a_long_idle_time_begins_a_new_chain() -> None:
    clock = DeviceClock()
    place(clock, 0.0, 4.0, 7.0)
    # The two clocks drifted by 5 ms in an hour.
    assert place(clock, 3_600_000.0, 3_600_004.0, 3607.009).finished == 3607.009
