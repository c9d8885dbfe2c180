"""Interfaces of a channel: its transport, its listener, and the receivers of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worker.protocol.messages import AttachSnapshot, Rejection, TokenDelta, WorkerUpdate


class WorkerTransport(Protocol):
    """Connections to the workers of one model, by worker id. Payloads are msgpack
    (worker/protocol)."""

    async def attach(
        self, worker_id: str, gateway_id: str, on_item: Callable[[bytes], None]
    ) -> None:
        """Attaches to a worker, and calls `on_item` with each encoded WorkerItem.

        Returns or raises when the worker is gone, and raises whatever `on_item` raises. Cancel it
        to detach.
        """
        ...

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        """Sends a SubmitBatch; returns the SubmitReply. Raises ConnectionError if unreachable."""
        ...

    async def heartbeat(self, worker_id: str) -> bytes | None:
        """The worker's last heartbeat, which changes while its process runs; None if there is none.

        It does not depend on the worker's event loop. Raises Exception if it cannot be read.
        """
        ...

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `on_change` with all worker ids, now and whenever the set changes.

        `on_change` is called on the event loop's thread.
        """
        ...


class WorkerUnreachable(ConnectionError):
    """A submit failed because the worker is unreachable; another worker may accept the request.

    Args:
        reason: the error.
        had_it: whether the worker failed and may have received the request.
    """

    def __init__(self, reason: str, *, had_it: bool = False) -> None:
        super().__init__(reason)
        self.had_it = had_it


class SubmitRejected(Exception):
    """The worker has rejected the request.

    Args:
        rejection: the worker's reply.
    """

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class Receiver(Protocol):
    """Receiver of a request's tokens from a channel."""

    def deliver(self, delta: TokenDelta, now: float) -> None:
        """Handles the request's delta of an engine step; `now` is the event loop's time."""
        ...

    def lose(self, reason: str) -> None:
        """Called when the worker has failed; it will not send more deltas."""
        ...

    def fail(self, message: str) -> None:
        """Called when the request cannot be resumed on any worker."""
        ...


class ChannelListener(Protocol):
    """Listener for the state of a worker."""

    def on_snapshot(self, worker_id: str, snapshot: AttachSnapshot) -> None:
        """Called when the worker has attached or was rebuilt: the snapshot replaces its state."""
        ...

    def on_update(self, worker_id: str, update: WorkerUpdate, /) -> None:
        """Called when the worker has reported an engine step, before its deltas are delivered."""
        ...

    def on_accepted(self, worker_id: str, request_id: str, epoch: int, ordinal: int) -> None:
        """Called when the worker has accepted a request as submit number `ordinal` of `epoch`."""
        ...

    def on_lost(self, worker_id: str, reason: str) -> None:
        """Called when the worker or its rank group has failed."""
        ...

    def on_closed(self, worker_id: str) -> None:
        """Called when the channel of a worker that was removed from the set has ended."""
        ...
