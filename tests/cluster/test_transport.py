"""The transport over handles that the test plays: pinning arguments, and calls that must end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.transport import RayTransport
from cluster.workers import WORKERS, WorkerSet


class Call:
    """A pending Serve response; ends when it is cancelled."""

    def __init__(self, opens: bool) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._opens = opens

    def cancel(self) -> None:
        self.done.cancel()

    def __await__(self) -> Any:
        return self.done.__await__()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._items()

    async def _items(self) -> AsyncIterator[bytes]:
        if self._opens:
            yield b"first"
        yield await self.done


class Method:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], Call]] = []
        self.opens = True

    def options(self, **_: Any) -> Any:
        return type("Streaming", (), {"attach": self})()

    def remote(self, **arguments: Any) -> Call:
        self.calls.append((arguments, Call(self.opens)))
        return self.calls[-1][1]


class Handle:
    """Stands for a DeploymentHandle."""

    def __init__(self) -> None:
        self.submit, self.hello, self.attach = Method(), Method(), Method()

    def options(self, **_: Any) -> Handle:
        return self if "stream" not in _ else type("S", (), {"attach": self.attach})()


@pytest.fixture
async def handle() -> Handle:
    return Handle()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> WorkerSet:
    workers = WORKERS.of(request.node.name)
    workers.replace(("w1", "w2"))
    return workers


@pytest.fixture
def transport(handle: Handle, workers: WorkerSet, request: pytest.FixtureRequest) -> RayTransport:
    return RayTransport(handle, request.node.name)


async def test_a_call_names_its_worker(handle: Handle, transport: RayTransport) -> None:
    reply = asyncio.ensure_future(transport.submit("w2", b"batch"))
    await asyncio.sleep(0)
    arguments, call = handle.submit.calls[0]
    assert arguments == {"payload": b"batch", "worker_id": "w2"}
    call.done.set_result(b"reply")
    assert await reply == b"reply"


async def test_an_unknown_worker_is_unreachable(transport: RayTransport) -> None:
    with pytest.raises(ConnectionError, match="w9"):
        await transport.submit("w9", b"batch")


async def test_an_open_stream_outlives_its_workers_leaving(
    handle: Handle, transport: RayTransport, workers: WorkerSet
) -> None:
    stream = transport.attach("w1", "g0")
    assert await anext(stream) == b"first"
    pending = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    workers.replace(("w2",))
    handle.attach.calls[0][1].done.set_result(b"last of the drained worker")
    assert await pending == b"last of the drained worker"


async def test_a_stream_that_never_opened_ends_when_the_worker_leaves(
    handle: Handle, transport: RayTransport, workers: WorkerSet
) -> None:
    handle.attach.opens = False
    pending = asyncio.ensure_future(anext(transport.attach("w1", "g0")))
    await asyncio.sleep(0)
    workers.replace(("w2",))
    with pytest.raises(ConnectionError, match="w1 has left"):
        await pending


async def test_a_call_cancelled_from_below_is_a_connection_error(
    handle: Handle, transport: RayTransport
) -> None:
    reply = asyncio.ensure_future(transport.submit("w1", b"batch"))
    await asyncio.sleep(0)
    handle.submit.calls[0][1].done.cancel()
    with pytest.raises(ConnectionError, match="was cancelled"):
        await reply


async def test_closing_a_stream_cancels_its_call(handle: Handle, transport: RayTransport) -> None:
    stream = transport.attach("w1", "g0")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert handle.attach.calls[0][1].done.cancelled()


async def test_a_failed_call_is_a_connection_error(handle: Handle, transport: RayTransport) -> None:
    reply = asyncio.ensure_future(transport.submit("w1", b"batch"))
    await asyncio.sleep(0)
    handle.submit.calls[0][1].done.set_exception(RuntimeError("replica died"))
    with pytest.raises(ConnectionError, match="replica died"):
        await reply


async def test_cancelling_a_caller_is_no_connection_error(transport: RayTransport) -> None:
    reply = asyncio.ensure_future(transport.submit("w1", b"batch"))
    await asyncio.sleep(0)
    reply.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reply


async def test_listeners_hear_of_changes_only(workers: WorkerSet) -> None:
    heard: list[tuple[str, ...]] = []
    workers.listen(heard.append)
    workers.replace(("w2", "w1"))
    workers.replace(("w1",))
    workers.forget(heard.append)
    workers.replace(())
    assert heard == [("w1", "w2"), ("w1",)]
