"""Requests that may be why workers were lost: tried again apart from others, then given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from router.channel import WorkerChannel
from router.serving.completion import Completion

APART_FROM = 2
"""Losses that make a suspect: most have nothing to do with any request, so one is forgiven."""
PATIENCE_S = 10.0
"""Seconds that a suspect waits for a worker of its own: a busy fleet may have none to spare; where
workers really were lost twice for other reasons, this is what it costs its client."""


class Changes:
    """Wakes who waits for a worker whenever one may have become able to take a request."""

    def __init__(self) -> None:
        self.number = 0
        """Times that this has happened."""
        self._event = asyncio.Event()

    def notify(self) -> None:
        """A worker may have become able to take a request, or none will."""
        self.number += 1
        self._event.set()
        self._event.clear()

    async def wait_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Waits until `is_over`, which is asked again with each change; at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_over():
                    await self._event.wait()


class Isolation:
    """Keeps apart what may end a worker from what would be lost with it.

    A request is suspected of a loss if the lost worker had brought no token of it in that attempt:
    one that ends workers at some token ends the next one before it brings any. After two such
    losses it is tried at a worker that has nothing else from this gateway, and gets nothing else
    until the request has a token, or has ended; after `max_attempts` it is given up. Completions of
    one client's request are one suspect. Those that generated already are never suspected.

    Args:
        max_attempts: losses under suspicion; 1 lets nothing continue after a loss.
        channels: of the workers, by id.
        changes: notified when a worker may have become free.
    """

    def __init__(
        self, max_attempts: int, channels: Mapping[str, WorkerChannel], changes: Changes
    ) -> None:
        self._max_attempts = max_attempts
        self._channels = channels
        self._held: dict[str, str] = {}
        """Workers at which a suspect is tried, and its family."""
        self._waits_until: dict[str, float] = {}
        """Times until which suspects wait for a worker, by family; on the event loop's clock."""
        self.changes = changes

    def why_given_up(self, completion: Completion, reason: str) -> str | None:
        """The error for a request that has ended enough workers; None for others."""
        num_attempts = completion.num_suspected
        if self._max_attempts == 1:  # whatever became of the first one
            num_attempts = max(num_attempts, completion.num_losses)
        if num_attempts < self._max_attempts:
            return None
        return f"given up after {num_attempts} attempts, the last one: {reason}"

    def excluded(self, completion: Completion) -> list[str]:
        """Workers that are not for it now."""
        if not (self._held or _is_suspect(completion)):
            return []
        family = completion.family
        held = [worker for worker, holder in self._held.items() if holder != family]
        if not _is_suspect(completion):
            return held
        if family in self._held.values():  # where another completion of the same request is
            return [worker for worker in self._channels if self._held.get(worker) != family]
        return [*held, *(worker for worker in self._channels if self._has_others(worker, family))]

    def enter(self, completion: Completion, worker_id: str) -> bool:
        """A completion goes to a worker; False for a suspect that would not be alone there."""
        if not _is_suspect(completion):
            return True
        family = completion.family
        if self._held.get(worker_id, family) != family or self._has_others(worker_id, family):
            return False
        self._held[worker_id] = family
        return True

    async def wait(self, completion: Completion, num_changes: int) -> bool:
        """Waits until other workers may be free; False where it has waited long enough.

        Args:
            completion: that has found none.
            num_changes: there had been so many when it began to look.
        """
        if not _is_suspect(completion):
            return False
        loop = asyncio.get_running_loop()
        until = self._waits_until.setdefault(completion.family, loop.time() + PATIENCE_S)
        seconds = until - loop.time()
        await self.changes.wait_until(lambda: self.changes.number != num_changes, seconds)
        return loop.time() < until and not completion.finished

    def leave(self, completion: Completion, worker_id: str) -> None:
        """A completion has a token from that worker, or is there no more."""
        if self._held and self._held.get(worker_id) == completion.family:
            del self._held[worker_id]
        if completion.finished and self._waits_until:
            self._waits_until.pop(completion.family, None)
        self.changes.notify()

    def forget(self, worker_id: str) -> None:
        """The worker has left."""
        self._held.pop(worker_id, None)
        self.changes.notify()

    def _has_others(self, worker_id: str, family: str) -> bool:
        channel = self._channels.get(worker_id)
        return channel is not None and channel.serves_others(family)


def _is_suspect(completion: Completion) -> bool:
    return completion.num_suspected >= APART_FROM
