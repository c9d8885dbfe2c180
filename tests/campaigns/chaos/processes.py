"""Processes of a fleet on this machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.directories import processes_of
from cluster.environment import START_HAPROXY
from cluster.launch import APPLICATION
from tests.campaigns.chaos.kinds import Part
from tests.support.fleet.processes import resident_mib

_TITLES = (
    (re.compile(r"ray::Rank0:(\w+)"), Part.RANK0),
    (re.compile(r"ray::Rank\d+:(\w+)"), Part.RANK),
    (re.compile(rf"ray::ServeReplica:{APPLICATION}:gateway"), Part.GATEWAY),
    (re.compile(rf"ray::ServeReplica:{APPLICATION}:worker-"), Part.FRONT),
    (re.compile(r"ray::HAProxyManager"), Part.MANAGER),
    (re.compile(r"ray::ProxyActor"), Part.PROXY),
    (re.compile(r"ray::ServeController"), Part.CONTROLLER),
    (re.compile(r"\S*/gcs_server -"), Part.GCS),
    (re.compile(r"\S+ -m worker\.rank\.main "), Part.STEP),
    (re.compile(r"\S+ -m worker\.frontend\.grammar\.compiling "), Part.COMPILER),
    (re.compile(r"\S*/haproxy -"), Part.HAPROXY),
    (re.compile(rf"\S+ -\w+ -c {re.escape(START_HAPROXY)} "), Part.GUARD),
)
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
MEASURED = (Part.GATEWAY, Part.FRONT, Part.RANK0, Part.RANK, Part.STEP, Part.HAPROXY)
"""Parts whose memory is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process of the fleet."""

    part: Part
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of a part's processes."""

    processes: int
    mib: float
    """Total resident memory."""


def part_of(command: str) -> Part | None:
    """Part of the process with this command line; None if it is not a target of faults."""
    return next((part for title, part in _TITLES if title.match(command)), None)


def find(directory: Path) -> list[Process]:
    """Running or stopped processes of the fleet with this private folder, oldest first."""
    found = []
    for pid in sorted(processes_of(directory)):
        with suppress(psutil.Error):
            part = part_of(" ".join([*psutil.Process(pid).cmdline(), ""]))
            if part is not None and state(pid) not in _ENDED:
                found.append(Process(part=part, pid=pid))
    return found


def count(processes: Sequence[Process]) -> Counter[Part]:
    """Number of processes by part."""
    return Counter(process.part for process in processes)


def memory(processes: Sequence[Process]) -> dict[Part, Memory]:
    """Resident memory, keyed by part."""
    return {
        part: Memory(processes=len(pids), mib=sum(map(resident_mib, pids)))
        for part in MEASURED
        if (pids := [process.pid for process in processes if process.part is part])
    }


def state(pid: int) -> str:
    """Status with psutil's name: running, sleeping, stopped or zombie; dead if the process does not
    exist."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return str(psutil.STATUS_DEAD)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    return state(pid) in _ENDED


def name_in_logs(pid: int, names: Sequence[str]) -> str | None:
    """The one of `names` that is part of the name of an open file, such as a replica's log; None if
    there is none."""
    with suppress(psutil.Error):
        files = [Path(file.path).name for file in psutil.Process(pid).open_files()]
        return next((name for name in names if any(name in file for file in files)), None)
    return None
