"""Memory of each process over an hour: means per minute, and whether they climb."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from scipy.stats import binomtest, theilslopes

from cluster.bench.processes import resident_mib
from tests.support.chaos.kinds import Part
from tests.support.chaos.processes import MEASURED, Process

_FEWEST_MINUTES = 5
"""Of fewer no line can be drawn that says anything."""
_BLOCKS = 16
"""Of minutes. Of 15 rises 13 are needed at the level of a fleet's processes."""
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
    """Whether it rose in more blocks than by chance."""


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
    """How memory went from block to block, and whether it rose more often than chance has it.

    A leak rises in nearly all blocks, however little it is. Where something is needed for the
    first time, memory makes one step; the size of a rise has no say, therefore.
    """
    course = block_means(means, -(-len(means) // _BLOCKS))
    hours = np.arange(len(course)) * len(means) / len(course) * minute_s / _S_PER_H
    rises = np.diff(course) > 0.0
    by_chance = binomtest(int(rises.sum()), len(rises), 0.5, alternative="greater").pvalue
    return Slope(
        part=part.value,
        pid=pid,
        course=tuple(course),
        slope=float(theilslopes(course, hours).slope),
        climbs=bool(by_chance < 1.0 - level),
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
            "slope_mib_per_h": slope.slope,
            "course_mib": [round(mib, 2) for mib in slope.course],
        }
        for slope in slopes
    ]
