"""Autoscaling of gateways by their CPU usage."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Final

CPU: Final = "gateway/cpu"
"""Name of the metric with a gateway's CPU usage in cores."""
TARGET_CPU = 0.6
"""Target CPU usage per gateway in cores. A gateway's event loop is single-threaded, so near 1.0 all
streams are delayed; the headroom absorbs bursts while another gateway starts."""
UPSCALE_DELAY_S = 15.0
"""Delay in seconds before a gateway is started: the sync period of Kubernetes'
HorizontalPodAutoscaler. A single long prompt must not start a gateway."""
DOWNSCALE_DELAY_S = 300.0
"""Delay in seconds before a gateway is stopped: the default stabilization window of Kubernetes'
HorizontalPodAutoscaler."""


class CpuMeter:
    """Measures this process's CPU usage between readings."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._used_s = time.process_time()

    def read(self) -> float:
        """CPU usage in cores since the last reading."""
        at, used_s = time.monotonic(), time.process_time()
        share = (used_s - self._used_s) / max(at - self._at, 1e-3)
        self._at, self._used_s = at, used_s
        return share


class GatewayScaler:
    """Autoscaler of gateways: scales up if more are needed for UPSCALE_DELAY_S, and down if fewer
    suffice for DOWNSCALE_DELAY_S."""

    def __init__(self) -> None:
        self._needed: deque[tuple[float, int]] = deque()
        """Times and numbers of gateways needed, over the last DOWNSCALE_DELAY_S."""
        self._began_at: float | None = None

    def decide(self, num_processors: float, target: int, now: float) -> int:
        """The new target number of gateways.

        Args:
            num_processors: total CPU usage of all gateways in cores.
            target: current target.
            now: monotonic time in seconds.
        """
        began_at = self._began_at = now if self._began_at is None else self._began_at
        self._needed.append((now, max(math.ceil(num_processors / TARGET_CPU), 1)))
        while self._needed[0][0] < now - DOWNSCALE_DELAY_S:
            self._needed.popleft()
        if now - began_at >= UPSCALE_DELAY_S:
            needed = min(n for at, n in self._needed if at >= now - UPSCALE_DELAY_S)
            if needed > target:
                return needed
        if now - began_at >= DOWNSCALE_DELAY_S:
            return min(max(n for _, n in self._needed), target)
        return target
