"""Pulse: signs of life of a process whose event loop is late, from a thread beside the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Seconds between two checks of the loop. Gateways check as often, and give a worker up after 2 s:
they see four signs before."""
LATE_S = 0.5
"""Seconds without a beat after which the loop, which beats every 0.2 s, is late. Signs of life are
published only then."""


class Pulse:
    """Watches one event loop, which calls `beat` periodically.

    The thread gets its turn while the loop computes, since the interpreter switches threads every
    5 ms. It publishes nothing while the loop is on time, nor if the process is stopped or gone.

    Args:
        publish: publishes a value that is new each time; called on the watching thread.
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
        """Starts to watch the loop."""
        self._thread.start()

    def beat(self) -> None:
        """Notes that the loop runs; called on the loop."""
        self._beaten_at = self._clock()

    def check(self) -> None:
        """Publishes a sign of life if the loop is late."""
        if self._clock() - self._beaten_at > LATE_S:
            self._number += 1
            try:
                self._publish(b"%d" % self._number)
            except Exception as error:
                logger.warning("the event loop is late, and that cannot be published: %r", error)

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self.check()
