"""Resident memory of the processes that serve, over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from cluster.bench.processes import find_parts, resident_mib

_INTERVAL_S = 0.5


class MemoryWatch:
    """Samples the memory of groups of processes while its block runs.

    Args:
        parts: as CpuMeter's.

    Raises:
        RuntimeError: a part has no process.
    """

    def __init__(self, parts: Mapping[str, tuple[str, ...]]) -> None:
        self._pids = find_parts(parts)
        self._began = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._samples: dict[str, list[tuple[float, float]]] = {name: [] for name in self._pids}

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

    def mean_mib(self, since_s: float, until_s: float) -> dict[str, float]:
        """Mean of each part between two moments after the start; 0 where none was sampled."""
        means = {}
        for name, samples in self._samples.items():
            values = [mib for at, mib in samples if since_s <= at <= until_s]
            means[name] = sum(values) / len(values) if values else 0.0
        return means

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            at = time.perf_counter() - self._began
            for name, pids in self._pids.items():
                self._samples[name].append((at, sum(map(resident_mib, pids))))
