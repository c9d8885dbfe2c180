"""Retries of failed startups: which errors are retried, and after which delays.

Serve gives up on a deployment after a few failed startups of its replicas. Transient failures are
therefore retried in the replica's constructor, which has no timeout in Serve. Permanent failures
are raised immediately.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The exponential backoff of gRPC's connections (doc/connection-backoff.md).
FIRST_DELAY_S = 1.0
DELAY_FACTOR = 1.6
MAX_DELAY_S = 120.0
JITTER = 0.2
"""Maximum deviation of each delay, as a fraction of it, so that the replicas of a fleet do not all
retry at the same time."""
MAX_REASON_CHARS = 300
"""Maximum length in characters of a reason in one line; the log has the full text."""

HOPELESS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    NotImplementedError,
    PermissionError,
)
"""Exceptions caused by an invalid configuration, a corrupt checkpoint or a bug, which every attempt
would raise again. All other exceptions come from disks, networks, devices and processes, including
RuntimeError, which Gloo, NCCL and CUDA raise."""


class Unavailable(ValueError):
    """Model files are unavailable, possibly only temporarily, because of a mount, a copy in
    progress, or the Hub."""


class RemoteFailure(RuntimeError):
    """Failure of another process.

    Args:
        message: error message; its last line is the root cause.
        heals: whether a retry may succeed, according to `may_heal` in that process.
    """

    def __init__(self, message: str, *, heals: bool = True) -> None:
        super().__init__(message)
        self.heals = heals


class StartDelay(msgspec.Struct, frozen=True, kw_only=True):
    """A failed startup that will be retried."""

    reason: str
    """Reason of the last failure in one line."""
    attempts: int
    """Number of failed attempts."""
    next_try: float
    """Time of the next attempt, as Unix time in seconds."""


StartReport = Callable[[StartDelay | None], None]
"""Callback that receives each delay, and None once a delayed startup has succeeded or failed."""


def may_heal(error: BaseException) -> bool:
    """Whether a retry may succeed after `error`."""
    if isinstance(error, RemoteFailure):
        return error.heals
    return isinstance(error, Unavailable) or not isinstance(error, HOPELESS)


def delays(rng: Callable[[], float] = random.random) -> Iterator[float]:
    """Yields the seconds to wait before the second attempt, the third, and so on, endlessly.

    Args:
        rng: returns uniform random numbers in [0, 1).
    """
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s * (1.0 + JITTER * (2.0 * rng() - 1.0))
        delay_s = min(delay_s * DELAY_FACTOR, MAX_DELAY_S)


async def until_started(
    attempt: Callable[[], Awaitable[T]],
    *,
    retry_s: float,
    report: StartReport,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    rng: Callable[[], float] = random.random,
) -> T:
    """Calls `attempt` until it succeeds; returns its result.

    Args:
        attempt: makes one complete attempt.
        retry_s: time in seconds, counted from the call, during which retries may begin; 0 for a
            single attempt, inf for no limit.
        report: called with each delay, then with None (see `StartReport`).
        clock: returns seconds.
        sleep: waits for a number of seconds.
        rng: returns uniform random numbers in [0, 1).

    Raises:
        Exception: a permanent error of any attempt, or the error of the last attempt.
    """
    began = clock()
    attempts = 0
    reported = False
    try:
        for delay_s in delays(rng):
            try:
                return await attempt()
            except Exception as error:
                attempts += 1
                if not may_heal(error) or clock() + delay_s - began > retry_s:
                    raise
                logger.warning(
                    "start failed %d time(s), retrying in %.1f s: %s", attempts, delay_s, error
                )
                reason, now = last_line(error), time.time()
                report(StartDelay(reason=reason, attempts=attempts, next_try=now + delay_s))
                reported = True
            await sleep(delay_s)
        raise AssertionError("delays never end")
    finally:
        if reported:
            report(None)


def last_line(error: BaseException) -> str:
    """Reduces an error to one line: the last line of its message, which has the root cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[-1] if lines else type(error).__name__
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."
