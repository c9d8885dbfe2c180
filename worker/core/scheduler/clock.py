"""Where the scheduler's time comes from."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds from some fixed moment, such as `time.monotonic`; the only time that decisions see."""
