"""The transport on simulated handles: arguments that pin calls, and calls that must end. If a
socket is offered, it is served by a real frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster import transport as transport_module
from cluster.transport import RayTransport
from cluster.workers import WORKERS, WorkerSet
from worker.frontend.attach import AttachServer
from worker.frontend.server import WorkerFrontend
from worker.protocol.frames import SocketOffer
from worker.protocol.messages import (
    AttachSnapshot,
    SubmitBatch,
    SubmitReply,
    WorkerDown,
    WorkerItem,
)


class Call:
    """A pending Serve response, which ends when cancelled."""

    def __init__(self, items: list[bytes]) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._items_at_once = items

    def cancel(self) -> None:
        self.done.cancel()

    def __await__(self) -> Any:
        return self.done.__await__()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._items()

    async def _items(self) -> AsyncIterator[bytes]:
        for item in self._items_at_once:
            yield item
        yield await self.done


class Method:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], Call]] = []
        self.opens = True
        self.path: str | None = None

    def options(self, **_: Any) -> Any:
        return type("Streaming", (), {"attach": self})()

    def remote(self, **arguments: Any) -> Call:
        path = self.path if arguments.get("node_id") == "here" else None
        offer = msgspec.msgpack.encode(SocketOffer(path))
        items = [offer] if path else [offer, b"first"]
        self.calls.append((arguments, Call(items if self.opens else [])))
        return self.calls[-1][1]


class Handle:
    """Fake of a DeploymentHandle."""

    def __init__(self) -> None:
        self.submit, self.hello, self.attach = Method(), Method(), Method()

    def options(self, **_: Any) -> Handle:
        return self if "stream" not in _ else type("S", (), {"attach": self.attach})()


class Stream:
    """Items of an attach call."""

    def __init__(self, transport: RayTransport, worker_id: str) -> None:
        self._items: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.ensure_future(
            transport.attach(worker_id, "g0", self._items.put_nowait)
        )

    async def __anext__(self) -> bytes:
        item = asyncio.ensure_future(self._items.get())
        await asyncio.wait([item, self._task], return_when=asyncio.FIRST_COMPLETED)
        if item.done():
            return item.result()
        item.cancel()
        self._task.result()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@pytest.fixture
async def handle() -> Handle:
    return Handle()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> WorkerSet:
    workers = WORKERS[request.node.name]
    workers.replace(("w1", "w2"))
    return workers


@pytest.fixture
def transport(handle: Handle, workers: WorkerSet, request: pytest.FixtureRequest) -> RayTransport:
    return RayTransport(handle, request.node.name, "here")


@pytest.fixture
async def front(handle: Handle) -> AsyncIterator[WorkerFrontend]:
    """A loading worker whose socket is offered."""
    front = WorkerFrontend("w1")
    server = AttachServer(front)
    await server.open()
    handle.attach.path = server.path
    yield front
    server.close()
    front.close()


def item_of(payload: bytes) -> WorkerItem:
    return msgspec.msgpack.decode(payload, type=WorkerItem)


async def test_items_and_submits_use_the_offered_socket(
    handle: Handle, transport: RayTransport, front: WorkerFrontend
) -> None:
    stream = Stream(transport, "w1")
    assert isinstance(item_of(await anext(stream)), AttachSnapshot)
    [(arguments, hold)] = handle.attach.calls
    assert arguments == {"gateway_id": "g0", "worker_id": "w1", "node_id": "here"}
    reply = await transport.submit("w1", msgspec.msgpack.encode(SubmitBatch()))
    assert msgspec.msgpack.decode(reply, type=SubmitReply).epoch == 1
    assert handle.submit.calls == []
    assert not hold.done.done()  # Serve must see a call for as long as the socket is in use
    await stream.aclose()
    assert hold.done.cancelled()
    later = asyncio.ensure_future(transport.submit("w1", b"batch"))
    await asyncio.sleep(0)
    handle.submit.calls[0][1].done.set_result(b"over Serve again")
    assert await later == b"over Serve again"


async def test_a_socket_stays_open_while_its_worker_drains(
    handle: Handle, transport: RayTransport, workers: WorkerSet, front: WorkerFrontend
) -> None:
    stream = Stream(transport, "w1")
    await anext(stream)
    workers.replace(("w2",))
    front.engine_lost("lost while it drains")
    assert isinstance(item_of(await anext(stream)), WorkerDown)
    assert await transport.submit("w1", msgspec.msgpack.encode(SubmitBatch()))
    assert not handle.attach.calls[0][1].done.done()
    await stream.aclose()


@pytest.mark.parametrize("error", [RuntimeError("replica died"), None])
async def test_the_end_of_the_attach_call_closes_the_socket(
    handle: Handle, transport: RayTransport, front: WorkerFrontend, error: Exception | None
) -> None:
    stream = Stream(transport, "w1")
    await anext(stream)
    pending = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    done = handle.attach.calls[0][1].done
    done.cancel() if error is None else done.set_exception(error)
    with pytest.raises(ConnectionError, match="Serve's call to the worker ended"):
        await pending


async def test_the_end_of_the_socket_ends_the_stream_and_the_attach_call(
    handle: Handle, transport: RayTransport, front: WorkerFrontend
) -> None:
    stream = Stream(transport, "w1")
    await anext(stream)
    front.close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        await anext(stream)
    assert handle.attach.calls[0][1].done.cancelled()


async def test_an_unreachable_socket_falls_back_to_serve(
    handle: Handle, transport: RayTransport, tmp_path: Path
) -> None:
    handle.attach.path = str(tmp_path / "nobody")
    stream = Stream(transport, "w1")
    assert await anext(stream) == b"first"
    assert [arguments["node_id"] for arguments, _ in handle.attach.calls] == ["here", ""]
    assert [call.done.cancelled() for _, call in handle.attach.calls] == [True, False]
    await stream.aclose()


async def test_a_call_has_its_worker_id(handle: Handle, transport: RayTransport) -> None:
    reply = asyncio.ensure_future(transport.submit("w2", b"batch"))
    await asyncio.sleep(0)
    arguments, call = handle.submit.calls[0]
    assert arguments == {"payload": b"batch", "worker_id": "w2"}
    call.done.set_result(b"reply")
    assert await reply == b"reply"


async def test_the_first_call_does_not_start_a_worker(
    handle: Handle, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve would start a worker for a call that waits longer than its look-back period."""
    monkeypatch.setattr(transport_module, "_FIRST_CALL_S", 0.01)
    transport.watch_workers(lambda ids: None)
    await asyncio.sleep(0)
    [(_, call)] = handle.hello.calls
    assert not call.done.done()
    async with asyncio.timeout(60):
        await asyncio.wait([call.done])
    assert call.done.cancelled()


async def test_an_unknown_worker_is_unreachable(transport: RayTransport) -> None:
    with pytest.raises(ConnectionError, match="w9"):
        await transport.submit("w9", b"batch")


async def test_an_open_stream_continues_while_its_worker_drains(
    handle: Handle, transport: RayTransport, workers: WorkerSet
) -> None:
    stream = Stream(transport, "w1")
    assert await anext(stream) == b"first"
    pending = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    workers.replace(("w2",))
    handle.attach.calls[0][1].done.set_result(b"last of the drained worker")
    assert await pending == b"last of the drained worker"


async def test_an_unopened_stream_ends_when_the_worker_leaves(
    handle: Handle, transport: RayTransport, workers: WorkerSet
) -> None:
    handle.attach.opens = False
    pending = asyncio.ensure_future(anext(Stream(transport, "w1")))
    await asyncio.sleep(0)
    workers.replace(("w2",))
    with pytest.raises(ConnectionError, match="w1 has stopped"):
        await pending


async def test_a_call_cancelled_by_serve_is_a_connection_error(
    handle: Handle, transport: RayTransport
) -> None:
    reply = asyncio.ensure_future(transport.submit("w1", b"batch"))
    await asyncio.sleep(0)
    handle.submit.calls[0][1].done.cancel()
    with pytest.raises(ConnectionError, match="cancelled a call"):
        await reply


async def test_closing_a_stream_cancels_its_call(handle: Handle, transport: RayTransport) -> None:
    stream = Stream(transport, "w1")
    await anext(stream)
    await stream.aclose()
    assert handle.attach.calls[0][1].done.cancelled()


async def test_a_failed_call_is_a_connection_error(handle: Handle, transport: RayTransport) -> None:
    reply = asyncio.ensure_future(transport.submit("w1", b"batch"))
    await asyncio.sleep(0)
    handle.submit.calls[0][1].done.set_exception(RuntimeError("replica died"))
    with pytest.raises(ConnectionError, match="replica died"):
        await reply


async def test_a_cancelled_caller_gets_no_connection_error(transport: RayTransport) -> None:
    reply = asyncio.ensure_future(transport.submit("w1", b"batch"))
    await asyncio.sleep(0)
    reply.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reply


async def test_listeners_are_only_called_for_changes(workers: WorkerSet) -> None:
    changes: list[tuple[str, ...]] = []
    workers.listen(changes.append)
    workers.replace(("w2", "w1"))
    workers.replace(("w1",))
    workers.remove_listener(changes.append)
    workers.replace(())
    assert changes == [("w1", "w2"), ("w1",)]
