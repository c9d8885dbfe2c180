"""Carries gateway messages over Ray Serve handles: the WorkerTransport of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.workers import WORKERS, WorkerSet


class RayTransport:
    """Reaches the replicas of one WorkerGroup deployment, each by its id.

    Both calls go over gRPC by value: an item costs a fifth of what it does by object reference.
    Payloads are msgpack already, so Serve does not serialize answers again.
    """

    def __init__(self, handle: DeploymentHandle, deployment: str) -> None:
        by_value = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="noop"
        )
        self._submit = by_value.submit
        self._hello = by_value.hello
        self._attach = by_value.options(stream=True).attach
        self._first_call: asyncio.Future[None] | None = None
        self._workers = WORKERS.of(deployment)
        # HAZARD: Serve ties a call to the HTTP request in whose context it is made, and cancels
        # it with that request. Ours carry what many requests share: they are made in this one.
        self._context = contextvars.copy_context()

    async def attach(self, worker_id: str, gateway_id: str) -> AsyncIterator[bytes]:
        """Items of the worker's attach stream, as msgpack of WorkerItem.

        Raises:
            ConnectionError: the worker is gone, or could not be reached.
        """
        with _call_ends_with_worker(self._workers, worker_id) as track:
            stream = track(self._call(self._attach, gateway_id=gateway_id, worker_id=worker_id))
            async for item in stream:
                yield item

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        """Sends msgpack of a SubmitBatch; returns msgpack of its SubmitReply.

        Raises:
            ConnectionError: the worker is gone, or could not be reached.
        """
        with _call_ends_with_worker(self._workers, worker_id) as track:
            reply: bytes = await track(
                self._call(self._submit, payload=payload, worker_id=worker_id)
            )
        return reply

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `on_change` with all worker ids, now and whenever the set changes."""
        self._workers.listen(on_change)
        if self._first_call is None:
            self._first_call = asyncio.ensure_future(self._wake_router())

    async def _wake_router(self) -> None:
        """Serve makes a handle's router, and tells it the replicas, with the first call only."""
        with contextlib.suppress(Exception):
            await self._call(self._hello)

    def _call(self, method: Any, **arguments: Any) -> Any:
        return self._context.run(lambda: method.remote(**arguments))


@contextlib.contextmanager
def _call_ends_with_worker(workers: WorkerSet, worker_id: str) -> Iterator[Callable[[Any], Any]]:
    """Cancels the tracked call when the worker leaves the set, or when the block is left.

    Serve would otherwise keep a call to a replica that is no more in its queue for ever.
    Whatever goes wrong with the call leaves the block as ConnectionError.
    """
    calls: list[Any] = []
    gone = asyncio.Event()

    def on_change(ids: tuple[str, ...]) -> None:
        if worker_id not in ids:
            gone.set()
            for call in calls:
                call.cancel()

    def track(call: Any) -> Any:
        calls.append(call)
        return call

    if worker_id not in workers.ids:
        raise ConnectionError(f"worker {worker_id} is not there")
    workers.listen(on_change)
    try:
        yield track
    except GeneratorExit:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        cancelled_itself = task is not None and task.cancelling() > 0
        if not gone.is_set() or cancelled_itself:
            raise
        raise ConnectionError(f"worker {worker_id} has left") from error
    except Exception as error:
        raise ConnectionError(f"call to worker {worker_id} failed: {error}") from error
    finally:
        workers.forget(on_change)
        for call in calls:
            call.cancel()
