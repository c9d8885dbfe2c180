"""CPU time of the processes that serve, from /proc (Linux)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PPID, _UTIME, _STIME = 1, 11, 12
"""Places in /proc/PID/stat, counted after the command's closing parenthesis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A running process."""

    pid: int
    parent: int
    command: str
    """Its command line; Ray's workers put `ray::Class...` there."""


class CpuMeter:
    """CPU seconds of groups of processes among the descendants of this one.

    Args:
        parts: for each part, beginnings of command lines (or of the program's file name) of its
            processes.

    Raises:
        RuntimeError: a part has no process.
    """

    def __init__(self, parts: Mapping[str, tuple[str, ...]]) -> None:
        self._pids = find_parts(parts)
        self._start = self._read()

    def seconds(self) -> dict[str, float]:
        """User and system time of each part since this meter was made, all threads together.

        Raises:
            RuntimeError: a process ended in between, so that its time is lost.
        """
        now = self._read()
        return {name: now[name] - self._start[name] for name in now}

    def num_processes(self) -> dict[str, int]:
        """How many processes each part has."""
        return {name: len(pids) for name, pids in self._pids.items()}

    def _read(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._pids.items()}


def find_parts(parts: Mapping[str, tuple[str, ...]]) -> dict[str, list[int]]:
    """Process ids of each part among the descendants of this process; see CpuMeter."""
    found = descendants(os.getpid())
    pids = {
        name: [process.pid for process in found if _matches(process, starts)]
        for name, starts in parts.items()
    }
    missing = [name for name, members in pids.items() if not members]
    if missing:
        raise RuntimeError(f"no process found for: {', '.join(missing)}")
    return pids


def cpu_seconds(pid: int) -> float:
    """User and system time of a process. Raises RuntimeError if it is gone."""
    try:
        values = _stat(pid)
    except OSError as error:
        raise RuntimeError(f"process {pid} ended while it was measured") from error
    return (int(values[_UTIME]) + int(values[_STIME])) / _TICKS_PER_S


def descendants(root: int) -> list[Process]:
    """Children of `root`, their children, and so on."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            pid = int(entry.name)
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            process = Process(pid=pid, parent=int(_stat(pid)[_PPID]), command=command)
        except OSError:
            continue  # ended meanwhile, or not ours to read
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    level = [root]
    while level:
        born = [child for pid in level for child in children.get(pid, [])]
        found.extend(born)
        level = [child.pid for child in born]
    return found


def _matches(process: Process, starts: tuple[str, ...]) -> bool:
    program = process.command.split(" ", 1)[0].rsplit("/", 1)[-1]
    return process.command.startswith(starts) or program in starts


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()
