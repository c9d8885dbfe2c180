"""Replicas of a node are found among the machine's processes, and waited for."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import psutil
import pytest

from cluster import drain
from cluster.drain import Raylet, announce, count_replicas, find_raylets, wait_for_replicas

RAYLET = ["/venv/ray/core/src/ray/raylet/raylet", "--node_id=ab12", "--gcs-address=10.0.0.1:6379"]


class Process:
    """A process with the attributes that are used."""

    def __init__(self, pid: int, parent: int, arguments: list[str]) -> None:
        self.pid, self._parent, self._arguments = pid, parent, arguments
        self.has_ended = False

    def cmdline(self) -> list[str]:
        if self.has_ended:
            raise psutil.NoSuchProcess(self.pid)
        return self._arguments

    def ppid(self) -> int:
        return self._parent


class Machine:
    """Processes by id."""

    def __init__(self) -> None:
        self._processes: dict[int, Process] = {}
        self.add(10, 1, RAYLET)
        self.add(11, 1, ["python", "-c", "raylet"])
        self.add(12, 1, [])

    def add(self, pid: int, parent: int, arguments: list[str]) -> None:
        self._processes[pid] = Process(pid, parent, arguments)

    def end(self, pid: int) -> None:
        self._processes[pid].has_ended = True

    def processes(self) -> Any:
        return list(self._processes.values())


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_the_raylet_is_found(machine: Machine) -> None:
    assert list(find_raylets(machine.processes)) == [Raylet(10, "ab12", "10.0.0.1:6379")]


def test_replicas_of_this_node_alone_are_waited_for(machine: Machine) -> None:
    machine.add(20, 10, ["ray::ServeReplica:rayfleet:gateway"])
    machine.add(21, 10, ["ray::ServeReplica:rayfleet:worker-demo"])
    machine.add(22, 10, ["ray::IDLE"])
    machine.add(23, 99, ["ray::ServeReplica:other:gateway"])
    assert count_replicas(10, machine.processes) == 2
    now, ends = 0.0, {3.0: 20, 7.0: 21}

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now in ends:
            machine.end(ends[now])

    assert wait_for_replicas(10, 60, machine.processes, lambda: now, sleep)
    assert now == 7.0


def test_the_deadline_ends_the_wait(machine: Machine) -> None:
    machine.add(20, 10, ["ray::ServeReplica:rayfleet:gateway"])
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    assert not wait_for_replicas(10, 5, machine.processes, lambda: now, sleep)
    assert now == 5.0


def test_nothing_is_waited_for_where_there_is_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert drain.main(["--deadline", "5", "--node-id", "none-such"]) == 0
    assert "no Ray node" in capsys.readouterr().err


def test_an_unreachable_control_plane_is_not_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert not announce(Raylet(10, "ab12", "127.0.0.1:1"), 5)
