"""Step timeline with a simulated clock."""

from __future__ import annotations

import msgspec
import pytest

from worker.core.timeline import RING_SIZE, Timeline
from worker.plan.plan import RankTimes, StepResult
from worker.protocol.times import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(timeline: Timeline, clock: Clock, seq: int, start: float, *, idle: bool = False) -> None:
    """A step at depth 0: 1 s to schedule, 2 to send, 3 to prepare, 4 forward, 5 sample, 6 apply."""
    clock.now = start
    timeline.enter()
    clock.now += 3
    timeline.launched(7, start + 1)
    times = RankTimes(clock.now, clock.now + 3, clock.now + 7, clock.now + 12)
    clock.now += 12
    timeline.collected(StepResult(seq, [1], 12e3, times), start + 3)
    clock.now += 6
    timeline.leave(idle=idle)


def seconds(times: StepTimes) -> dict[str, float]:
    return {name: value for name, value in msgspec.structs.asdict(times).items() if value}


def test_phases_add_up() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    drive(timeline, clock, 1, 100.0)
    coordinator = {"schedule": 1.0, "broadcast": 2.0, "collect": 12.0, "process": 6.0}
    rank = {"prepare": 3.0, "forward": 4.0, "sample": 5.0}
    assert seconds(timeline.totals()) == {"num_steps": 1, **coordinator, **rank}
    drive(timeline, clock, 2, 121.0 + 0.5)
    assert timeline.totals().deliver == 0.5
    assert timeline.totals().bubble == 6 + 0.5 + 3
    assert timeline.totals().num_steps == 2
    assert [record.bubble for record in timeline.records] == [0.0, 9.5]


def test_idle_time_is_not_a_bubble() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    drive(timeline, clock, 1, 0.0, idle=True)
    drive(timeline, clock, 2, 1000.0)
    assert timeline.totals().bubble == 0.0
    assert timeline.totals().deliver == 0.0


def test_a_step_that_ran_within_the_launch_is_not_broadcast_time() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.enter()
    clock.now = 50.0
    timeline.launched(1, 1.0)
    timeline.collected(StepResult(1, [], 1.0, RankTimes(2.0, 3.0, 4.0, 49.0)), 50.0)
    timeline.leave(idle=False)
    assert timeline.totals().broadcast == 1.0


def test_the_ring_is_bounded_and_unmeasured_steps_leave_no_mark() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    for seq in range(RING_SIZE + 10):
        drive(timeline, clock, seq, 100.0 * seq)
    assert len(timeline.records) == RING_SIZE
    timeline.enter()
    timeline.launched(1, 0.0)
    timeline.collected(StepResult(1, [], 1.0), 0.0)
    timeline.leave(idle=False)
    assert timeline.totals().num_steps == RING_SIZE + 10


@pytest.mark.parametrize("num_steps", [0, 3])
def test_totals_are_a_copy(num_steps: int) -> None:
    clock = Clock()
    timeline = Timeline(clock)
    before = timeline.totals()
    for seq in range(num_steps):
        drive(timeline, clock, seq, 100.0 * seq)
    assert before == StepTimes()
