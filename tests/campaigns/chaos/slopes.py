"""Memory of each process over an hour: means per minute, and whether they climb."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import scipy  # imports its parts when they are first used; statistics take a second

from tests.campaigns.chaos.kinds import Part
from tests.campaigns.chaos.processes import MEASURED, Process
from tests.support.fleet.processes import resident_mib

_FEWEST_MINUTES = 5
"""Of fewer no line can be drawn that says anything."""
_BLOCKS = 16
"""Of minutes, at most: an hour less its first ten minutes has 13 of four minutes each."""
_LEAST_RISE_MIB = 0.5
"""Of a leak in either half of the time. CPython takes memory from the system in arenas of 1 MiB
(ARENA_BITS is 20 in its obmalloc), so less than one over both halves cannot be told from zero:
below 1.2 MiB/h, that is, where 50 minutes are measured."""
_LEVEL = 0.95
"""That no process is said to climb, if none does."""
_S_PER_H = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """How a process's memory went."""

    part: str
    pid: int
    course: tuple[float, ...]
    """Means of its blocks of minutes, in MiB."""
    slope: float
    """The median of all pairs of blocks, in MiB per hour."""
    climbs: bool
    """Whether it rose more often than by chance, and in the second half as in the first."""


class SlopeWatch:
    """Samples the memory of processes while its block runs.

    Args:
        processes: those whose part is measured are looked at.
        every_s: between two samples.
    """

    def __init__(self, processes: Sequence[Process], every_s: float) -> None:
        self._parts = {p.pid: p.part for p in processes if p.part in MEASURED}
        self._every_s = every_s
        self._samples: dict[int, list[tuple[float, float]]] = {pid: [] for pid in self._parts}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def slopes(self, since_s: float, minute_s: float) -> list[Slope]:
        """Of processes that lived from `since_s`, on the monotonic clock, to the end."""
        minutes = {
            pid: minute_means([(at, mib) for at, mib in samples if at >= since_s], minute_s)
            for pid, samples in self._samples.items()
            if samples and samples[-1][1] > 0.0
        }
        long = {pid: means for pid, means in minutes.items() if len(means) >= _FEWEST_MINUTES}
        level = 1.0 - (1.0 - _LEVEL) / max(1, len(long))
        return [
            fit_slope(self._parts[pid], pid, means, minute_s, level) for pid, means in long.items()
        ]

    @property
    def gone(self) -> int:
        """How many have ended."""
        return sum(bool(s) and s[-1][1] == 0.0 for s in self._samples.values())

    def _watch(self, read: Callable[[int], float] = resident_mib) -> None:
        while not self._ended.wait(self._every_s):
            now = time.monotonic()
            for pid, samples in self._samples.items():
                samples.append((now, read(pid)))


def minute_means(samples: Sequence[tuple[float, float]], minute_s: float) -> list[float]:
    """Means of whole minutes from the first sample on."""
    minutes: dict[int, list[float]] = {}
    for at, value in samples:
        minutes.setdefault(int((at - samples[0][0]) / minute_s), []).append(value)
    whole = sorted(minutes)[:-1]  # the last one has just begun
    return [float(np.mean(minutes[minute])) for minute in whole]


def fit_slope(part: Part, pid: int, means: Sequence[float], minute_s: float, level: float) -> Slope:
    """How memory went from block to block, and whether it climbs as a leak does.

    A leak takes as much in the second half as in the first, smoothly or by steps. An allocator that
    warms up levels off, and where something is needed for the first time, memory makes one step.
    So two things are asked for: that later blocks are larger than earlier ones more often than
    chance has it (Kendall's test), and that either half rises by itself (by the median slope of its
    pairs of blocks). A process that warms up in the first half and makes a step in the second is
    named, too: its course tells.

    What requests leave behind is found sooner by their number: tests/worker/frontend does so.

    Args:
        part: what the process is.
        pid: its id.
        means: of its minutes, in MiB.
        minute_s: seconds of one of them.
        level: of the test.
    """
    course = block_means(means, -(-len(means) // _BLOCKS))
    numbers = np.arange(len(course))
    half = len(course) // 2
    halves = (course[: half + 1], course[half:])  # the block in the middle belongs to both
    rises = [half * float(scipy.stats.theilslopes(blocks).slope) for blocks in halves]
    by_chance = scipy.stats.kendalltau(numbers, course, alternative="greater").pvalue
    hours_per_block = len(means) / len(course) * minute_s / _S_PER_H
    return Slope(
        part=part.value,
        pid=pid,
        course=tuple(course),
        slope=float(scipy.stats.theilslopes(course).slope) / hours_per_block,
        climbs=bool(by_chance < 1.0 - level) and min(rises) >= _LEAST_RISE_MIB,
    )


def block_means(means: Sequence[float], size: int) -> list[float]:
    """Means of `size` minutes that follow each other, the last ones maybe of fewer.

    Neighbouring minutes are alike, and would count as more than they tell.
    """
    return [float(np.mean(means[first : first + size])) for first in range(0, len(means), size)]


def as_rows(slopes: Sequence[Slope]) -> list[Mapping[str, object]]:
    """For reports."""
    return [
        {
            "process": f"{slope.part} {slope.pid}",
            "climbs": slope.climbs,
            "slope_mib_per_h": slope.slope,
            "course_mib": [round(mib, 2) for mib in slope.course],
        }
        for slope in slopes
    ]
