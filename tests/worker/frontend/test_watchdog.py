"""When an engine counts as hung: simulated reports, processes and times."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial

from worker.core.step_forecast import StepForecast
from worker.frontend.rank_processes import ProcessSnapshot, RankProcesses
from worker.frontend.watchdog import StepWatchdog
from worker.protocol.messages import LoadSnapshot, StepLimit, StepReport, StepShape

ASLEEP = ProcessSnapshot([], False, 7)
STOPPED = ProcessSnapshot(["rank 1 (process 12) is stopped"], False, 7)
BEAT_S = 0.25


class Group:
    """A watchdog with simulated processes."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        self.processes = ASLEEP
        self.num_looks = 0
        self.watchdog = StepWatchdog(timeout_s, self._glance)

    def _glance(self) -> ProcessSnapshot:
        self.num_looks += 1
        return self.processes

    def report(self, *, more: bool = True, seen: int = 1, step: int = 1) -> None:
        load = LoadSnapshot(num_submits_seen=seen, step_shape=StepShape(seq=step))
        self.watchdog.report_received(StepReport(1, {}, [], load, more))

    def wait(self, seconds: float) -> tuple[float, str | None]:
        """Advances the time; returns when and why the group is given up."""
        waited = 0.0
        while waited < seconds:
            waited += BEAT_S
            if (problem := self.watchdog.tick(BEAT_S)) is not None:
                return waited, problem
        return waited, None


def test_a_stopped_rank_is_hung_after_the_timeout() -> None:
    group = Group()
    group.watchdog.submits_sent(1)
    group.report()
    group.processes = STOPPED
    group.watchdog.allow(StepLimit(2, 60.0))  # independent of the step's limit
    when, problem = group.wait(100.0)
    assert 10.0 < when <= 10.5
    assert problem is not None
    assert "rank 1 (process 12) is stopped" in problem


def test_sleeping_ranks_are_hung_after_the_limit_of_the_step() -> None:
    group = Group()
    group.watchdog.submits_sent(1)
    when, problem = group.wait(100.0)
    assert 10.0 < when <= 10.5
    assert problem is not None
    assert "no rank is active" in problem
    group = Group()
    group.report()
    group.watchdog.allow(StepLimit(3, 25.0))
    group.report(step=2)  # not that step yet
    assert 25.0 < group.wait(100.0)[0] <= 25.5
    group.report(step=3)
    assert 10.0 < group.wait(100.0)[0] <= 10.5


def test_active_ranks_are_slow_and_not_hung() -> None:
    """A loaded machine: they wait for a core, or get one from time to time."""
    group = Group()
    group.report()
    group.processes = ProcessSnapshot([], True, 7)
    assert group.wait(60.0)[1] is None
    for ticks in range(30):
        group.processes = ProcessSnapshot([], False, ticks)
        assert group.wait(1.0)[1] is None
    group.report()
    group.processes = ProcessSnapshot([], True, 7)
    when, problem = group.wait(1000.0)
    assert 100.0 < when <= 100.5
    assert problem is not None
    assert "do not finish" in problem


def test_nothing_is_due_of_an_idle_engine() -> None:
    group = Group()
    assert group.wait(100.0)[1] is None
    group.watchdog.submits_sent(4)
    group.report(seen=4, more=False)
    group.processes = STOPPED
    assert group.wait(100.0)[1] is None
    assert not group.num_looks
    group.report(seen=4, more=False)
    group.watchdog.submits_sent(5)  # it was stopped while idle, so this one is never received
    assert 10.0 < group.wait(100.0)[0] <= 10.5


def test_each_report_restarts_the_timeout_unless_it_is_outdated() -> None:
    group = Group()
    for _ in range(20):
        group.report()
        assert group.wait(8.0)[1] is None
    group.watchdog.submits_sent(3)
    group.report(seen=2, more=False)  # sent before the third was received
    assert 10.0 < group.wait(100.0)[0] <= 10.5


def test_zero_disables_the_timeout() -> None:
    group = Group(timeout_s=0.0)
    group.report()
    group.processes = STOPPED
    assert group.wait(1000.0)[1] is None


def shape(seq: int, prefill: int = 0, rows: int = 0) -> StepShape:
    return StepShape(
        seq, prefill, prefill * prefill // 2, decode_rows=rows, decode_context=100 * rows
    )


def test_limits_follow_the_predicted_time() -> None:
    forecast = StepForecast(1024)
    limit_s = partial(forecast.limit_s, timeout_s=10.0)
    assert limit_s(shape(1, rows=1)) == 60.0, "kernels may be compiled in the first steps"
    for seq in range(1, 400):
        prompt = seq % 2
        for _ in range(2):  # repeated if nothing new was computed
            forecast.observe(shape(seq, 1000 * prompt, 8), 2.0 if prompt else 0.001)
    assert limit_s(shape(400, rows=8)) == 10.0
    assert 35.0 < limit_s(shape(401, 1000, 8)) < 45.0
    assert 70.0 < limit_s(shape(402, 1000, 8), num_passes=2) < 90.0
    assert limit_s(shape(403, rows=9)) == 60.0, "no step had as many rows"
    assert limit_s(shape(404, 1001, 8)) >= 60.0


async def test_short_activity_below_a_clock_tick_is_detected() -> None:
    """A rank on a loaded machine, whose collectives wait for threads that wait for a core."""
    code = "import time; print(flush=True)\nwhile True: time.sleep(0.02)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        processes = RankProcesses({"rank 1": child.pid})
        looks = []
        for _ in range(4):
            looks.append(processes.snapshot().cpu_ns)
            await asyncio.sleep(0.1)
        assert looks == sorted(set(looks)), "work between any two looks"
    finally:
        child.kill()
        child.wait()


async def test_states_of_processes_are_detected_and_all_are_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        asleep = RankProcesses({"rank 1": child.pid})
        async with asyncio.timeout(120):
            while asleep.snapshot() != asleep.snapshot() or asleep.snapshot().is_active:
                await asyncio.sleep(0.05)  # it is starting
            assert RankProcesses({"rank 0": other.pid}).snapshot().is_active
            mine = RankProcesses({"rank 0": os.getpid()})
            assert mine.snapshot().is_active, "this test, and a child of it"
            child.send_signal(signal.SIGSTOP)
            while not asleep.snapshot().stopped:
                await asyncio.sleep(0.01)
        assert asleep.snapshot().stopped == [f"rank 1 (process {child.pid}) is stopped"]
        reused = RankProcesses({"rank 1": child.pid})
        reused._members = {"rank 1": (child.pid, "of an earlier process")}
        reused.kill()
        assert child.poll() is None
        asleep.kill()
        assert child.wait(120) == -signal.SIGKILL
        asleep.kill()
        assert asleep.snapshot() == ProcessSnapshot([], False, 0)
    finally:
        for process in (child, other):
            process.kill()
            process.wait()
