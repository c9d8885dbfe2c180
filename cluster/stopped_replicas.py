"""Kills this node's Serve replicas that were stopped by a signal, so that Serve replaces them.

After three failed health checks, 10 to 30 s in total, Serve signals a replica to exit, which a
stopped process cannot do: it keeps its GPU, its port and its clients' connections. Serve handles
the exit of a process immediately.

A stopped process has a distinct state (T). A process that is starved of CPU, waits for a disk or is
held by a debugger has another state and is never killed.

HAProxy's guard runs these checks: there is a guard on each node with replicas, and it outlives
them. Not reported upstream; Serve stops unhealthy replicas gracefully by design
(https://github.com/ray-project/ray/issues/41742). Needed until Serve detects stopped replicas
within seconds. Imports only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

STOPPED_S = 2.0
"""Seconds in the stopped state after which a replica is killed. Gateways wait equally long for a
silent worker before they resume its requests on another one."""
TITLE = b"ray::ServeReplica:"
"""Prefix of a replica's process title."""
_STOPPED = "T"
"""State of a stopped process, as in proc_pid_stat(5)."""


class StoppedReplicas:
    """Watches the replicas of one Ray node: gateways and frontends of worker groups.

    Args:
        raylet: process id of the node's raylet, the parent of its replicas; None if it is unknown,
            in which case no replica is watched.
    """

    def __init__(self, raylet: int | None) -> None:
        self._raylet = raylet
        self._since: dict[tuple[int, str], float] = {}
        """Time at which each process was first observed in the stopped state, by its id and start
        time."""

    def forget(self) -> None:
        """Resets the observations, because the caller was itself stopped or starved, and the
        replicas may have been as well."""
        self._since.clear()

    def check(self, now: float) -> None:
        """Kills the replicas that were stopped in all checks of the last STOPPED_S seconds."""
        stopped = self._stopped()
        self._since = {process: self._since.get(process, now) for process in stopped}
        for process, since in self._since.items():
            if now - since >= STOPPED_S:
                self._kill(process[0], now - since)

    def _stopped(self) -> list[tuple[int, str]]:
        if self._raylet is None:
            return []
        found = []
        for pid in _children(self._raylet):
            state, started = _state(pid)
            if state == _STOPPED and _title(pid).startswith(TITLE):
                found.append((pid, started))
        return found

    def _kill(self, pid: int, stopped_s: float) -> None:
        name = _title(pid).partition(b"\0")[0].decode(errors="replace")
        text = f"killing {name} (process {pid}): stopped by a signal for {stopped_s:.1f} s"
        print(f"stopped_replicas: {text}", file=sys.stderr, flush=True)
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError as error:
            print(f"stopped_replicas: cannot kill process {pid}: {error}", file=sys.stderr)


def _children(pid: int) -> Iterator[int]:
    """Process ids of the children that a process's main thread started; a raylet starts all of its
    children in that thread."""
    return map(int, _read(Path(f"/proc/{pid}/task/{pid}/children")).split())


def _state(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty if it has ended."""
    # A name may hold anything, brackets too.
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].decode().split()
    return (fields[0], fields[19]) if fields else ("", "")


def _title(pid: int) -> bytes:
    return _read(Path(f"/proc/{pid}/cmdline"))


def _read(path: Path) -> bytes:
    """The contents of a file in /proc; empty if its process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
