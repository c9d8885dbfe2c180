"""The processes of a rank group as the system shows them: stopped, at work, or asleep."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_STOPPED, _AT_WORK = "T", "RD"
"""States in /proc (proc_pid_stat(5)): running or waiting for a core, and waiting for a disk."""


class Glance(NamedTuple):
    """What the processes do at one moment."""

    stopped: list[str]
    """Processes that a signal has stopped, by name and number."""
    at_work: bool
    """Whether any runs, or would if it had a core."""
    cpu_ticks: int
    """Time that their main threads have had so far, in the system's clock ticks."""


class RankProcesses:
    """Looks at the main threads, which launch or compute steps, and at what they have started.

    Other threads show nothing: Ray's run in a rank that hangs as in any other. Children count,
    since a compiler may be one.

    Args:
        pids: ids by name; all on this node.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._members = {name: (pid, _started(pid)) for name, pid in pids.items()}

    def glance(self) -> Glance:
        """How they are. One that has ended does nothing."""
        stopped: list[str] = []
        seen: dict[int, str] = {}
        ticks = 0
        for name, (root, _) in self._members.items():
            for pid in _family(root):
                if pid in seen or not (stat := _stat(pid)):
                    continue
                seen[pid] = stat[0]
                ticks += int(stat[11]) + int(stat[12])
            if seen.get(root) == _STOPPED:
                stopped.append(f"{name} (process {root}) is stopped")
        return Glance(stopped, any(state in _AT_WORK for state in seen.values()), ticks)

    def kill(self) -> None:
        """Ends them all.

        HAZARD: a process that is stopped heeds nothing else, neither Ray nor its parent's end.
        """
        for pid, started in self._members.values():
            if started and _started(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _family(root: int) -> Iterator[int]:
    """A process and what it, and they, have started from their main threads."""
    yield root
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text()
    except OSError:
        return
    for child in children.split():
        yield from _family(int(child))


def _started(pid: int) -> str:
    """When a process began, which distinguishes it from a later one of the same number; empty for
    none."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _stat(pid: int) -> list[str]:
    """Fields of a main thread in /proc's stat, from the state on; none where it has ended."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # a name may hold anything, brackets too
