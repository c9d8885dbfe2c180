"""Kills HAProxy or its manager, and measures the outage."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from typing import Self

import psutil

HAPROXY, MANAGER = "haproxy", "ray::HAProxyManager"
_ASK_TIMEOUT_S = 30.0
_BACK_TIMEOUT_S = 240.0
_POLL_S = 0.02
_REPLACED_POLL_S = 0.25
"""Seconds between checks: Serve takes about 20 s to detect a lost manager, and listing all
processes takes milliseconds."""


class Probe:
    """Sends requests continuously, each over a new connection, until the end of the `with` block.

    Args:
        url: URL that responds with a status below 400.
        interval_s: seconds between a response and the next request.
    """

    def __init__(self, url: str, interval_s: float = 0.01) -> None:
        self.answers: list[float] = []
        """Times of responses on the monotonic clock."""
        self.failures: list[float] = []
        self._url = url
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def silence_s(self, begin: float, end: float) -> float:
        """Longest time without a response between two times."""
        times = [begin, *(at for at in self.answers if begin <= at <= end), end]
        return max(later - earlier for earlier, later in pairwise(times))

    def num_failed(self, begin: float) -> int:
        """Number of failed requests since `begin`."""
        return sum(at >= begin for at in self.failures)

    def wait_answer(self, begin: float) -> None:
        """Waits for the response to a request that was sent after `begin`.

        Raises:
            TimeoutError: there was none.
        """
        wait_until(lambda: sum(at > begin for at in self.answers[-3:]) > 1, "an answer")

    def _ask_on(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                with urllib.request.urlopen(self._url, timeout=_ASK_TIMEOUT_S) as response:
                    response.read()
            except (OSError, HTTPException):  # a response may be cut within its headers or body
                self.failures.append(time.monotonic())
            else:
                self.answers.append(time.monotonic())


@dataclass
class Victims:
    """The two processes of a fleet to kill."""

    processes: Callable[[], Sequence[int]]
    """Returns all processes of the fleet."""
    killed: set[int] = field(default_factory=set)

    def find(self, name: str) -> list[int]:
        """Processes with this name, or with a title that starts with it. Excludes a replaced
        HAProxy, which exits with its last connection."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                title = "".join(process.cmdline()[:1])
                is_it = process.name() == name or title.startswith(name)
                if is_it and (name != HAPROXY or _listens(process)):
                    found.append(pid)
        return found

    def kill(self, name: str) -> float:
        """Kills the only process of this name; returns the time."""
        (pid,) = self.find(name)
        self.killed |= {pid, *self.find(HAPROXY)}
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return began

    def wait_back(self) -> int:
        """Waits for the HAProxy that replaces the killed one. The killed process exists until it is
        reaped.

        Raises:
            TimeoutError: there was none.
        """
        back: list[int] = []

        def is_back() -> bool:
            back[:] = self.find(HAPROXY)
            return len(back) == 1 and not self.killed & set(back)

        wait_until(is_back, "another HAProxy")
        return back[0]

    def wait_replaced(self) -> None:
        """Waits until all processes of the last kill have been replaced.

        Raises:
            TimeoutError: they were not.
        """

        def is_replaced() -> bool:
            now = [self.find(HAPROXY), self.find(MANAGER)]
            return all(len(pids) == 1 and not self.killed & set(pids) for pids in now)

        wait_until(is_replaced, "another HAProxy and its manager", _REPLACED_POLL_S)


def _listens(process: psutil.Process) -> bool:
    """Whether a HAProxy listens; a draining one does not."""
    connections = process.net_connections(kind="tcp")
    return any(connection.status == psutil.CONN_LISTEN for connection in connections)


def wait_until(holds: Callable[[], bool], what: str, poll_s: float = _POLL_S) -> None:
    """Waits until the condition holds. Raises TimeoutError on timeout."""
    deadline = time.monotonic() + _BACK_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come in {_BACK_TIMEOUT_S:.0f} s")
        time.sleep(poll_s)
