"""Carries gateway messages over Ray Serve handles: the WorkerTransport of a Ray cluster."""

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
from worker.protocol.frames import SocketOffer, heartbeat_key

logger = logging.getLogger(__name__)

_FIRST_CALL_S = 10.0
"""Seconds that a handle's first call may wait for a worker: a fifth of the look-back period of
Serve's autoscaling."""


class RayTransport:
    """Transport to the replicas of one WorkerGroup deployment, each of them named by its id.

    To a worker on the gateway's own node, items and submits go over a Unix stream socket, at a
    fraction of the cost of an item over Serve. Serve's attach call stays open for as long as the
    socket is in use: its one item is the socket's path, and Serve stops no draining worker that
    still has a call.

    To a worker on another node both go over Serve's gRPC by value: an item costs a fifth of what it
    does by object reference. Payloads are msgpack already, so Serve does not serialize answers
    again.

    Args:
        handle: handle of the deployment.
        deployment: the deployment's name.
        node_id: id of the Ray node that this process runs on; empty to use no sockets.
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
        # HAZARD: Serve ties a call to the HTTP request in whose context it is made, and cancels
        # it with that request. Many requests share the calls made here: their context is this one.
        self._context = contextvars.copy_context()

    async def attach(
        self, worker_id: str, gateway_id: str, on_item: Callable[[bytes], None]
    ) -> None:
        """Hands each item of the worker's attach stream, msgpack of WorkerItem, to `on_item`.

        Raises:
            ConnectionError: the worker is gone, or could not be reached.
        """
        for node_id in (self._node_id, ""):
            with PinnedCall(self._workers, worker_id) as call:
                arguments = {"gateway_id": gateway_id, "worker_id": worker_id, "node_id": node_id}
                stream = aiter(call.track(self._call(self._attach, **arguments)))
                path = msgspec.msgpack.decode(await anext(stream), type=SocketOffer).path
                # From here on the stream ends when the worker does. A draining worker has left the
                # set, but still finishes its requests.
                call.outlive_replica()
                if path is None:
                    async for item in stream:
                        on_item(item)
                    return
                try:
                    link = await WorkerLink.open(path, gateway_id, on_item)
                except OSError as error:
                    problem = "no way to the worker's socket, taking Serve's: %s"
                    logger.warning(problem, error, extra={"worker_id": worker_id})
                    continue
                await self._follow(worker_id, link, stream)

    async def _follow(self, worker_id: str, link: WorkerLink, call: AsyncIterator[bytes]) -> None:
        """Sends submits over the link until it ends, then raises ConnectionError."""
        hold = asyncio.ensure_future(_outlast(call, link))
        self._links[worker_id] = link
        try:
            raise ConnectionError(await link.wait_ended())
        finally:
            del self._links[worker_id]
            link.close()
            hold.cancel()

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        """Sends msgpack of a SubmitBatch; returns msgpack of its SubmitReply.

        Raises:
            ConnectionError: the worker is gone, or could not be reached.
        """
        link = self._links.get(worker_id)
        if link is not None:
            return await link.call(payload)
        with PinnedCall(self._workers, worker_id) as call:
            reply: bytes = await call.track(
                self._call(self._submit, payload=payload, worker_id=worker_id)
            )
        return reply

    async def pulse(self, worker_id: str) -> bytes | None:
        """The last sign of life of a worker whose event loop is late; None where it gave none.

        Raises Exception where the GCS cannot be reached.
        """
        return await asyncio.to_thread(_read_pulse, worker_id)

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `on_change` with all worker ids, now and whenever the set changes."""
        self._workers.listen(on_change)
        if self._first_call is None:
            self._first_call = asyncio.ensure_future(self._wake_router())

    async def _wake_router(self) -> None:
        """Makes one call: Serve creates a handle's router, which learns the replicas, only then.

        HAZARD: without a worker the call is queued. Serve's autoscaling starts a worker for a call
        that is queued for longer than its look-back period (`worker_replicas`).
        """
        call = self._call(self._hello)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(call, _FIRST_CALL_S)
        call.cancel()

    def _call(self, method: Any, **arguments: Any) -> Any:
        return self._context.run(lambda: method.remote(**arguments))


def _read_pulse(worker_id: str) -> bytes | None:
    key = heartbeat_key(worker_id)
    value: bytes | None = internal_kv._internal_kv_get(key, namespace="rayfleet")
    return value


class PinnedCall:
    """Context of a call to one replica: cancels it when the replica leaves the set, and on exit.

    Serve would otherwise queue a call to a replica that is gone for ever. Any exception in the
    block leaves it as ConnectionError.
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
        """Takes the call that is to be cancelled; returns it."""
        self._call = call
        return call

    def outlive_replica(self) -> None:
        """Lets the call outlast the replica's place in the set: it ends when the replica does."""
        if self._listening:
            self._listening = False
            self._replicas.forget(self._on_change)

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
        self.outlive_replica()
        self._cancel()
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return  # the caller's own task was cancelled
            how = "has left" if self._gone else "dropped a call: it was cancelled"
            raise ConnectionError(f"replica {self._replica_id} {how}") from error
        if isinstance(error, Exception):
            raise ConnectionError(f"call to replica {self._replica_id} failed: {error}") from error

    def _on_change(self, ids: tuple[str, ...]) -> None:
        if self._replica_id not in ids:
            self._gone = True
            self._cancel()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


async def _outlast(stream: AsyncIterator[bytes], link: WorkerLink) -> None:
    """Closes the link when the attach call ends: the worker has ended then, even if its socket
    still seems open."""
    reason = "Serve's call to the worker ended"
    try:
        await anext(stream, None)
    except Exception as error:
        reason = f"{reason}: {error}"
    finally:
        link.close(reason)
