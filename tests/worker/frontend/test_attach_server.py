"""A gateway's link to a frontend over a real socket; processes are killed on either side."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from router.channel import WorkerLink
from router.channel import link as link_module
from tests.support.paths import ROOT
from tests.support.worker.played_engine import Engine, decode_item, decode_reply, delta, submit
from worker.frontend import server as front_module
from worker.frontend.attach import AttachServer
from worker.frontend.server import WorkerFrontend
from worker.protocol.frames import Attach, frame
from worker.protocol.messages import (
    AttachSnapshot,
    BlockStored,
    Submit,
    SubmitBatch,
    SubmitReply,
    WorkerDown,
    WorkerItem,
    WorkerUpdate,
)

FRONT_ALONE = """
import asyncio, sys
from worker.frontend.attach import AttachServer
from worker.frontend.server import WorkerFrontend

async def main():
    server = AttachServer(WorkerFrontend("w"), sys.argv[1])
    await server.open()
    print(server.path, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
GATEWAY_ALONE = """
import asyncio, sys
from router.channel import WorkerLink

async def main():
    attached = asyncio.Event()
    link = await WorkerLink.open(sys.argv[1], "g0", lambda item: attached.set())
    await attached.wait()
    print("attached", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


class Gateway(WorkerLink):
    """A link that keeps its items until they are read."""

    def __init__(self, on_item: object = None) -> None:
        self.items: asyncio.Queue[bytes] = asyncio.Queue()
        super().__init__(self.items.put_nowait)

    @classmethod
    async def connect(cls, path: str, gateway_id: str) -> Gateway:
        link = await cls.open(path, gateway_id, lambda item: None)
        first = decode_item(await link.items.get())
        assert isinstance(first, AttachSnapshot)
        return link


@pytest.fixture
async def server(front: WorkerFrontend) -> AsyncIterator[AttachServer]:
    server = AttachServer(front, "/tmp")
    await server.open()
    yield server
    server.close()


async def attach(server: AttachServer, gateway_id: str = "g0") -> Gateway:
    assert server.path is not None
    return await Gateway.connect(server.path, gateway_id)


async def news(link: Gateway) -> WorkerItem:
    """Next item that is not a heartbeat."""
    async with asyncio.timeout(120):
        while True:
            item = decode_item(await link.items.get())
            if not isinstance(item, WorkerUpdate) or item.deltas or item.block_events:
                return item


async def send(link: WorkerLink, *submits: Submit) -> SubmitReply:
    batch = msgspec.msgpack.encode(SubmitBatch(submits=list(submits)))
    return decode_reply(await link.call(batch))


async def ended(link: WorkerLink) -> str:
    async with asyncio.timeout(120):
        return await link.wait_ended()


async def test_the_socket_is_in_a_private_directory(server: AttachServer) -> None:
    assert server.path is not None
    directory = os.path.dirname(server.path)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    server.close()
    assert not os.path.exists(directory)
    assert server.path is None


async def test_items_come_in_order_and_each_gateways_own(
    server: AttachServer, engine: Engine
) -> None:
    one, two = await attach(server, "g1"), await attach(server, "g2")
    stored = BlockStored(block_hashes=[7], parent_hash=None)
    await engine.step({"g1": [delta("a", 5)]}, [stored])
    await engine.step({"g1": [delta("a", 6, finish="stop")], "g2": [delta("b", 9)]})
    first, second, other = await news(one), await news(one), await news(two)
    assert isinstance(first, WorkerUpdate)
    assert isinstance(second, WorkerUpdate)
    assert isinstance(other, WorkerUpdate)
    assert [first.deltas[0].token_ids, second.deltas[0].token_ids] == [[5], [6]]
    assert second.seq > first.seq
    assert [d.token_ids for d in other.deltas] == [[9]]
    assert first.block_events + second.block_events == [stored], "before the request's end"
    later = other if other.block_events else await news(two)
    assert isinstance(later, WorkerUpdate)
    assert later.block_events == [stored]
    one.close()
    two.close()


async def test_submits_are_answered_on_the_same_connection(
    server: AttachServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await attach(server)
    first, second = await asyncio.gather(
        send(link, submit("a"), submit("b")), send(link, submit("too-long", num_prompt=64))
    )
    assert (first.last_ordinal, first.rejections) == (2, [])
    assert [r.request_id for r in second.rejections] == ["too-long"]
    assert [s.request_id for s in (await engine.batch()).submits] == ["a", "b"]
    with monkeypatch.context() as patch:
        patch.setattr(link_module, "MAX_PAYLOAD_BYTES", 10)
        with pytest.raises(ConnectionError, match="exceeds the maximum"):
            await send(link, submit("beyond a frame"))
    with pytest.raises(ConnectionError, match=r"DecodeError|ValidationError"):
        await link.call(b"\xc1 no batch")
    assert (await send(link, submit("c"))).last_ordinal == 3
    link.close()


async def test_closing_the_link_aborts_its_requests(server: AttachServer, engine: Engine) -> None:
    link = await attach(server)
    await send(link, submit("open", attempt=2))
    await engine.batch()
    waiting = asyncio.ensure_future(ended(link))
    await asyncio.sleep(0)
    link.close()
    assert "gateway closed the connection" in await waiting
    with pytest.raises(ConnectionError):
        await send(link, submit("late"))
    assert [(a.request_id, a.attempt) for a in (await engine.batch()).aborts] == [("open", 2)]


async def test_attaching_again_ends_the_earlier_link(server: AttachServer, engine: Engine) -> None:
    earlier = await attach(server)
    await send(earlier, submit("old"))
    await engine.batch()
    later = await attach(server)
    assert [a.request_id for a in (await engine.batch()).aborts] == ["old"]
    assert "closed the connection" in await ended(earlier)
    await send(later, submit("new"))
    assert [s.request_id for s in (await engine.batch()).submits] == ["new"]
    later.close()


async def test_a_lost_engine_is_reported_and_the_link_stays(
    front: WorkerFrontend, server: AttachServer, engine: Engine
) -> None:
    link = await attach(server)
    front.engine_lost("rank 0 died")
    assert await news(link) == WorkerDown(epoch=1, reason="rank 0 died")
    again = Engine(front.open())
    await again.ready()
    snapshot = await news(link)
    assert isinstance(snapshot, AttachSnapshot)
    assert snapshot.epoch == 2
    again.close()
    front.close()
    assert "closed the connection" in await ended(link)


async def test_a_gateway_that_does_not_read_is_disconnected(
    server: AttachServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unread items are merged, up to a limit: buffers do not grow."""
    assert server.path is not None
    monkeypatch.setattr(front_module, "MAX_PENDING_EVENTS", 5)
    probe = await attach(server, "probe")
    with socket.socket(socket.AF_UNIX) as stalled:
        stalled.connect(server.path)
        hello = msgspec.msgpack.encode(Attach("stalled"))
        stalled.sendall(frame(hello))
        for turn in range(40):
            blocks = list(range(turn * 10_000, (turn + 1) * 10_000))
            await engine.step(events=[BlockStored(blocks, None)])
            await news(probe)
        received = await asyncio.to_thread(_read_to_end, stalled)
    assert 0 < received < 40 * 10_000 * 3  # each takes 3 to 5 bytes
    probe.close()


def test_a_request_is_served_on_uvloop() -> None:
    """Ray's replicas run uvloop, whose transports have other types and write later."""

    async def scenario() -> None:
        front = WorkerFrontend("w0")
        engine = Engine(front.open())
        server = AttachServer(front)
        await asyncio.gather(engine.ready(), front.wait_ready(), server.open())
        link = await attach(server)
        assert (await send(link, submit("a"))).last_ordinal == 1
        await engine.batch()
        for token in (5, 6):
            await engine.step({"g0": [delta("a", token)]})
            update = await news(link)
            assert isinstance(update, WorkerUpdate)
            assert update.deltas[0].token_ids == [token]
        link.close()
        assert [a.request_id for a in (await engine.batch()).aborts] == ["a"]
        again = await attach(server)
        front.close()
        server.close()
        assert "closed the connection" in await ended(again)
        engine.close()

    uvloop.run(asyncio.wait_for(scenario(), 120))


async def test_an_item_that_cannot_be_handled_ends_the_link(
    server: AttachServer, engine: Engine
) -> None:
    assert server.path is not None

    def refuse(item: bytes) -> None:
        raise ConnectionError("item 3 came in place of 2")

    link = await WorkerLink.open(server.path, "g0", refuse)
    assert "item 3 came in place of 2" in await ended(link)


async def test_a_peer_with_another_protocol_is_rejected(
    server: AttachServer, engine: Engine
) -> None:
    assert server.path is not None
    link = await attach(server)
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), 120) == b""
    writer.close()
    assert (await send(link, submit("a"))).last_ordinal == 1
    link.close()


async def test_a_killed_gateway_is_noticed(
    front: WorkerFrontend, server: AttachServer, engine: Engine
) -> None:
    assert server.path is not None
    with _start(GATEWAY_ALONE, server.path) as gateway:
        assert await _first_line(gateway) == "attached"
        await front.submit(msgspec.msgpack.encode(SubmitBatch(submits=[submit("open")])))
        await engine.batch()
        gateway.kill()
        async with asyncio.timeout(120):
            assert [a.request_id for a in (await engine.batch()).aborts] == ["open"]


async def test_a_killed_worker_is_noticed(tmp_path: Path) -> None:
    directory = str(tmp_path) if len(str(tmp_path)) < 60 else "/tmp"
    with _start(FRONT_ALONE, directory) as worker:
        link = await Gateway.connect(await _first_line(worker), "g0")
        call = asyncio.ensure_future(send(link, submit("a")))
        await asyncio.sleep(0)
        worker.kill()
        assert re.search("closed the connection|reset", await ended(link))
        with pytest.raises(ConnectionError):
            await send(link, submit("b"))
        await asyncio.wait([call])  # answered just before, or failed


def _start(code: str, argument: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, argument], stdout=subprocess.PIPE, cwd=ROOT
    )


async def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).decode().strip()


def _read_to_end(connection: socket.socket) -> int:
    connection.settimeout(120)
    received = 0
    while data := connection.recv(1 << 16):
        received += len(data)
    return received
