"""In-memory workers that implement the worker protocol; their output is scripted."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from worker.protocol.adapters import AdapterCheck, AdapterTotals
from worker.protocol.blocks import block_hashes, root_hash
from worker.protocol.diffusion import BlockTotals
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    BlockEvent,
    BlockStored,
    EngineInfo,
    FinishReason,
    LoadSnapshot,
    Rejection,
    Submit,
    SubmitBatch,
    SubmitReply,
    TokenDelta,
    TokenLogprobs,
    WorkerDown,
    WorkerItem,
    WorkerUpdate,
)
from worker.protocol.times import FirstTokenTimes, StepTimes

PAGE_SIZE = 4
HEARTBEAT_S = 0.2
"""Seconds between updates of an idle worker."""
Script = Callable[[Submit], list[int]]


def scored(token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities in which the token is the second most likely; the most likely is the token
    with the next id."""
    likeliest = [token_id + 1, token_id, *range(300, 320)][:num_top]
    logprobs = [-0.5, -1.0, *(-2.0 - rank for rank in range(20))][:num_top]
    return TokenLogprobs.pack([token_id, *likeliest], [-1.0, *logprobs], 2)


def named(token_id: int, given: Sequence[int]) -> TokenLogprobs:
    """Log-probabilities of the named tokens: a tenth of the negated id."""
    return TokenLogprobs.pack([token_id, *given], [-0.1 * token for token in (token_id, *given)], 2)


class Running:
    def __init__(self, submit: Submit, token_ids: list[int], cached: int) -> None:
        self.submit = submit
        self.num_tokens = len(token_ids)
        self.left = list(token_ids)[submit.num_resumed :]
        self.cached = cached
        self.first = True
        self.drafted = False
        self.num_scored = 0
        self.num_rounds = 0


class StubWorker:
    """One worker: `step()` gives every running request its next token."""

    def __init__(self, worker_id: str, script: Script, *, vocab_size: int = 1000) -> None:
        self.worker_id = worker_id
        self.script = script
        self.epoch = 1
        self.info = EngineInfo(
            model="stub",
            max_model_len=256,
            max_total_tokens=512,
            vocab_size=vocab_size,
            page_size=PAGE_SIZE,
            max_num_seqs=8,
            eos_token_ids=[0],
            block_hash_salt="stub",
        )
        self.num_pages = 128
        self.session_tokens = 0
        """Number of tokens of live agent sessions that the worker reports."""
        self.ready = True
        self.busy = False
        """Whether the event loop is blocked while another thread sends heartbeats."""
        self.num_signs = self.num_asked = 0
        self.reachable = True
        self.failure: BaseException | None = None
        self.rejection: str | None = None
        self.rejection_status = 503
        self.rejection_param = ""
        self.rejection_is_final = False
        self.refuses: set[str] = set()
        self.folders: dict[str, str] = {}
        """Versions of the adapters in this worker's folders."""
        self.adapters: AdapterTotals | None = None
        """Adapters in memory that the worker reports."""
        self.protocol_version = PROTOCOL_VERSION
        self.blocks: dict[int, None] = {}
        self.batches: list[SubmitBatch] = []
        self.running: dict[str, Running] = {}
        self.aborted: list[str] = []
        self.num_attached = 0
        self.num_submits = 0
        self.answer_gate = asyncio.Event()
        self.answer_gate.set()
        self.door = asyncio.Event()
        """Set while streams to the worker can be opened."""
        self.door.set()
        self.compiled = asyncio.Event()
        """Set if grammars are compiled."""
        self.compiled.set()
        self.checked = asyncio.Event()
        """Set if adapters are checked."""
        self.checked.set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.news = asyncio.Event()
        self._queue: asyncio.Queue[WorkerItem | BaseException | None] | None = None
        self._seq = 0

    async def attach(self) -> AsyncGenerator[bytes, None]:
        if not self.reachable:
            raise ConnectionError("stub is unreachable")
        await self.door.wait()
        queue = self._queue = asyncio.Queue()
        self._seq = 0
        self.num_attached += 1
        queue.put_nowait(self.snapshot())
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield msgspec.msgpack.encode(item)

    async def submit(self, payload: bytes) -> bytes:
        if not self.reachable:
            raise ConnectionError("stub is unreachable")
        if self.failure is not None:
            raise self.failure
        batch = msgspec.msgpack.decode(payload, type=SubmitBatch)
        self.batches.append(batch)
        if any(submit.sampling.structured_outputs for submit in batch.submits):
            await self.compiled.wait()
        if any(submit.adapter for submit in batch.submits):
            await self.checked.wait()
        await self.gate.wait()
        rejections = []
        for submit in batch.submits:
            if self.rejection is not None or submit.request_id in self.refuses:
                rejections.append(
                    Rejection(
                        request_id=submit.request_id,
                        attempt=submit.attempt,
                        message=self.rejection or "not this one",
                        status=self.rejection_status,
                        param=self.rejection_param,
                        is_final=self.rejection_is_final,
                    )
                )
                continue
            self.num_submits += 1
            self.start(submit)
        for abort in batch.aborts:
            self.aborted.append(abort.request_id)
            self.running.pop(abort.request_id, None)
        self.news.set()
        accepted = len(batch.submits) - len(rejections)
        reply = SubmitReply(
            epoch=self.epoch,
            rejections=rejections,
            last_ordinal=self.num_submits if accepted else 0,
        )
        if folder := batch.check_adapter:
            version = self.folders.get(folder, "")
            reply.adapter = AdapterCheck(version, "" if version else f"{folder} does not exist")
        await self.answer_gate.wait()
        return msgspec.msgpack.encode(reply)

    def start(self, submit: Submit) -> None:
        hashes = self.hashes(submit)
        cached = 0
        for block_hash in hashes:
            if block_hash not in self.blocks:
                break
            cached += PAGE_SIZE
        cached = min(cached, len(submit.prompt) // 4 - 1)
        self.running[submit.request_id] = Running(submit, self.script(submit), cached)

    def hashes(self, submit: Submit) -> list[int]:
        root = root_hash(self.info.block_hash_salt, submit.cache_salt)
        return block_hashes(submit.prompt, PAGE_SIZE, root)

    def step(self) -> None:
        deltas: list[TokenDelta] = []
        events: list[BlockEvent] = []
        for request_id, running in list(self.running.items()):
            sampling = running.submit.sampling
            count = self.info.block_size
            streams_drafts = sampling.diffusion is not None and sampling.diffusion.stream_drafts
            running.drafted = streams_drafts and not running.drafted
            if running.drafted:
                shown = TokenDelta(request_id, running.submit.attempt, [])
                places = enumerate(running.left[:count])
                shown.draft = [-1 if place % 2 else token for place, token in places]
                deltas.append(shown)
                continue
            if sampling.pooling is not None:
                del self.running[request_id]
                delta = TokenDelta(request_id, running.submit.attempt, [], "stop")
                delta.num_cached_tokens, delta.times = running.cached, FirstTokenTimes(0.25, 0.5)
                delta.pooled = self.vector(running.submit)
                deltas.append(delta)
                continue
            half = len(running.submit.prompt) // 4 // 2
            if sampling.prompt_logprobs is not None and running.num_scored < half:
                running.num_scored = half
                deltas.append(self._prompt_chunk(running, slice(1, 1 + running.num_scored)))
                continue
            token_ids, running.left = running.left[:count], running.left[count:]
            finish: FinishReason | None = None if running.left else "stop"
            if sampling.max_tokens is not None:
                taken = running.num_tokens - len(running.left)
                if finish is None and taken >= sampling.max_tokens:
                    finish = "length"
            cached = -1
            if running.first:
                running.first = False
                cached = running.cached
                stored = [h for h in self.hashes(running.submit) if h not in self.blocks]
                self.blocks.update(dict.fromkeys(stored))
                if stored:
                    events.append(BlockStored(block_hashes=stored, parent_hash=None))
            if finish is not None:
                del self.running[request_id]
            delta = TokenDelta(
                request_id, running.submit.attempt, token_ids, finish, num_cached_tokens=cached
            )
            if cached >= 0:
                delta.times = FirstTokenTimes(0.25, 0.5)
            if count > 1:
                running.num_rounds += 3
                delta.num_rounds, delta.num_forwards = running.num_rounds, running.num_rounds + 1
            if sampling.logprobs is not None:
                given = sampling.logprob_token_ids
                delta.logprobs = [
                    named(token_id, given) if given else scored(token_id, sampling.logprobs)
                    for token_id in token_ids
                ]
            if sampling.prompt_logprobs is not None and cached >= 0:
                rest = self._prompt_chunk(running, slice(1 + running.num_scored, None))
                delta.prompt_logprobs = rest.prompt_logprobs
            deltas.append(delta)
        self.update(deltas, events)

    def vector(self, submit: Submit) -> bytes:
        """The vector of a prompt: its first tokens, as many as the model's vectors have numbers."""
        assert self.info.pooling is not None, "rejected before"
        assert submit.sampling.pooling is not None
        tokens = memoryview(submit.prompt).cast("i").tolist() + [0] * self.info.pooling.size
        size = submit.sampling.pooling.dimensions or self.info.pooling.size
        return array("f", tokens[:size]).tobytes()

    def _prompt_chunk(self, running: Running, span: slice) -> TokenDelta:
        """The delta of a chunk of a prompt, as sent by engines before the first token."""
        submit = running.submit
        delta = TokenDelta(submit.request_id, submit.attempt, [])
        num_top = submit.sampling.prompt_logprobs
        assert num_top is not None
        prompt = memoryview(submit.prompt).cast("i").tolist()
        delta.prompt_logprobs = [scored(token_id, num_top) for token_id in prompt[span]]
        return delta

    def update(
        self,
        deltas: list[TokenDelta],
        events: list[BlockEvent],
        seq: int | None = None,
    ) -> None:
        self._seq += 1
        self.send(
            WorkerUpdate(self.epoch, self._seq if seq is None else seq, deltas, events, self.load())
        )

    def send(self, item: WorkerItem | BaseException | None) -> None:
        if self._queue is not None:
            self._queue.put_nowait(item)

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            num_running=len(self.running),
            num_free_pages=self.num_pages,
            num_total_pages=self.num_pages,
            session_tokens=self.session_tokens,
            max_num_seqs=self.info.max_num_seqs,
            num_submits_seen=self.num_submits,
            step_times=StepTimes(num_steps=8, forward=0.5),
            blocks=BlockTotals(5, 12, 14, 60) if self.info.block_size > 1 else None,
            adapters=self.adapters,
        )

    def snapshot(self) -> AttachSnapshot:
        return AttachSnapshot(
            protocol_version=self.protocol_version,
            worker_id=self.worker_id,
            epoch=self.epoch,
            info=self.info if self.ready else None,
            blocks=[BlockStored(block_hashes=list(self.blocks), parent_hash=None)],
            load=self.load(),
        )

    def crash(self) -> None:
        """Simulates failure of the rank group; the frontend keeps running."""
        self.running.clear()
        self.blocks.clear()
        self.num_submits = 0
        self.send(WorkerDown(self.epoch, "rank 0 was killed"))
        self.epoch += 1

    def vanish(self) -> None:
        """Simulates exit of the entire worker."""
        self.reachable = False
        self.running.clear()
        self.send(ConnectionError("stub broke"))

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on the received messages holds."""
        while not condition():
            self.news.clear()
            await self.news.wait()

    async def run(self, interval_s: float = 0.0) -> None:
        """Steps forever, with heartbeats while idle."""
        while True:
            if self.running:
                self.step()
                await asyncio.sleep(interval_s)
                continue
            self.news.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self.news.wait()
            except TimeoutError:
                self.update([], [])


class StubTransport:
    """Connects to stub workers. `add` and `remove` change the set."""

    def __init__(self, *workers: StubWorker) -> None:
        self.workers = {worker.worker_id: worker for worker in workers}
        self._on_change: Callable[[tuple[str, ...]], None] | None = None
        self._members = list(self.workers)

    async def attach(
        self, worker_id: str, gateway_id: str, on_item: Callable[[bytes], None]
    ) -> None:
        async with aclosing(self.workers[worker_id].attach()) as items:
            async for item in items:
                on_item(item)

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        return await self.workers[worker_id].submit(payload)

    async def heartbeat(self, worker_id: str) -> bytes | None:
        worker = self.workers[worker_id]
        worker.num_asked += 1
        worker.num_signs += worker.busy
        return b"%d" % worker.num_signs if worker.num_signs else None

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        self._on_change = on_change
        on_change(tuple(self._members))

    def set_members_quietly(self, *worker_ids: str) -> None:
        self._members = list(worker_ids)

    def set_members(self, *worker_ids: str) -> None:
        self._members = list(worker_ids)
        assert self._on_change is not None
        self._on_change(tuple(worker_ids))
