"""Injects one fault and records it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.campaigns.chaos.connections import (
    clients_through,
    listening_ports,
    sockets_of,
    taken_at,
    tcp_connections,
)
from tests.campaigns.chaos.haproxy import replica_of, sessions
from tests.campaigns.chaos.kinds import CUT_ATTACH, CUT_CLIENTS, KINDS, MEMORY, Noticed, Part
from tests.campaigns.chaos.load import ChaosLoad
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.processes import find, is_gone, name_in_logs
from tests.campaigns.chaos.schedule import Planned

SILENCE_S = 2.0
"""Seconds without heartbeats or other messages after which a gateway declares a worker lost."""
_SHARE_THAT_LEAVES = 0.34
_PRESSURE_S = 8.0
_TICK_S = 0.05
_LEFT_BYTES = 2 * 2**30
_PIDFD_GETFD = 438
"""Number of the system call; it is the same on all architectures."""
_CONNECTED = "03"
_HOG = (
    "import sys, time; block = bytearray(b'\\1') * int(sys.argv[1]); time.sleep(float(sys.argv[2]))"
)


class NotPossible(Exception):
    """The fault cannot be injected on this machine; the message is the reason."""


@dataclass(kw_only=True, slots=True)
class Fault:
    """An injected fault. Times are on the monotonic clock."""

    number: int
    kind: str
    begin: float
    pid: int = 0
    """Process that was hit."""
    ports: frozenset[int] = frozenset()
    """Client ports of the connections through that process."""
    stopped_s: float = 0.0
    """Seconds for which it was actually stopped."""
    noticed_s: float | None = None
    """Seconds until it was killed, or until a gateway reported fewer workers: an upper bound."""
    recovered: float | None = None
    """Time when the fleet had recovered."""
    problem: str | None = None
    """What was still missing when recovery timed out."""
    is_given_up: bool = False
    """Whether a stopped process was killed by the fleet."""

    @property
    def recovery_s(self) -> float | None:
        """Seconds until the fleet had recovered."""
        return None if self.recovered is None else self.recovered - self.begin


def allowed_pause_s(fault: Fault, step_timeout_s: float) -> float:
    """Upper bound of the detection time in seconds; depends on how the fault is detected."""
    noticed = KINDS[fault.kind].noticed
    if noticed is Noticed.BY_WATCHDOG:
        return step_timeout_s
    if noticed is Noticed.WHEN_IT_ENDS:
        return fault.stopped_s
    return SILENCE_S


class Saboteur:
    """Injects faults into one fleet.

    Args:
        directory: private folder of the fleet.
        load: load whose clients disconnect in some faults.
        options: durations for which processes are stopped.
        port: port of the endpoint.
    """

    def __init__(
        self, directory: Path, load: ChaosLoad, options: ChaosOptions, port: int = 0
    ) -> None:
        self._directory = directory
        self._port = port
        self._load = load
        self._options = options
        self._stopped: tuple[Fault, float] | None = None
        """Stopped processes, and the time at which they are resumed."""
        self._hog: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def strike(self, planned: Planned) -> Fault:
        """Injects a fault.

        Raises:
            NotPossible: the fault cannot be injected on this machine, or not at this time.
        """
        try:
            return self._strike(planned)
        except OSError as error:  # the chosen process has just ended
            raise NotPossible(f"{type(error).__name__}: {error}") from error

    def _strike(self, planned: Planned) -> Fault:
        kind = KINDS[planned.kind]
        fault = Fault(number=planned.number, kind=planned.kind, begin=time.monotonic())
        if planned.kind == CUT_CLIENTS:
            self._load.leave(_SHARE_THAT_LEAVES)
        elif planned.kind == CUT_ATTACH:
            fault.pid = self._cut_attach(planned)
        elif planned.kind == MEMORY:
            self._press()
        else:
            assert kind.part is not None
            assert kind.sign is not None
            fault.pid = self._choose(kind.part, planned)
            self._send(fault, kind.part, kind.sign)
        return fault

    @property
    def is_over(self) -> bool:
        """Whether no process is stopped and no memory is held."""
        return self._stopped is None and (self._hog is None or self._hog.poll() is not None)

    def close(self) -> None:
        """Resumes all stopped processes."""
        self._closed.set()
        self._thread.join()
        if self._stopped is not None:
            _resume(self._stopped[0].pid)
            self._stopped = None
        if self._hog is not None:
            self._hog.kill()
            self._hog.wait()

    def _tick(self) -> None:
        """Resumes a stopped process when its time is over, or records that it was killed. Runs in
        its own thread, because requests to a stopped fleet block."""
        while not self._closed.wait(_TICK_S):
            if self._stopped is None:
                continue
            fault, until = self._stopped
            now = time.monotonic()
            if is_gone(fault.pid):
                fault.is_given_up = True
                fault.noticed_s = now - fault.begin
            elif now >= until:
                _resume(fault.pid)
            else:
                continue
            fault.stopped_s = now - fault.begin
            self._stopped = None

    def _choose(self, part: Part, planned: Planned) -> int:
        pids = [process.pid for process in find(self._directory) if process.part is part]
        if not pids:
            raise NotPossible(f"the fleet has no process of kind {part.value}")
        if part is Part.HAPROXY:
            return pids[-1]  # older ones accept no more requests
        if part is Part.GUARD:  # likewise: the newest one, or its parent
            pids = pids[-2:]
        return pids[planned.choose(len(pids))]

    def _send(self, fault: Fault, part: Part, sign: signal.Signals) -> None:
        holder = self._newest_haproxy(fault.pid) if part is Part.GUARD else fault.pid
        if KINDS[fault.kind].takes_streams:
            fault.ports = self._ports_through(part, holder)
        fault.begin = time.monotonic()  # a starved process is sampled for seconds
        os.kill(fault.pid, sign)
        if part is Part.GUARD:  # it ended with its guard, or keeps running
            _resume(holder)
        if sign is signal.SIGSTOP:
            lasts = self._options.stop_s
            if KINDS[fault.kind].given_up:
                lasts = self._options.longest_stop_s
            self._stopped = (fault, fault.begin + lasts)

    def _newest_haproxy(self, guard: int) -> int:
        """The HAProxy that serves that guard's streams; the guard if there is none."""
        pids = [process.pid for process in find(self._directory) if process.part is Part.HAPROXY]
        return pids[-1] if pids else guard

    def _ports_through(self, part: Part, holder: int) -> frozenset[int]:
        """Client ports of the requests that a process is serving.

        HAZARD: the process may accept more between this check and the signal, so it is stopped
        first. Requests that HAProxy sends to a stopped gateway have not started, and are sent to
        another one.
        """
        os.kill(holder, signal.SIGSTOP)
        if part is not Part.GATEWAY:
            return taken_at(self._port, tcp_connections(holder))
        found = sessions(self._directory)
        name = name_in_logs(holder, [replica_of(session.server) for session in found])
        own = {session.port for session in found if replica_of(session.server) == name}
        return frozenset(own) | self._ports_through_replaced(holder)

    def _ports_through_replaced(self, gateway: int) -> frozenset[int]:
        """Client ports of HAProxy processes that were replaced but still serve streams."""
        listens = listening_ports(gateway)
        pids = [p.pid for p in find(self._directory) if p.part is Part.HAPROXY][:-1]
        found = (clients_through(tcp_connections(pid), self._port, listens) for pid in pids)
        return frozenset().union(*found)

    def _press(self) -> None:
        available = psutil.virtual_memory().available - _LEFT_BYTES
        size = min(int(self._options.pressure_gib * 2**30), available)
        if size <= 0:
            raise NotPossible("the machine does not have enough free memory")
        command = [sys.executable, "-c", _HOG, str(size), str(_PRESSURE_S)]
        self._hog = subprocess.Popen(command)

    def _cut_attach(self, planned: Planned) -> int:
        """Closes one gateway's attach stream from one worker; both processes keep running. Returns
        the frontend's process id."""
        inodes = _attach_connections(self._directory)
        ends = [
            (process.pid, fd)
            for process in find(self._directory)
            if process.part is Part.FRONT
            for inode, fd in sorted(sockets_of(process.pid).items())
            if inode in inodes
        ]
        if not ends:
            raise NotPossible("no gateway has an attach stream over a Unix socket")
        pid, fd = ends[planned.choose(len(ends))]
        _shut_down(pid, fd)
        return pid


def _resume(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGCONT)


def _attach_connections(directory: Path) -> set[str]:
    """Inodes of the frontend's sockets. An accepted connection has the path of the listening
    socket."""
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    named = [row for row in rows if len(row) > 7 and row[5] == _CONNECTED]
    return {
        row[6] for row in named if row[7].startswith(f"{directory}/") and row[7].endswith("/attach")
    }


def _shut_down(pid: int, fd: int) -> None:
    """Shuts down a connection of another process in both directions."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    process = os.pidfd_open(pid)
    try:
        ours = call(_PIDFD_GETFD, process, fd, 0)
        if ours < 0:
            reason = os.strerror(ctypes.get_errno())
            raise NotPossible(
                f"the kernel does not allow access to descriptors of other processes: {reason}"
            )
        with socket.socket(fileno=ours) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)
