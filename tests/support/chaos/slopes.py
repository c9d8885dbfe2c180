"""Memory of each process over an hour: means per minute, and whether they climb."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from scipy.stats import linregress, t

from cluster.bench.processes import resident_mib
from tests.support.chaos.kinds import Part
from tests.support.chaos.processes import MEASURED, Process

_FEWEST_MINUTES = 5
"""Of fewer no line can be drawn that says anything."""
_LEVEL = 0.95
"""That none of all intervals misses its slope, if nothing climbs."""
_S_PER_H = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """How a process's memory went, in MiB per hour."""

    part: str
    pid: int
    mib: float
    """At the end."""
    slope: float
    low: float
    """Lower end of the interval of the slope."""
    high: float
    minutes: int

    @property
    def climbs(self) -> bool:
        """Whether that is not by chance."""
        return self.low > 0.0


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
    """A line through them, and the interval of its slope at that level.

    Minutes that follow each other are alike: memory goes in steps. As many of them count as
    their residuals' correlation leaves.
    """
    hours = np.arange(len(means)) * minute_s / _S_PER_H
    line = linregress(hours, means)
    rest = np.asarray(means) - (line.intercept + line.slope * hours)
    worth = len(means) * _independent_share(rest)
    freedom = max(worth - 2.0, 1.0)
    error = float(line.stderr) * np.sqrt(max(len(means) - 2, 1) / freedom)
    half = float(t.ppf(0.5 + 0.5 * level, freedom)) * float(error)
    return Slope(
        part=part.value,
        pid=pid,
        mib=means[-1],
        slope=float(line.slope),
        low=float(line.slope) - half,
        high=float(line.slope) + half,
        minutes=len(means),
    )


def _independent_share(rest: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """By the correlation of neighbours, as of a first-order autoregression."""
    spread = float(np.dot(rest, rest))
    if spread <= 1e-12:
        return 1.0
    alike = min(max(float(np.dot(rest[1:], rest[:-1])) / spread, 0.0), 0.95)
    return (1.0 - alike) / (1.0 + alike)


def as_rows(slopes: Sequence[Slope]) -> list[Mapping[str, object]]:
    """For reports."""
    return [
        {
            "process": f"{slope.part} {slope.pid}",
            "mib": slope.mib,
            "slope_mib_per_h": slope.slope,
            "low": slope.low,
            "high": slope.high,
            "minutes": slope.minutes,
        }
        for slope in slopes
    ]
