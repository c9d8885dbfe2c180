"""Event loop monitor: publishes heartbeats from a thread while the event loop is blocked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Time in seconds between checks of the loop. Gateways read heartbeats at the same rate once
a worker has been silent for 1 s, and fail the worker after 2 s without a new one."""
LATE_S = 0.5
"""Time in seconds without a beat after which the loop counts as blocked; normally, it beats every
0.2 s. Heartbeats are only published while the loop is blocked."""


class EventLoopMonitor:
    """Monitors an event loop, which calls `beat` periodically.

    The thread can run while the loop computes, since the interpreter switches threads every 5 ms.
    It publishes nothing while the loop is on time, or if the process is stopped or has exited.

    Args:
        publish: called on the monitoring thread to publish a heartbeat; its argument is different
            each time.
        clock: returns seconds.
    """

    def __init__(
        self, publish: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._publish = publish
        self._clock = clock
        self._beaten_at = clock()
        self._number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Starts monitoring the loop."""
        self._thread.start()

    def beat(self) -> None:
        """Records that the loop is running; called on the loop."""
        self._beaten_at = self._clock()

    def check(self) -> None:
        """Publishes a heartbeat if the loop is blocked."""
        if self._clock() - self._beaten_at > LATE_S:
            self._number += 1
            try:
                self._publish(b"%d" % self._number)
            except Exception as error:
                logger.warning("event loop blocked, cannot publish a heartbeat: %r", error)

    def close(self) -> None:
        """Stops monitoring."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self.check()
