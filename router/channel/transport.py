"""What the gateway needs from whatever connects it to its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


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
