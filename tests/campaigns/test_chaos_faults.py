"""Faults injected into stand-ins for a fleet's processes: no Ray, but real signals and sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster.directories import DIRECTORY_VARIABLE
from tests.campaigns.chaos.connections import clients_through, listening_ports, tcp_connections
from tests.campaigns.chaos.faults import NotPossible, Saboteur
from tests.campaigns.chaos.kinds import Part
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.processes import find, is_gone, state
from tests.campaigns.chaos.schedule import Planned

WAIT_S = 120.0
FRONT = "ray::ServeReplica:rayfleet:worker-x"
CONTROLLER = "ray::ServeController"
LISTENS = """
import os, socket, sys
folder = sys.argv[1] + "/rf-one"
os.mkdir(folder)
listener = socket.socket(socket.AF_UNIX)
listener.bind(folder + "/attach")
listener.listen()
print("there", flush=True)
taken = listener.accept()[0]
print("taken", flush=True)
print("ended" if taken.recv(1) == b"" else "more", flush=True)
sys.stdin.read()
"""
TAKES = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print("there", flush=True)
print(listener.getsockname()[1], flush=True)
taken = listener.accept()[0]
print("taken", flush=True)
sys.stdin.read()
"""
SLEEPS = "import sys; print('there', flush=True); sys.stdin.read()"


class Load:
    """Counts the clients that are disconnected."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def leave(self, share: float) -> None:
        self.shares.append(share)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process with the title of a fleet's process."""
    started = []

    def run(title: str, code: str = SLEEPS) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [title, "-c", code, str(tmp_path)],
            executable=sys.executable,
            env={**os.environ, DIRECTORY_VARIABLE: str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def saboteur(folder: Path, load: Load | None = None, **options: float) -> Saboteur:
    return Saboteur(folder, load or Load(), ChaosOptions(**options))  # type: ignore[arg-type]


def planned(kind: str, pick: float = 0.0) -> Planned:
    return Planned(number=0, at_s=0.0, kind=kind, pick=pick)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_only_processes_of_the_fleet_are_found(tmp_path: Path, start: Start) -> None:
    front, rank = start(FRONT), start("ray::Rank1:abc.follow")
    start("ray::IDLE")
    assert {(process.part, process.pid) for process in find(tmp_path)} == {
        (Part.FRONT, front.pid),
        (Part.RANK, rank.pid),
    }
    front.kill()
    wait_until(lambda: is_gone(front.pid))
    assert [process.part for process in find(tmp_path)] == [Part.RANK]


def test_who_is_killed_is_the_one_that_was_picked(tmp_path: Path, start: Start) -> None:
    pids = sorted(start(FRONT).pid for _ in range(2))
    fault = saboteur(tmp_path).strike(planned("kill-front", pick=0.6))
    assert fault.pid == pids[1]
    wait_until(lambda: is_gone(pids[1]))
    assert not is_gone(pids[0])


def test_a_stopped_process_is_resumed_when_its_time_is_over(tmp_path: Path, start: Start) -> None:
    controller = start(CONTROLLER)
    breaker = saboteur(tmp_path, stop_s=0.3)
    fault = breaker.strike(planned("stop-controller"))
    wait_until(lambda: state(controller.pid) == psutil.STATUS_STOPPED)
    wait_until(lambda: breaker.is_over)
    wait_until(lambda: state(controller.pid) != psutil.STATUS_STOPPED)
    assert fault.stopped_s >= 0.3
    assert not fault.is_given_up


def test_that_a_stopped_process_was_ended_is_noted(tmp_path: Path, start: Start) -> None:
    rank = start("ray::Rank1:abc.follow")
    breaker = saboteur(tmp_path, longest_stop_s=WAIT_S)
    fault = breaker.strike(planned("stop-rank"))
    assert not breaker.is_over
    rank.kill()
    wait_until(lambda: breaker.is_over)
    assert fault.is_given_up
    assert fault.noticed_s is not None


def test_nothing_stays_stopped(tmp_path: Path, start: Start) -> None:
    controller = start(CONTROLLER)
    breaker = saboteur(tmp_path, stop_s=WAIT_S)
    breaker.strike(planned("stop-controller"))
    wait_until(lambda: state(controller.pid) == psutil.STATUS_STOPPED)
    breaker.close()
    wait_until(lambda: state(controller.pid) != psutil.STATUS_STOPPED)


def test_a_fault_without_a_target_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotPossible, match="no process of kind controller"):
        saboteur(tmp_path).strike(planned("kill-controller"))
    with pytest.raises(NotPossible, match="Unix socket"):
        saboteur(tmp_path).strike(planned("cut-attach"))


def test_a_gateway_s_stream_ends_and_both_processes_stay(tmp_path: Path, start: Start) -> None:
    front = start(FRONT, LISTENS)
    assert front.stdout is not None
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.connect(str(tmp_path / "rf-one" / "attach"))
        assert front.stdout.readline() == "taken\n"
        try:
            fault = saboteur(tmp_path).strike(planned("cut-attach"))
        except NotPossible as problem:
            pytest.skip(str(problem))
        assert fault.pid == front.pid
        assert gateway.recv(1) == b""
        assert front.stdout.readline() == "ended\n"
    assert not is_gone(front.pid)


def test_clients_of_a_proxy_go_with_the_server_that_it_is_connected_to() -> None:
    """This process is the proxy: it has one connection to a client and one to a server."""
    with socket.create_server(("127.0.0.1", 0)) as front, socket.create_server(("", 0)) as server:
        port, behind = front.getsockname()[1], server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as client,
            socket.create_connection(("127.0.0.1", behind)),
        ):
            taken = front.accept()[0]
            own = tcp_connections(os.getpid())
            assert {port, behind} <= listening_ports(os.getpid())
            theirs = client.getsockname()[1]
            assert clients_through(own, port, {behind}) == {theirs}
            assert clients_through(own, port, {1}) == frozenset()
            taken.close()


@pytest.mark.parametrize("kind", ["kill-haproxy", "stop-haproxy"])
def test_streams_of_a_haproxy_that_answers_nobody_are_its_own(
    tmp_path: Path, start: Start, kind: str
) -> None:
    haproxy = start("there/haproxy", TAKES)
    assert haproxy.stdout is not None
    port = int(haproxy.stdout.readline())
    breaker = Saboteur(tmp_path, Load(), ChaosOptions(stop_s=0.1), port)  # type: ignore[arg-type]
    with socket.create_connection(("127.0.0.1", port)) as client:
        assert haproxy.stdout.readline() == "taken\n"
        before = time.monotonic()
        fault = breaker.strike(planned(kind))
        assert fault.ports == {client.getsockname()[1]}
        assert fault.begin >= before
    breaker.close()


def test_clients_leave_and_memory_is_taken_for_a_while(tmp_path: Path) -> None:
    load = Load()
    breaker = saboteur(tmp_path, load, pressure_gib=0.01)
    breaker.strike(planned("cut-clients"))
    assert len(load.shares) == 1
    assert breaker.is_over
    breaker.strike(planned("memory"))
    while_held = breaker.is_over
    breaker.close()
    assert (while_held, breaker.is_over) == (False, True)
