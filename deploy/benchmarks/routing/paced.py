"""Paced worker: the real scheduler and prefix cache, with steps that only wait, in real time."""

from __future__ import annotations

import asyncio
import itertools
import re
import select
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import FleetShape
from worker.config import DEFAULT_PAGE_SIZE, EngineConfig
from worker.models.config.model_config import load_model_config
from worker.plan.sockets import FrameStream, connect
from worker.protocol.messages import EngineMessage, Submit, SubmitBatch, TokenDelta
from worker.protocol.sampling import SamplingParams
from worker.protocol.step_time import StepCosts

_LOCAL = "local"
"""Gateway id of PacedServer's requests."""
Words = NDArray[np.int64]
"""Word indices in a Vocabulary."""
_PAGES = 1 << 16
_STEP_TOKENS = 1 << 16
"""Token budget of a steady worker's step; large enough that no prompt waits for another."""
_PROSE = (
    "The ferry leaves the old harbour at seven, and the baker's cart is already on the quay. "
    "Three gulls follow it; a fourth sits on the bollard and waits. Nobody has told the ferryman "
    "that the price of tickets rose by 2.50 on Monday, so he asks for 10 as ever. "
)


class Vocabulary:
    """Words that are a single token each, regardless of adjacent words.

    Raises:
        ValueError: the tokenizer has fewer than 100 such words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = tokenizer.get_vocab_size()
        texts = {i: str(tokenizer.decode([i])) for i in range(size)}
        self.ids = [i for i, text in texts.items() if re.fullmatch(r" [a-z]{2,}", text)]
        self._words = [texts[i] for i in self.ids]
        if len(self.ids) < 100:
            raise ValueError(
                f"the tokenizer has only {len(self.ids)} lowercase words that are a single token, "
                "but at least 100 are needed: use another --model"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def answer_id(self) -> int:
        """Token id of the first word; paced workers repeat it as their answer."""
        return self.ids[0]

    def text(self, words: Words) -> str:
        """Text of the words with the given indices."""
        known = self._words
        return "".join([known[place] for place in words.tolist()])


def paced_worker(
    model: str, shape: FleetShape, slowness: float, script: Sequence[int]
) -> SimWorker:
    """A simulated worker that serves under a model's name.

    Args:
        model: folder of the checkpoint.
        shape: limits and step costs.
        slowness: factor for the step times.
        script: token ids of answers; see SimWorker.
    """
    worker = SimWorker("paced", shape, slowness, script=script, clock=time.monotonic)
    config = load_model_config(model)
    worker.info.model = model
    worker.info.vocab_size = config.vocab_size
    worker.info.eos_token_ids = list(config.eos_token_ids)
    return worker


def load(model: str) -> Tokenizer:
    """Loads the tokenizer from a checkpoint's folder."""
    return Tokenizer.from_file(str(Path(model) / "tokenizer.json"))


class Pace:
    """Step clock without drift: a step begins when the previous one was due, not when its end was
    observed."""

    def __init__(self) -> None:
        self._due = 0.0
        self._busy = False

    def idle(self) -> None:
        """Records that no step directly follows the last one."""
        self._busy = False

    def end_of(self, seconds: float) -> float:
        """Starts a step of `seconds`; returns when it ends, on the monotonic clock."""
        self._due = (self._due if self._busy else time.monotonic()) + seconds
        self._busy = True
        return self._due


def run_paced(shape: FleetShape, slowness: float, config: EngineConfig, directory: str) -> None:
    """Runs a paced worker in place of the engine of `config`. Blocks; see `serve_front`."""
    script = (Vocabulary(load(config.model)).answer_id,)
    serve_front(paced_worker(config.model, shape, slowness, script), directory)


def run_steady(step_s: float, config: EngineConfig, directory: str) -> None:
    """Runs a paced worker whose steps all take `step_s` and whose answers are prose. Blocks."""
    shape = steady_shape(step_s, config)
    serve_front(paced_worker(config.model, shape, 1.0, prose(config.model)), directory)


def steady_shape(step_s: float, config: EngineConfig) -> FleetShape:
    """Limits and speeds of a worker on which each running request gets a token every `step_s`
    seconds."""
    return FleetShape(
        costs=StepCosts(
            constant=step_s, prefill_token=0.0, attended=0.0, decode_row=0.0, context_token=0.0
        ),
        page_size=config.cache.page_size or DEFAULT_PAGE_SIZE,
        num_pages=_PAGES,
        max_num_seqs=config.scheduling.max_num_seqs or FleetShape().max_num_seqs,
        max_num_batched_tokens=_STEP_TOKENS,
    )


def prose(model: str) -> list[int]:
    """Token ids of steady workers' answers, encoded with the tokenizer in a checkpoint's folder."""
    ids: list[int] = load(model).encode(_PROSE, add_special_tokens=False).ids
    return ids


def prose_after(model: str, num_prompt: int, num_tokens: int) -> str:
    """Text of a steady worker's answer of `num_tokens` tokens to a prompt of `num_prompt`
    tokens."""
    ids = prose(model)
    output = [ids[place % len(ids)] for place in range(num_prompt, num_prompt + num_tokens)]
    return str(load(model).decode(output))


def serve_front(worker: SimWorker, directory: str) -> None:
    """Serves as the engine of the worker frontend that owns `directory`. Blocks.

    Raises:
        EOFError: the frontend has closed the connection.
    """
    front = connect(directory, "front")
    decode = msgspec.msgpack.Decoder(SubmitBatch).decode
    encode = msgspec.msgpack.Encoder().encode

    def take() -> None:
        for payload in front.read():
            _take(worker, decode(payload))

    front.send_all(encode(worker.info))
    pace = Pace()
    while True:
        seconds = worker.begin()
        if seconds is None:
            pace.idle()
            take()
            continue
        due = pace.end_of(seconds)
        while (left := due - time.monotonic()) > 0:
            if _readable(front, left):
                take()
        report: EngineMessage = worker.finish()
        front.send_all(encode(report))


def _readable(front: FrameStream, seconds: float) -> bool:
    return bool(select.select([front], [], [], seconds)[0])


def _take(worker: SimWorker, batch: SubmitBatch) -> None:
    for submit in batch.submits:
        worker.submit(submit)
    for abort in batch.aborts:
        worker.abort(abort.request_id, abort.attempt)


class PacedServer:
    """Paced worker with direct calls and answers in OpenAI's format, for other projects' routers.

    Must be created within a running event loop.
    """

    def __init__(self, model: str, shape: FleetShape, slowness: float) -> None:
        self._tokenizer = load(model)
        script = (Vocabulary(self._tokenizer).answer_id,)
        self._worker = paced_worker(model, shape, slowness, script)
        self._streams: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._stepping = asyncio.create_task(self._steps())

    @property
    def num_open(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    async def generate(self, prompt: str, max_tokens: int) -> AsyncIterator[bytes]:
        """Server-sent events of one completion in OpenAI's format; the last one before [DONE] has
        the usage."""
        ids = await asyncio.to_thread(lambda: self._tokenizer.encode(prompt).ids)
        request_id = f"r{next(self._numbers)}"
        queue: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._streams[request_id] = queue
        self._worker.submit(
            Submit(
                request_id=request_id,
                gateway_id=_LOCAL,
                prompt=np.array(ids, "<i4").tobytes(),
                sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
            )
        )
        self._wake.set()
        try:
            async for event in self._events(queue, len(ids)):
                yield event
        finally:
            del self._streams[request_id]
            self._worker.abort(request_id)

    async def _events(
        self, queue: asyncio.Queue[TokenDelta], num_prompt: int
    ) -> AsyncIterator[bytes]:
        usage = _Usage(prompt_tokens=num_prompt)
        finish: str | None = None
        while finish is None:
            delta = await queue.get()
            finish = delta.finish_reason
            usage.completion_tokens += len(delta.token_ids)
            if delta.num_cached_tokens >= 0:
                usage.prompt_tokens_details["cached_tokens"] = delta.num_cached_tokens
            choice = {
                "index": 0,
                "text": self._tokenizer.decode(delta.token_ids),
                "finish_reason": finish,
            }
            yield _event(choices=[choice])
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
        yield _event(choices=[], usage=usage)
        yield b"data: [DONE]\n\n"

    async def _steps(self) -> None:
        pace = Pace()
        while True:
            seconds = self._worker.begin()
            if seconds is None:
                pace.idle()
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(pace.end_of(seconds) - time.monotonic())
            for delta in self._worker.finish().deltas.get(_LOCAL, ()):
                if (queue := self._streams.get(delta.request_id)) is not None:
                    queue.put_nowait(delta)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: dict[str, int] = msgspec.field(default_factory=dict)


def _event(**payload: object) -> bytes:
    body = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "paced", **payload}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
