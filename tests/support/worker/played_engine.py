"""Fake peers of a worker frontend: rank 0 behind it, a gateway in front of it."""

from __future__ import annotations

import asyncio

import msgspec

from worker.frontend.server import WorkerFrontend
from worker.plan.sockets import connect
from worker.protocol.messages import (
    BlockEvent,
    EngineInfo,
    LoadSnapshot,
    StepReport,
    Submit,
    SubmitBatch,
    SubmitReply,
    TokenDelta,
    WorkerItem,
    WorkerUpdate,
)
from worker.protocol.sampling import SamplingParams

INFO = EngineInfo(
    model="tiny",
    max_model_len=64,
    max_total_tokens=128,
    vocab_size=32,
    page_size=4,
    max_num_seqs=8,
    eos_token_ids=[2],
    block_hash_salt="tiny",
)
decode_item = msgspec.msgpack.Decoder(WorkerItem).decode
decode_batch = msgspec.msgpack.Decoder(SubmitBatch).decode
decode_reply = msgspec.msgpack.Decoder(SubmitReply).decode
encode = msgspec.msgpack.encode


class Engine:
    """Fake rank 0: receives batches, sends reports."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.stream = connect(directory, "front")
        self.batches: list[bytes] = []
        self.seq = 0

    async def ready(self) -> None:
        self.stream.send(encode(INFO))

    async def step(
        self,
        deltas: dict[str, list[TokenDelta]] | None = None,
        events: list[BlockEvent] | None = None,
        running: int = 0,
        seen: int = 0,
    ) -> None:
        self.seq += 1
        load = LoadSnapshot(num_running=running, num_submits_seen=seen)
        report = StepReport(seq=self.seq, deltas=deltas or {}, block_events=events or [], load=load)
        self.stream.send(encode(report))

    async def batch(self) -> SubmitBatch:
        while not self.batches:
            self.batches += await asyncio.to_thread(self.stream.read)
        return decode_batch(self.batches.pop(0))

    def close(self) -> None:
        self.stream.close()


class Gateway:
    """Reads one attach stream; skips heartbeats by default."""

    def __init__(self, front: WorkerFrontend, gateway_id: str) -> None:
        self.stream = front.attach(gateway_id)

    async def next(self) -> WorkerItem:
        item: WorkerItem = decode_item(await anext(self.stream))
        return item

    async def news(self) -> WorkerItem:
        while True:
            item = await self.next()
            if not isinstance(item, WorkerUpdate) or item.deltas or item.block_events:
                return item

    async def close(self) -> None:
        await self.stream.aclose()  # type: ignore[attr-defined]


def submit(
    request_id: str, gateway_id: str = "g0", num_prompt: int = 4, attempt: int = 0
) -> Submit:
    return Submit(
        request_id=request_id,
        gateway_id=gateway_id,
        prompt=bytes(4 * num_prompt),
        sampling=SamplingParams(seed=1),
        attempt=attempt,
    )


def delta(request_id: str, *tokens: int, **fields: object) -> TokenDelta:
    return msgspec.convert(
        [request_id, 0, list(tokens), fields.get("finish"), None, fields.get("cached", -1)],
        TokenDelta,
    )


async def send(front: WorkerFrontend, *submits: Submit) -> SubmitReply:
    return decode_reply(await front.submit(encode(SubmitBatch(submits=list(submits)))))
