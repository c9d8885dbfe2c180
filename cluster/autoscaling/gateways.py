"""Autoscaling of gateways: their number follows the CPU time that they use."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Final

CPU: Final = "gateway/cpu"
"""Name of the metric with the processors that a gateway uses."""
TARGET_CPU = 0.6
"""Target of processors used per gateway. Its event loop is one thread: near 1.0 every stream waits
for it, and the rest absorbs bursts for as long as another gateway takes to start."""
UPSCALE_DELAY_S = 15.0
"""Seconds for which more gateways must be needed before one is started: the period at which
Kubernetes' HorizontalPodAutoscaler looks. One long prompt must not start a gateway."""
DOWNSCALE_DELAY_S = 300.0
"""Seconds for which fewer gateways must suffice before one is stopped: the default stabilization
window of Kubernetes' HorizontalPodAutoscaler."""


class CpuMeter:
    """Processors that this process used between two readings."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._used_s = time.process_time()

    def read(self) -> float:
        """CPU seconds per second since the last reading."""
        at, used_s = time.monotonic(), time.process_time()
        share = (used_s - self._used_s) / max(at - self._at, 1e-3)
        self._at, self._used_s = at, used_s
        return share


class GatewayScaler:
    """Decides the number of gateways: more if needed for UPSCALE_DELAY_S, fewer if they suffice for
    DOWNSCALE_DELAY_S."""

    def __init__(self) -> None:
        self._wanted: deque[tuple[float, int]] = deque()
        """Times of the last DOWNSCALE_DELAY_S, and how many gateways were needed."""
        self._began_at: float | None = None

    def decide(self, num_processors: float, target: int, now: float) -> int:
        """The number of gateways to run.

        Args:
            num_processors: processors that all gateways use together.
            target: number of gateways that were decided before.
            now: monotonic time in seconds.
        """
        began_at = self._began_at = now if self._began_at is None else self._began_at
        self._wanted.append((now, max(math.ceil(num_processors / TARGET_CPU), 1)))
        while self._wanted[0][0] < now - DOWNSCALE_DELAY_S:
            self._wanted.popleft()
        if now - began_at >= UPSCALE_DELAY_S:
            needed = min(n for at, n in self._wanted if at >= now - UPSCALE_DELAY_S)
            if needed > target:
                return needed
        if now - began_at >= DOWNSCALE_DELAY_S:
            return min(max(n for _, n in self._wanted), target)
        return target
