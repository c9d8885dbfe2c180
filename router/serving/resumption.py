"""Completions whose worker was lost continue at another one, or at the same when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from router.config import RoutingConfig
from router.errors import ApiError
from router.metrics.stats import ModelStats
from router.serving.completion import Completion
from router.serving.isolation import Isolation

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 2.0
"""Between two looks for a worker; one that becomes ready is seen at once."""


class Resumption:
    """Places lost completions again; their clients see a pause.

    A request may be why its worker was lost, and would end the next one too: it is then given up,
    see Isolation.

    Args:
        config: how long it may take until a worker is there.
        isolation: knows whom to give up.
        place: hands a completion to a worker. Raises ApiError where none takes it.
        stats: where resubmissions are counted.
    """

    def __init__(
        self,
        config: RoutingConfig,
        isolation: Isolation,
        place: Callable[[Completion], Awaitable[None]],
        stats: ModelStats,
    ) -> None:
        self._isolation = isolation
        self._wait_s = config.no_worker_timeout_s
        self._place = place
        self._stats = stats
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ready = asyncio.Event()
        self._closed = False

    def lost(self, completion: Completion, reason: str) -> None:
        """Begins the next attempt, or ends the completion with an error where it was the last."""
        extra = {"request_id": completion.spec.request_id, "worker_id": completion.worker_id}
        if self._closed:
            completion.fail(reason)
        elif (verdict := self._isolation.verdict(completion, reason)) is not None:
            completion.fail(verdict)
        else:
            logger.warning(
                "continues elsewhere after %d tokens: %s",
                *(len(completion.token_ids), reason),
                extra=extra,
            )
            self._stats.resubmissions += 1
            task = asyncio.create_task(self._place_again(completion, reason))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    def wake(self) -> None:
        """A worker is ready: those that wait for one try at once."""
        self._ready.set()
        self._ready.clear()

    def close(self) -> None:
        """What is lost from now on, or waits for a worker, ends with an error."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _place_again(self, completion: Completion, reason: str) -> None:
        try:
            problem = await self._try_until_placed(completion)
        except asyncio.CancelledError:
            completion.fail("the gateway is shutting down")
            raise
        except Exception:
            # Whatever it was, the client must not wait forever.
            logger.exception("cannot be resumed", extra={"request_id": completion.spec.request_id})
            problem = "internal error: it could not be resumed"
        if problem is not None:
            completion.fail(f"{reason}; then {problem}")

    async def _try_until_placed(self, completion: Completion) -> str | None:
        """Returns why it is given up, None if it continues (or its client has left)."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._wait_s
        pause = FIRST_PAUSE_S
        while not completion.finished:
            completion.begin_again()
            try:
                await self._place(completion)
            except ApiError as error:
                left = deadline - clock()
                if error.status < 429 or left <= 0.0:
                    return error.message
            else:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, left)):
                    await self._ready.wait()
            pause = min(2.0 * pause, LAST_PAUSE_S)
        return None
