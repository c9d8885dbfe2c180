"""Resident memory of a fleet's processes over time."""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from tests.support.fleet.processes import find_parts, resident_mib

_INTERVAL_S = 0.5


class MemorySamples:
    """Resident memory of one process over time."""

    def __init__(self) -> None:
        self._times = array("d")
        self._mib = array("f")

    def add(self, at: float, mib: float) -> None:
        """Adds a sample."""
        self._mib.append(mib)
        self._times.append(at)

    def growth(self, since: float, until: float) -> float:
        """Maximum growth in MiB, relative to the second before."""
        return max(self._between(since, until), default=0.0) - self._middle(since - 1.0, since)

    def kept(self, since: float, now: float) -> float:
        """Growth in MiB that remains in the last half second."""
        return self._middle(now - 0.5, now) - self._middle(since - 1.0, since)

    def mean(self, since: float, until: float) -> float:
        """Mean in MiB between two times; 0 if there are no samples."""
        values = self._between(since, until)
        return statistics.fmean(values) if values else 0.0

    def _middle(self, since: float, until: float) -> float:
        values = self._between(since, until)
        if values:
            return statistics.median(values)
        # The sampler may have been delayed: uses the sample before.
        place = bisect_left(self._times, since)
        return self._mib[place - 1] if place else 0.0

    def _between(self, since: float, until: float) -> array[float]:
        return self._mib[bisect_left(self._times, since) : bisect_right(self._times, until)]


class MemorySampler:
    """Samples the memory of processes within a `with` block.

    Args:
        period_s: seconds between samples of all processes.
    """

    def __init__(self, period_s: float) -> None:
        self.samples: dict[int, MemorySamples] = {}
        """Samples, keyed by process id, with times on the monotonic clock."""
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def follow(self, pids: Iterable[int]) -> None:
        """Adds processes to sample."""
        for pid in pids:
            self.samples[pid] = MemorySamples()

    def _watch(self) -> None:
        while not self._ended.wait(self._period_s):
            for pid, samples in list(self.samples.items()):
                samples.add(time.monotonic(), resident_mib(pid))


class MemoryWatch(MemorySampler):
    """Samples the memory of groups of processes.

    Args:
        parts: see CpuMeter.

    Raises:
        RuntimeError: a part has no process.
    """

    def __init__(self, parts: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(_INTERVAL_S)
        self._pids = find_parts(parts)
        self._began = time.monotonic()
        for pids in self._pids.values():
            self.follow(pids)

    def mean_mib(self, since_s: float, until_s: float) -> dict[str, float]:
        """Mean of each part between two times after the start; 0 if there are no samples."""
        since, until = self._began + since_s, self._began + until_s
        return {
            name: sum(self.samples[pid].mean(since, until) for pid in pids)
            for name, pids in self._pids.items()
        }
