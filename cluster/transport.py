"""WorkerTransport of a Ray cluster: sends messages of gateways over Ray Serve handles."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import msgspec
from ray.experimental import internal_kv
from ray.serve.handle import DeploymentHandle

from cluster.workers import WORKERS, WorkerSet
from router.channel import WorkerLink
from worker.protocol.analyzed import analyzed
from worker.protocol.frames import SocketOffer, heartbeat_key

logger = logging.getLogger(__name__)

_FIRST_CALL_S = 10.0
"""Timeout in seconds of a handle's first call while there is no worker: a fifth of the look-back
period of Serve's autoscaling."""


class RayTransport:
    """Transport to the replicas of one WorkerGroup deployment, addressed by ID.

    To workers on the gateway's node, items and submits are sent over a Unix stream socket, at a
    fraction of Serve's cost per item. Serve's attach call stays open while the socket is in use:
    its only item is the socket's path, and Serve does not stop a draining worker with open calls.

    To workers on other nodes, items and submits are sent by value over Serve's gRPC, which costs a
    fifth as much per item as object references. Payloads are msgpack already, so Serve does not
    serialize responses again.

    Args:
        handle: handle of the deployment.
        deployment: name of the deployment.
        node_id: ID of this process's Ray node; empty to disable sockets.
    """

    def __init__(self, handle: DeploymentHandle, deployment: str, node_id: str = "") -> None:
        by_value = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="noop"
        )
        self._submit = by_value.submit
        self._hello = by_value.hello
        self._attach = by_value.options(stream=True).attach
        self._node_id = node_id
        self._links: dict[str, WorkerLink] = {}
        self._first_call: asyncio.Future[None] | None = None
        self._workers = WORKERS[deployment]
        # HAZARD: Serve cancels a call together with the HTTP request in whose context it is made.
        # Calls made here are shared by many requests, so they are made in this context.
        self._context = contextvars.copy_context()

    async def attach(
        self, worker_id: str, gateway_id: str, on_item: Callable[[bytes], None]
    ) -> None:
        """Calls `on_item` with each item of the worker's attach stream (msgpack of WorkerItem).

        Raises:
            ConnectionError: the worker has stopped, or is not reachable.
        """
        for node_id in (self._node_id, ""):
            with PinnedCall(self._workers, worker_id) as call:
                arguments = {"gateway_id": gateway_id, "worker_id": worker_id, "node_id": node_id}
                stream = aiter(call.track(self._call(self._attach, **arguments)))
                path = msgspec.msgpack.decode(await anext(stream), type=analyzed(SocketOffer)).path
                # From here on the stream ends with the worker. A draining worker is no longer in
                # the set, but still finishes its requests.
                call.keep_open()
                if path is None:
                    async for item in stream:
                        on_item(item)
                    return
                try:
                    link = await WorkerLink.open(path, gateway_id, on_item)
                except OSError as error:
                    message = "cannot connect to the worker's socket (%s); using Serve instead"
                    logger.warning(message, error, extra={"worker_id": worker_id})
                    continue
                await self._use_link(worker_id, link, stream)

    async def _use_link(self, worker_id: str, link: WorkerLink, call: AsyncIterator[bytes]) -> None:
        """Sends submits over the link until it is closed, then raises ConnectionError."""
        closer = asyncio.ensure_future(_close_with_call(call, link))
        self._links[worker_id] = link
        try:
            raise ConnectionError(await link.wait_ended())
        finally:
            del self._links[worker_id]
            link.close()
            closer.cancel()

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        """Sends a SubmitBatch (msgpack); returns its SubmitReply (msgpack).

        Raises:
            ConnectionError: the worker has stopped, or is not reachable.
        """
        link = self._links.get(worker_id)
        if link is not None:
            return await link.call(payload)
        with PinnedCall(self._workers, worker_id) as call:
            reply: bytes = await call.track(
                self._call(self._submit, payload=payload, worker_id=worker_id)
            )
        return reply

    async def heartbeat(self, worker_id: str) -> bytes | None:
        """Last heartbeat that a worker stored in the GCS while its event loop was blocked; None if
        there is none.

        Raises Exception if the GCS is not reachable.
        """
        return await asyncio.to_thread(_read_heartbeat, worker_id)

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `on_change` with all worker IDs, now and whenever they change."""
        self._workers.listen(on_change)
        if self._first_call is None:
            self._first_call = asyncio.ensure_future(self._wake_router())

    async def _wake_router(self) -> None:
        """Makes a call, since Serve only then creates a handle's router, which tracks the replicas.

        HAZARD: the call is queued while there is no worker. Serve's autoscaling starts a worker for
        a call that is queued for longer than its look-back period (`worker_replicas`).
        """
        call = self._call(self._hello)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(call, _FIRST_CALL_S)
        call.cancel()

    def _call(self, method: Any, **arguments: Any) -> Any:
        return self._context.run(lambda: method.remote(**arguments))


def _read_heartbeat(worker_id: str) -> bytes | None:
    key = heartbeat_key(worker_id)
    value: bytes | None = internal_kv._internal_kv_get(key, namespace="rayfleet")
    return value


class PinnedCall:
    """Context manager of a call to one replica, cancelled when the replica is removed, and on exit.

    Serve would queue a call to a stopped replica indefinitely. Exceptions in the block are raised
    as ConnectionError.
    """

    def __init__(self, replicas: WorkerSet, replica_id: str) -> None:
        if replica_id not in replicas.ids:
            raise ConnectionError(f"replica {replica_id} is not running")
        self._replicas = replicas
        self._replica_id = replica_id
        self._call: Any = None
        self._gone = False
        self._listening = False

    def track(self, call: Any) -> Any:
        """Sets the call to cancel; returns it."""
        self._call = call
        return call

    def keep_open(self) -> None:
        """Keeps the call open after the replica is removed, until the replica closes it."""
        if self._listening:
            self._listening = False
            self._replicas.remove_listener(self._on_change)

    def __enter__(self) -> Self:
        self._listening = True
        self._replicas.listen(self._on_change)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.keep_open()
        self._cancel()
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return  # the caller's own task was cancelled
            reason = "has stopped" if self._gone else "cancelled a call"
            raise ConnectionError(f"replica {self._replica_id} {reason}") from error
        if isinstance(error, Exception):
            raise ConnectionError(f"call to replica {self._replica_id} failed: {error}") from error

    def _on_change(self, ids: tuple[str, ...]) -> None:
        if self._replica_id not in ids:
            self._gone = True
            self._cancel()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


async def _close_with_call(stream: AsyncIterator[bytes], link: WorkerLink) -> None:
    """Closes the link when the attach call ends: the worker has stopped, even if its socket still
    appears open."""
    reason = "Serve's call to the worker ended"
    try:
        await anext(stream, None)
    except Exception as error:
        reason = f"{reason}: {error}"
    finally:
        link.close(reason)
