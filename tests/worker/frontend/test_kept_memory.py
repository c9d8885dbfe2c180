"""Memory that a frontend keeps for requests that have ended: none, however they ended."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import msgspec
import pytest
import uvloop

from router.channel import WorkerLink
from tests.support.worker.played_engine import (
    Engine,
    decode_item,
    decode_reply,
    delta,
    encode,
    submit,
)
from worker.frontend import attach as attach_module
from worker.frontend.attach import AttachServer
from worker.frontend.grammar import service
from worker.frontend.grammar.process import grammar_key
from worker.frontend.server import WorkerFrontend
from worker.protocol.messages import (
    Abort,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    CompiledGrammar,
    Submit,
    SubmitBatch,
    TokenDelta,
    Vocabulary,
    WorkerUpdate,
)
from worker.protocol.structured import StructuredOutputsParams

BATCH = 16
"""Requests of a round of one kind."""
KINDS = ("whole", "streamed", "grammar", "cancelled", "left", "refused", "malformed")
WARM_ROUNDS, ROUNDS = 10, 30
MOST_BYTES = 16.0
"""Bytes kept per request. The minimum size of an object is 16 bytes (CPython's `ALIGNMENT`), plus a
reference of 8 bytes to it."""


class InstantCompiler:
    """Compiles instantly, in this process."""

    vocabulary = Vocabulary([b"a"], [2], "")

    def __init__(self, setting: object) -> None:
        pass

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The same for all, except for its key."""
        return CompiledGrammar(grammar_key(params), "xgrammar", "compiled")

    def close(self) -> None:
        """Nothing to close."""


class Played:
    """Simulates rank 0 and a gateway that send rounds of requests to a frontend."""

    def __init__(self, engine: Engine, path: str) -> None:
        self._engine = engine
        self._path = path
        self._numbers = count()
        self._num_seen = 0
        self._num_ended = 0
        self._link: WorkerLink | None = None

    async def round(self, kind: str) -> None:
        """Sends a batch and waits for its end on either side."""
        link = self._link or await self._attach()
        if kind == "malformed":
            for _ in range(BATCH):
                with pytest.raises(ConnectionError):
                    await link.call(b"\xc1 no batch")
            return
        submits = [self._submit(kind) for _ in range(BATCH)]
        reply = decode_reply(await link.call(encode(SubmitBatch(submits=submits))))
        assert len(reply.rejections) == (BATCH if kind == "refused" else 0)
        if kind == "refused":
            return
        self._num_seen = reply.last_ordinal
        await self._engine.batch()
        if kind == "left":
            link.close()
            self._link = None
            assert len((await self._engine.batch()).aborts) == BATCH
            await self._report([])
            return
        await self._serve(kind, [one.request_id for one in submits], link)

    async def _serve(self, kind: str, request_ids: list[str], link: WorkerLink) -> None:
        hashes = [2**40 + next(self._numbers) for _ in request_ids]
        await self._report(
            [delta(r, 5, cached=3) for r in request_ids], [BlockStored(hashes, None)]
        )
        for token in range(3 if kind == "streamed" else 0):
            await self._report([delta(r, token) for r in request_ids])
        if kind == "cancelled":
            aborts = [Abort(request_id=r) for r in request_ids]
            await link.call(encode(SubmitBatch(aborts=aborts)))
            await self._engine.batch()
        end = "abort" if kind == "cancelled" else "length"
        form = self._num_ended + BATCH
        await self._report([delta(r, finish=end) for r in request_ids], [BlockRemoved(hashes)])
        while self._num_ended < form:
            await asyncio.sleep(0)

    def close(self) -> None:
        """Closes both."""
        if self._link is not None:
            self._link.close()
        self._engine.close()

    async def _attach(self) -> WorkerLink:
        self._link = await WorkerLink.open(self._path, "g0", self._on_item)
        # Submits before the attach are rejected.
        await self._link.call(encode(SubmitBatch()))
        return self._link

    def _submit(self, kind: str) -> Submit:
        number = next(self._numbers)
        one = submit(f"cmpl-{number}", num_prompt=64 if kind == "refused" else 4)
        if kind == "grammar":
            form = StructuredOutputsParams(regex=f"a{{{number}}}")
            one.sampling = msgspec.structs.replace(one.sampling, structured_outputs=form)
        return one

    async def _report(self, deltas: list[TokenDelta], events: Sequence[BlockEvent] = ()) -> None:
        await self._engine.step({"g0": deltas}, list(events), seen=self._num_seen)

    def _on_item(self, payload: bytes) -> None:
        item = decode_item(payload)
        if isinstance(item, WorkerUpdate):
            self._num_ended += sum(one.finish_reason is not None for one in item.deltas)


@asynccontextmanager
async def front_and_both_ends() -> AsyncIterator[Played]:
    front = WorkerFrontend("w0", step_timeout_s=0.0)
    server = AttachServer(front)
    engine = Engine(front.open())
    await asyncio.gather(engine.ready(), front.wait_ready(), server.open())
    assert server.path is not None
    played = Played(engine, server.path)
    try:
        yield played
    finally:
        played.close()
        front.close()
        server.close()


@pytest.fixture
def traced(frozen_heap: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(service, "GrammarCompiler", InstantCompiler)
    monkeypatch.setattr(service, "MAX_CACHED", 2 * BATCH)  # full after the first rounds
    monkeypatch.setattr(attach_module.logger, "disabled", True)  # pytest keeps what is logged
    tracemalloc.start()
    yield
    tracemalloc.stop()


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_is_kept_for_ended_requests(kind: str) -> None:
    """By number of requests, not by hours: what one leaves behind shows after some hundred."""

    async def kept() -> float:
        async with front_and_both_ends() as played:
            for _ in range(WARM_ROUNDS):
                await played.round(kind)
            before = traced_bytes()
            for _ in range(ROUNDS):
                await played.round(kind)
            return (traced_bytes() - before) / (ROUNDS * BATCH)

    # The loop of Ray's replicas; asyncio's keeps up to a hundred cancelled timers.
    assert uvloop.run(asyncio.wait_for(kept(), 120)) < MOST_BYTES
