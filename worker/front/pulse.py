"""A sign of life of a process whose event loop is late, from another thread than the loop's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Between two checks of the loop. Gateways check as often, and lose a worker after 2 s: they see
four signs before."""
LATE_S = 0.5
"""After which a loop that beats every 0.2 s is late; before, nothing is published."""


class Pulse:
    """Watches one event loop, which is to call `beat` all the time.

    A thread runs every 5 ms beside a loop that computes. It publishes nothing while the loop
    runs, and nothing of a process that is stopped or gone.

    Args:
        publish: takes a value that is new each time; called on a thread of its own.
        clock: in seconds.
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
        """Watches from now on."""
        self._thread.start()

    def beat(self) -> None:
        """The loop has come round."""
        self._beaten_at = self._clock()

    def check(self) -> None:
        """Gives a sign of life where the loop is late."""
        if self._clock() - self._beaten_at > LATE_S:
            self._number += 1
            try:
                self._publish(b"%d" % self._number)
            except Exception as error:
                logger.warning("the event loop is late, and that cannot be published: %r", error)

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self.check()
