"""Protocols of a channel: what carries it, and whom it notifies of what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worker.wire.messages import AttachSnapshot, Rejection, TokenDelta, WorkerUpdate


class WorkerTransport(Protocol):
    """Reaches the workers of one model, each by its id. All payloads are msgpack (worker/wire)."""

    async def attach(
        self, worker_id: str, gateway_id: str, on_item: Callable[[bytes], None]
    ) -> None:
        """Hands each item of the worker's stream of WorkerItems for this gateway to `on_item`.

        Returns or raises when the worker is gone, or with what `on_item` raises. Cancelling
        detaches.
        """
        ...

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        """Sends one SubmitBatch, returns the SubmitReply. Raises ConnectionError if unreachable."""
        ...

    async def pulse(self, worker_id: str) -> bytes | None:
        """The last sign of life of a worker whose event loop is late, None where it gave none.

        It comes on a way that this loop has no part in. Raises Exception if that is not known.
        """
        ...

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `on_change` with all worker ids, now and whenever the set changes.

        Called on the event loop's thread.
        """
        ...


class WorkerUnreachable(ConnectionError):
    """The worker does not answer for the request; another may.

    Args:
        reason: what happened.
        had_it: whether the worker was lost, and may have been at this very request.
    """

    def __init__(self, reason: str, *, had_it: bool = False) -> None:
        super().__init__(reason)
        self.had_it = had_it


class Refused(Exception):
    """The worker got the request and will not serve it."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class Receiver(Protocol):
    """One request's end of a channel."""

    def deliver(self, delta: TokenDelta, now: float) -> None:
        """Takes what a step did for the request; `now` is the event loop's time."""
        ...

    def lose(self, reason: str) -> None:
        """The worker is gone; nothing more will come from there."""
        ...

    def fail(self, message: str) -> None:
        """The request cannot continue at any worker."""
        ...


class ChannelListener(Protocol):
    """Is notified of the worker itself."""

    def on_snapshot(self, worker_id: str, snapshot: AttachSnapshot) -> None:
        """The worker as it stands now; older state is void."""
        ...

    def on_update(self, worker_id: str, update: WorkerUpdate) -> None:
        """One step's block events and load. Called before its deltas are delivered."""
        ...

    def on_accepted(self, worker_id: str, request_id: str, epoch: int, ordinal: int) -> None:
        """The worker took a request in `epoch`, as its submit number `ordinal`."""
        ...

    def on_lost(self, worker_id: str, reason: str) -> None:
        """The rank group or the worker is gone."""
        ...

    def on_closed(self, worker_id: str) -> None:
        """The channel of a worker that left the set has ended."""
        ...
