"""State of rank processes according to /proc: stopped, active, or sleeping."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_STOPPED, _ACTIVE = "T", "RD"
"""States of proc_pid_stat(5): stopped by a signal (T); running or waiting for a core (R), or
waiting for a disk (D)."""

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


class ProcessSnapshot(NamedTuple):
    """State of the rank processes at one time."""

    stopped: list[str]
    """Names and ids of processes that were stopped by a signal."""
    is_active: bool
    """Whether any process is running, or is waiting for a core or a disk."""
    cpu_ns: int
    """Total time in which the processes' main threads ran or waited for a core, in nanoseconds. CPU
    time in clock ticks would miss short activity, such as each collective of a starved rank."""


class RankProcesses:
    """Inspects the main threads of ranks, which launch or compute steps, and of their children.

    Other threads do not count, since Ray's threads also run in a hung rank. Children count, since
    they may be compilers.

    Args:
        pids: process ids by name, all on this node.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._members = {name: (pid, _started(pid)) for name, pid in pids.items()}

    def snapshot(self) -> ProcessSnapshot:
        """Current state of all processes. A process that has exited is not active."""
        stopped: list[str] = []
        seen: dict[int, str] = {}
        cpu_ns = 0
        for name, (root, _) in self._members.items():
            for pid in _family(root):
                if pid in seen or not (stat := _stat(pid)):
                    continue
                seen[pid] = stat[0]
                cpu_ns += _cpu_ns(pid, stat)
            if seen.get(root) == _STOPPED:
                stopped.append(f"{name} (process {root}) is stopped")
        return ProcessSnapshot(stopped, any(state in _ACTIVE for state in seen.values()), cpu_ns)

    def kill(self) -> None:
        """Kills all ranks with SIGKILL.

        HAZARD: nothing else ends a stopped process. Neither Ray nor the exit of its parent does.
        """
        for pid, started in self._members.values():
            if started and _started(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _family(root: int) -> Iterator[int]:
    """Ids of a process and of its descendants that were started by main threads."""
    yield root
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text()
    except OSError:
        return
    for child in children.split():
        yield from _family(int(child))


def _started(pid: int) -> str:
    """Start time of a process, which distinguishes it from others with the same id; empty if it has
    exited."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _cpu_ns(pid: int, stat: list[str]) -> int:
    """Time that a process's main thread has spent running or runnable, in ns; without schedstat,
    its CPU time from /proc/PID/stat (clock-tick resolution)."""
    try:
        running, waiting, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return (int(stat[11]) + int(stat[12])) * _TICK_NS
    return int(running) + int(waiting)


def _stat(pid: int) -> list[str]:
    """Fields of a main thread in /proc/PID/stat, starting with its state; empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # names may contain anything, including parentheses
