"""Stopwatch for wall and CPU time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class Stopwatch:
    """Durations of one kind of work in seconds: wall time, and CPU time of this thread."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._began = (0.0, 0.0)

    def __enter__(self) -> None:
        self._began = (time.perf_counter(), time.thread_time())

    def __exit__(self, *_: Any) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        self.wall.append(wall - self._began[0])
        self.cpu.append(cpu - self._began[1])

    def clear(self) -> None:
        """Discards all durations."""
        self.wall.clear()
        self.cpu.clear()

    @property
    def mean_cpu_s(self) -> float:
        """Mean CPU time; 0 if there are no measurements."""
        return float(np.mean(self.cpu)) if self.cpu else 0.0
