"""Starts that fail: which are tried again, when, and who is notified meanwhile.

A Serve deployment whose replicas fail to start a few times is given up for good, and nobody is
there to submit it again. So what may heal is waited for inside the replica's constructor, for which
Serve waits without a limit; what cannot heal is raised at once.
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
"""Delays between tries are those of gRPC's connection back-off (its doc/connection-backoff.md): the
first, what each is of the one before, the longest, and the part by which each is off at random, so
that a fleet's replicas do not ask a Hub that has just come back all at once."""
MAX_REASON_CHARS = 300
"""Of a reason in one line; the log has the whole."""

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
"""What a wrong configuration, a wrong checkpoint or a fault in a program raises, whenever it is
tried. All else comes from disks, networks, devices and processes, RuntimeError too: Gloo, NCCL and
CUDA raise it."""


class Unavailable(ValueError):
    """Files of a model are not there, or not yet: a mount, a copy under way, the Hub."""


class RemoteFailure(RuntimeError):
    """A failure in another process, which has judged it there by the type of its cause.

    Args:
        message: ends with the root cause.
        heals: whether another try may succeed.
    """

    def __init__(self, message: str, *, heals: bool = True) -> None:
        super().__init__(message)
        self.heals = heals


class StartDelay(msgspec.Struct, frozen=True, kw_only=True):
    """A start that has failed and will be tried again."""

    reason: str
    """Of the last failure, in one line."""
    attempts: int
    """Tries that have failed."""
    next_try: float
    """When the next one begins; Unix time, in seconds."""


StartReport = Callable[[StartDelay | None], None]
"""Is notified of each delay, and gets None once nothing is waited for any more."""


def may_heal(error: BaseException) -> bool:
    """Whether what has failed so may succeed when it is tried again with nothing changed here."""
    if isinstance(error, RemoteFailure):
        return error.heals
    return isinstance(error, Unavailable) or not isinstance(error, HOPELESS)


def delays(rng: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to wait before the second try, the third, and so on for ever.

    Args:
        rng: draws from [0, 1).
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
    """What the first `attempt` that succeeds returns.

    Args:
        attempt: begins afresh with each call.
        retry_s: how long after its beginning another try may begin; 0 for one try, inf for ever.
        report: is notified why, and when the next try is.
        clock: seconds.
        sleep: waits so many seconds.
        rng: draws from [0, 1).

    Raises:
        Exception: of an attempt that cannot heal, or of the last one.
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
    """A failure in one line: messages of ours end with the root cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[-1] if lines else type(error).__name__
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."
