"""Checks of a CUDA device's idle time between steps, for benchmarks."""

from __future__ import annotations

from cluster.bench.report import Check, at_most

_MAX_IDLE_US, _MAX_IDLE_SHARE = 100.0, 0.03
"""Maximum idle time of a CUDA device per step at overlap depth 1, in microseconds and as a fraction
of the step."""


def idle_checks(idle: list[tuple[float, float]]) -> list[Check]:
    """Checks of a CUDA device's idle time at overlap depth 1.

    Args:
        idle: idle time per step, in microseconds and as a fraction of the step, for each number of
            requests.
    """
    return [
        at_most("idle_gap_us", max(gap for gap, _ in idle), "us", _MAX_IDLE_US),
        at_most("idle_share", max(share for _, share in idle), "", _MAX_IDLE_SHARE),
    ]
