"""Rank processes as the system shows them in /proc: stopped, at work, or asleep."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_STOPPED, _AT_WORK = "T", "RD"
"""States of proc_pid_stat(5): stopped by a signal; and running or waiting for a core (R), or
waiting for a disk (D)."""

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


class Glance(NamedTuple):
    """State of the processes at one moment."""

    stopped: list[str]
    """Processes that a signal has stopped, by name and id."""
    at_work: bool
    """Whether any process runs, waits for a core, or waits for a disk."""
    cpu_ns: int
    """Nanoseconds so far in which their main threads had a core or waited for one. The system's
    clock ticks do not count a moment of work, such as each collective of a starved rank takes."""


class RankProcesses:
    """Looks at the main threads of ranks, which launch or compute steps, and of their children.

    Other threads do not count: Ray's run in a rank that hangs, too. Children count, since one may
    be a compiler.

    Args:
        pids: process ids by name, all on this node.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._members = {name: (pid, _started(pid)) for name, pid in pids.items()}

    def glance(self) -> Glance:
        """Present state of all processes; one that has ended is not at work."""
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
        return Glance(stopped, any(state in _AT_WORK for state in seen.values()), cpu_ns)

    def kill(self) -> None:
        """Kills all ranks by SIGKILL.

        HAZARD: a stopped process ends by nothing else, neither by Ray nor by its parent's end.
        """
        for pid, started in self._members.values():
            if started and _started(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _family(root: int) -> Iterator[int]:
    """Ids of a process and of its descendants that main threads have started."""
    yield root
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text()
    except OSError:
        return
    for child in children.split():
        yield from _family(int(child))


def _started(pid: int) -> str:
    """Start time of a process, which distinguishes it from a later one with the same id; empty if
    it has ended."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _cpu_ns(pid: int, stat: list[str]) -> int:
    """Time of a main thread on a core and in a run queue; ticks where the kernel counts no more."""
    try:
        running, waiting, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return (int(stat[11]) + int(stat[12])) * _TICK_NS
    return int(running) + int(waiting)


def _stat(pid: int) -> list[str]:
    """Fields of a main thread in /proc's stat, from the state on; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # a name may hold anything, brackets too
