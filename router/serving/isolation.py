"""Isolation: retries each request that may have crashed workers on an otherwise idle worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from router.channel import WorkerChannel
from router.serving.completion import Completion

APART_FROM = 2
"""Number of worker failures after which a request is suspected. The first failure is ignored, since
most failures are unrelated to a request."""
PATIENCE_S = 10.0
"""Maximum seconds that a suspect waits for an idle worker. Limits the delay of an innocent request,
since a busy fleet may not have an idle worker."""


class Changes:
    """A condition that wakes requests whenever a worker may have become available."""

    def __init__(self) -> None:
        self.number = 0
        """Number of calls of `notify`."""
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all waiting requests: a worker may have become available, or none will."""
        self.number += 1
        self._event.set()
        self._event.clear()

    async def wait_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Waits until `is_over` returns true, at most `seconds`. Calls it after each change."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_over():
                    await self._event.wait()


class Isolation:
    """Keeps requests that may crash workers apart from others.

    A request is suspected of causing a failure if the worker had not sent a token of the request in
    the failed attempt. This includes a request that crashes workers at a certain token: when it is
    resumed, the next worker crashes before it sends a token. After two such failures, the request
    is retried on a worker that has no other request of this gateway and gets none until the request
    has a token or has ended. After `max_attempts` such failures, the request fails. All completions
    of a client's request are one suspect (a family), except for completions that have received
    tokens in the attempt.

    Args:
        max_attempts: number of suspected failures after which a request fails. 1 disables retries:
            requests then fail at their first worker failure, even if they had tokens.
        channels: channels to the workers, by id.
        changes: notified when a worker may have become free.
    """

    def __init__(
        self, max_attempts: int, channels: Mapping[str, WorkerChannel], changes: Changes
    ) -> None:
        self._max_attempts = max_attempts
        self._channels = channels
        self._held: dict[str, str] = {}
        """Family of the suspect that is being retried on a worker, by the worker's id."""
        self._waits_until: dict[str, float] = {}
        """Event loop time until which a suspect waits for a worker, by family."""
        self.changes = changes

    def why_given_up(self, completion: Completion, reason: str) -> str | None:
        """The error of a request that was involved in too many worker failures; None if it may
        be resumed."""
        num_attempts = completion.num_suspected
        if self._max_attempts == 1:  # fails after the first failure, tokens or not
            num_attempts = max(num_attempts, completion.num_losses)
        if num_attempts < self._max_attempts:
            return None
        return f"failed after {num_attempts} attempts; last error: {reason}"

    def excluded(self, completion: Completion) -> list[str]:
        """Ids of workers on which the completion must not be placed now."""
        if not (self._held or _is_suspect(completion)):
            return []
        family = completion.family
        held = [worker for worker, holder in self._held.items() if holder != family]
        if not _is_suspect(completion):
            return held
        if family in self._held.values():  # on the worker of another completion of the same request
            return [worker for worker in self._channels if self._held.get(worker) != family]
        return [*held, *(worker for worker in self._channels if self._has_others(worker, family))]

    def enter(self, completion: Completion, worker_id: str) -> bool:
        """Reserves a worker for a suspect.

        Returns False if the suspect would share the worker; always True for other requests.
        """
        if not _is_suspect(completion):
            return True
        family = completion.family
        if self._held.get(worker_id, family) != family or self._has_others(worker_id, family):
            return False
        self._held[worker_id] = family
        return True

    async def wait(self, completion: Completion, num_changes: int) -> bool:
        """Waits until a worker may have become free for a suspect.

        Args:
            completion: the completion for which no worker was found.
            num_changes: `changes.number` before the search.

        Returns:
            False if the completion must not wait, has waited for the maximum time, or has ended.
        """
        if not _is_suspect(completion):
            return False
        loop = asyncio.get_running_loop()
        until = self._waits_until.setdefault(completion.family, loop.time() + PATIENCE_S)
        seconds = until - loop.time()
        await self.changes.wait_until(lambda: self.changes.number != num_changes, seconds)
        return loop.time() < until and not completion.finished

    def leave(self, completion: Completion, worker_id: str) -> None:
        """Ends a suspect's reservation: it has a token from the worker, or has left the worker."""
        if self._held and self._held.get(worker_id) == completion.family:
            del self._held[worker_id]
        if completion.finished and self._waits_until:
            self._waits_until.pop(completion.family, None)
        self.changes.notify()

    def forget(self, worker_id: str) -> None:
        """Removes a worker that has left."""
        self._held.pop(worker_id, None)
        self.changes.notify()

    def _has_others(self, worker_id: str, family: str) -> bool:
        channel = self._channels.get(worker_id)
        return channel is not None and channel.serves_others(family)


def _is_suspect(completion: Completion) -> bool:
    return completion.num_suspected >= APART_FROM
