"""Retries of starts that fail: which are tried again, and when.

Serve gives up a deployment for good once its replicas have failed to start a few times. So a
failure that may heal is waited for inside the replica's constructor, for which Serve waits without
a limit; one that cannot is raised at once.
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

FIRST_DELAY_S = 1.0
DELAY_FACTOR = 1.6
MAX_DELAY_S = 120.0
JITTER = 0.2
"""Back-off between tries, as gRPC's for connections (its doc/connection-backoff.md): first delay,
growth per try, longest delay, and the part by which each varies at random, so that the replicas of
a fleet do not all ask a Hub that has just come back at once."""
MAX_REASON_CHARS = 300
"""Longest reason in one line; the log has all of it."""

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
"""Exceptions of a wrong configuration, a wrong checkpoint or a bug, which come with every try. All
others come from disks, networks, devices and processes, RuntimeError too: Gloo, NCCL and CUDA raise
it."""


class Unavailable(ValueError):
    """Files of a model are missing, perhaps only for now: a mount, a copy under way, the Hub."""


class RemoteFailure(RuntimeError):
    """A failure in another process.

    Args:
        message: message that ends with the root cause.
        heals: whether another try may succeed, as that process has judged by `may_heal`.
    """

    def __init__(self, message: str, *, heals: bool = True) -> None:
        super().__init__(message)
        self.heals = heals


class StartDelay(msgspec.Struct, frozen=True, kw_only=True):
    """A start that has failed and will be tried again."""

    reason: str
    """Reason of the last failure, in one line."""
    attempts: int
    """Tries that have failed."""
    next_try: float
    """Beginning of the next try, in Unix time."""


StartReport = Callable[[StartDelay | None], None]
"""Is called with each delay, and with None once a delayed start has succeeded or failed."""


def may_heal(error: BaseException) -> bool:
    """Whether a try that raised `error` may succeed when it is repeated unchanged."""
    if isinstance(error, RemoteFailure):
        return error.heals
    return isinstance(error, Unavailable) or not isinstance(error, HOPELESS)


def delays(rng: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to wait before the second try, the third, and so on without end.

    Args:
        rng: draws uniformly from [0, 1).
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
    """Calls `attempt` until it succeeds; returns what it returns then.

    Args:
        attempt: makes one try from the beginning.
        retry_s: seconds from now within which another try may begin; 0 for one try, inf for ever.
        report: is called with each delay.
        clock: returns seconds.
        sleep: waits for a number of seconds.
        rng: draws uniformly from [0, 1).

    Raises:
        Exception: what an attempt raised that cannot heal, or the last one.
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
                    "start failed %d time(s), next try in %.1f s: %s", attempts, delay_s, error
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
    """Failure in one line, the last of its message: ours end with the root cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[-1] if lines else type(error).__name__
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."
