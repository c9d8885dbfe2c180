"""Processes of a fleet by part: their ids, CPU time and memory."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

_MIB = 2**20


class CpuMeter:
    """CPU time of groups of processes among the descendants of this one.

    Args:
        parts: command-line prefixes of each group's processes (`ray::Class...` for Ray's workers),
            or file names of their executables, keyed by group.

    Raises:
        RuntimeError: a part has no process.
    """

    def __init__(self, parts: Mapping[str, tuple[str, ...]]) -> None:
        self._pids = find_parts(parts)
        self._start = self._read()

    def seconds(self) -> dict[str, float]:
        """User and system seconds of each group since this meter was created.

        Raises:
            RuntimeError: a process has ended, so that its time is lost.
        """
        now = self._read()
        return {name: now[name] - self._start[name] for name in now}

    def num_processes(self) -> dict[str, int]:
        """Number of processes of each group."""
        return {name: len(pids) for name, pids in self._pids.items()}

    def _read(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._pids.items()}


def find_parts(parts: Mapping[str, tuple[str, ...]]) -> dict[str, list[int]]:
    """Process ids of each part among the descendants of this process; see CpuMeter."""
    found = descendants()
    pids = {
        name: [pid for pid, command in found if _matches(command, starts)]
        for name, starts in parts.items()
    }
    missing = [name for name, members in pids.items() if not members]
    if missing:
        raise RuntimeError(f"no process found for: {', '.join(missing)}")
    return pids


def cpu_seconds(pid: int) -> float:
    """User and system time of a process in seconds. Raises RuntimeError if it has exited."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error as error:
        raise RuntimeError(f"process {pid} ended while it was measured") from error
    return float(times.user + times.system)


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB; 0 if it has exited."""
    try:
        return float(psutil.Process(pid).memory_info().rss / _MIB)
    except psutil.Error:
        return 0.0


def descendants(root: int | None = None) -> list[tuple[int, str]]:
    """Process ids and command lines of all descendants of `root`, of this process by default."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            found.append((process.pid, " ".join(process.cmdline())))
        except psutil.Error:
            continue  # ended meanwhile, or not ours to read
    return found


def _matches(command: str, starts: tuple[str, ...]) -> bool:
    program = command.split(" ", 1)[0].rsplit("/", 1)[-1]
    return command.startswith(starts) or program in starts
