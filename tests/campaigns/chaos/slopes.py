"""Memory growth of each process over an hour, from means per minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import scipy  # imported lazily: its submodules take a second

from tests.campaigns.chaos.kinds import Part
from tests.campaigns.chaos.processes import MEASURED, Process
from tests.support.fleet.processes import resident_mib

_FEWEST_MINUTES = 5
"""Minimum number of minutes for a meaningful fit."""
_BLOCKS = 16
"""Maximum number of blocks: an hour without its first ten minutes has 13 blocks of four minutes."""
_LEAST_RISE_MIB = 0.5
"""Minimum growth in either half of the time that counts as a leak. CPython allocates arenas of 1
MiB (ARENA_BITS is 20 in its obmalloc), so growth of less than one arena over both halves cannot be
distinguished from zero: 1.2 MiB/h for a measurement of 50 minutes."""
_LEVEL = 0.95
"""Probability that no process is reported if no process leaks."""
_S_PER_H = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """Memory growth of a process."""

    part: str
    pid: int
    course: tuple[float, ...]
    """Means over blocks of minutes, in MiB."""
    slope: float
    """Median slope over all pairs of blocks, in MiB per hour."""
    climbs: bool
    """Whether memory grows significantly and in both halves of the time."""


class SlopeWatch:
    """Samples the memory of processes within a `with` block.

    Args:
        processes: returns the fleet's processes; those of MEASURED parts are sampled.
        every_s: seconds between samples.
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
        """Slopes of processes that lived from `since_s` (monotonic clock) to the end."""
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
        """Number of sampled processes that have ended."""
        return sum(bool(s) and s[-1][1] == 0.0 for s in self._samples.values())

    def _watch(self, read: Callable[[int], float] = resident_mib) -> None:
        while not self._ended.wait(self._every_s):
            now = time.monotonic()
            for pid, samples in self._samples.items():
                samples.append((now, read(pid)))


def minute_means(samples: Sequence[tuple[float, float]], minute_s: float) -> list[float]:
    """Means of whole minutes, starting at the first sample."""
    minutes: dict[int, list[float]] = {}
    for at, value in samples:
        minutes.setdefault(int((at - samples[0][0]) / minute_s), []).append(value)
    whole = sorted(minutes)[:-1]  # the last minute is incomplete
    return [float(np.mean(minutes[minute])) for minute in whole]


def fit_slope(part: Part, pid: int, means: Sequence[float], minute_s: float, level: float) -> Slope:
    """Memory growth over blocks of minutes, and whether it looks like a leak.

    A leak grows as much in the second half as in the first, continuously or in steps. An allocator
    that warms up levels off, and code that runs for the first time causes a single step. A leak is
    therefore reported if two conditions hold: later blocks are significantly larger than earlier
    ones (Kendall's test), and each half grows by itself (median slope over its pairs of blocks). A
    process that warms up in the first half and has a single step in the second is also reported;
    `course` shows it. Counting objects finds leaks per request sooner; see tests/worker/frontend.

    Args:
        part: part of the process.
        pid: process id.
        means: means per minute, in MiB.
        minute_s: seconds per minute of `means`.
        level: level of the test.
    """
    course = block_means(means, -(-len(means) // _BLOCKS))
    numbers = np.arange(len(course))
    half = len(course) // 2
    halves = (course[: half + 1], course[half:])  # both halves contain the middle block
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
    """Means of `size` consecutive minutes; the last block may be shorter. Adjacent minutes are
    correlated, so they would count as more observations than they are."""
    return [float(np.mean(means[first : first + size])) for first in range(0, len(means), size)]


def as_rows(slopes: Sequence[Slope]) -> list[Mapping[str, object]]:
    """Rows for reports."""
    return [
        {
            "process": f"{slope.part} {slope.pid}",
            "climbs": slope.climbs,
            "slope_mib_per_h": slope.slope,
            "course_mib": [round(mib, 2) for mib in slope.course],
        }
        for slope in slopes
    ]
