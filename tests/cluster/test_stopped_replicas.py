"""Replicas stopped by a signal are killed; those that are late for other reasons are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.stopped_replicas import STOPPED_S, StoppedReplicas

REPLICA = "ray::ServeReplica:default:demo"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a child process, as a raylet would, with a title."""
    started = []

    def start(title: str = REPLICA, code: str = "import time; time.sleep(600)") -> object:
        child = subprocess.Popen([title, "-c", code], executable=sys.executable)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()


def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    while state(child) != "T":
        time.sleep(0.01)


def state(child: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_replica_is_killed_and_no_other_process(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    front, other, rank = start(), start(), start("ray::Rank0:abc.lead")
    replicas = StoppedReplicas(os.getpid())
    for child in (front, rank):
        stop(child)
    replicas.check(10.0)
    replicas.check(10.0 + STOPPED_S - 0.1)
    assert front.poll() is None
    replicas.check(10.0 + STOPPED_S)
    assert front.wait(10) == -signal.SIGKILL
    assert [child.poll() for child in (other, rank)] == [None, None]
    line = f"killing {REPLICA} (process {front.pid}): stopped by a signal for {STOPPED_S:.1f} s"
    assert line in capfd.readouterr().err
    replicas.check(100.0)  # it has ended, and this process is not killed yet


def test_a_replica_that_was_continued_meanwhile_is_not_killed(start: Start) -> None:
    front = start()
    replicas = StoppedReplicas(os.getpid())
    stop(front)
    replicas.check(0.0)
    front.send_signal(signal.SIGCONT)
    while state(front) == "T":
        time.sleep(0.01)
    replicas.check(2.0)
    stop(front)
    replicas.check(4.0)
    replicas.check(4.0 + STOPPED_S - 0.1)
    assert front.poll() is None


def test_time_in_which_nothing_was_watched_does_not_count(start: Start) -> None:
    """As on a suspended machine."""
    front = start()
    replicas = StoppedReplicas(os.getpid())
    stop(front)
    replicas.check(0.0)
    replicas.forget()
    replicas.check(60.0)
    assert front.poll() is None
    replicas.check(60.0 + STOPPED_S)
    assert front.wait(10) == -signal.SIGKILL


def test_a_starved_replica_is_not_killed(start: Start) -> None:
    """It gets almost no CPU time beside processes that need all cores."""
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    starved = start(code=f"import os; {idle}\nwhile True: pass")
    asleep = start()
    replicas = StoppedReplicas(os.getpid())
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        replicas.check(100 * time.monotonic())
        sum(range(100_000))
    assert [child.poll() for child in (starved, asleep)] == [None, None]


def test_without_a_raylet_there_is_nothing_to_watch(start: Start) -> None:
    front = start()
    stop(front)
    replicas = StoppedReplicas(None)
    replicas.check(0.0)
    replicas.check(60.0)
    assert front.poll() is None
    StoppedReplicas(2**22).check(0.0)
