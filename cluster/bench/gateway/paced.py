"""An engine that computes nothing: one token for each running request every so many milliseconds.

It speaks to the worker's front over the same sockets and in the same messages as the real one, so
that what lies in front of an engine can be measured by itself.
"""

from __future__ import annotations

import select
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from worker.config import EngineConfig
from worker.models.config import load_model_config
from worker.plan.sockets import FrameStream, connect
from worker.wire.blocks import block_hashes, root_hash
from worker.wire.messages import (
    BlockEvent,
    BlockStored,
    EngineInfo,
    EngineMessage,
    LoadSnapshot,
    StepReport,
    Submit,
    SubmitBatch,
    TokenDelta,
)

_PAGES = 1 << 16
_SCRIPT = (
    "The ferry leaves the old harbour at seven, and the baker's cart is already on the quay. "
    "Three gulls follow it; a fourth sits on the bollard and waits. Nobody has told the ferryman "
    "that the price of tickets rose by 2.50 on Monday, so he asks for 10 as ever. "
)
"""What completions of the stub read; any prose will do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PacedConfig:
    """What the stub pretends to be."""

    info: EngineInfo
    script: tuple[int, ...]
    """Tokens that completions consist of, repeated."""
    step_s: float


@dataclass(kw_only=True, slots=True)
class _Running:
    submit: Submit
    num_tokens: int = 0


class PacedEngine:
    """The state of the stub: every submitted request runs until its `max_tokens`."""

    def __init__(self, config: PacedConfig) -> None:
        self._config = config
        self._running: dict[str, _Running] = {}
        self._events: list[BlockEvent] = []
        self._root = root_hash(config.info.block_hash_salt)
        self._seq = 0
        self._num_submits_seen = 0

    def take(self, batch: SubmitBatch) -> None:
        """Adds and aborts requests."""
        for submit in batch.submits:
            self._num_submits_seen += 1
            self._running[submit.request_id] = _Running(submit=submit)
            prompt = array("i", submit.prompt)
            hashes = block_hashes(prompt, self._config.info.page_size, self._root)
            if hashes:
                self._events.append(BlockStored(block_hashes=hashes, parent_hash=None))
        for abort in batch.aborts:
            self._running.pop(abort.request_id, None)

    def step(self) -> StepReport:
        """One more token for every running request."""
        script = self._config.script
        deltas: dict[str, list[TokenDelta]] = {}
        for request_id, running in list(self._running.items()):
            submit = running.submit
            first = running.num_tokens == 0
            token = script[running.num_tokens % len(script)]
            running.num_tokens += 1
            delta = TokenDelta(
                request_id=request_id,
                attempt=submit.attempt,
                token_ids=[token],
                num_cached_tokens=0 if first else -1,
            )
            if running.num_tokens == submit.sampling.max_tokens:
                delta.finish_reason = "length"
                del self._running[request_id]
            deltas.setdefault(submit.gateway_id, []).append(delta)
        self._seq += 1
        events, self._events = self._events, []
        return StepReport(seq=self._seq, deltas=deltas, block_events=events, load=self._load())

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is left to report."""
        return not self._running and not self._events

    def _load(self) -> LoadSnapshot:
        info = self._config.info
        return LoadSnapshot(
            num_running=len(self._running),
            num_free_pages=_PAGES,
            num_total_pages=_PAGES,
            max_num_seqs=info.max_num_seqs,
            step_ms=self._config.step_s * 1000.0,
            num_step_tokens=len(self._running),
            num_submits_seen=self._num_submits_seen,
        )


def paced_config(config: EngineConfig, step_s: float) -> PacedConfig:
    """A stub that stands in for the model of `config`: same limits, real words of its tokenizer."""
    model = load_model_config(config.checkpoint)
    info = EngineInfo(
        model=config.model,
        max_model_len=model.max_model_len,
        max_total_tokens=_PAGES * config.page_size,
        vocab_size=model.vocab_size,
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=list(model.eos_token_ids),
        block_hash_salt=model.block_hash_salt,
    )
    script = tuple(_tokenizer(config.model).encode(_SCRIPT, add_special_tokens=False).ids)
    return PacedConfig(info=info, script=script, step_s=step_s)


def script_text(model: str, num_tokens: int) -> str:
    """What a completion of `num_tokens` tokens by the stub for `model` reads."""
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode(_SCRIPT, add_special_tokens=False).ids
    return str(tokenizer.decode([ids[place % len(ids)] for place in range(num_tokens)]))


def run_paced(step_s: float, config: EngineConfig, directory: str) -> None:
    """Runs the stub in place of the engine that `config` describes; see `serve_paced`."""
    serve_paced(paced_config(config, step_s), directory)


def serve_paced(config: PacedConfig, directory: str) -> None:
    """Runs the stub for the front that owns `directory`, on the real engine loop's socket.

    Raises:
        EOFError: the front has closed it.
    """
    front = connect(directory, "front")
    decode = msgspec.msgpack.Decoder(SubmitBatch).decode
    encode = msgspec.msgpack.Encoder().encode
    front.send_all(encode(config.info))
    engine = PacedEngine(config)
    due = time.monotonic()
    while True:
        if engine.idle:
            _take(front, engine, decode)
            due = time.monotonic()
        due = max(due + config.step_s, time.monotonic())
        _take_until(due, front, engine, decode)
        message: EngineMessage = engine.step()
        front.send_all(encode(message))


def _tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def _take(front: FrameStream, engine: PacedEngine, decode: Callable[[bytes], SubmitBatch]) -> None:
    for payload in front.read():
        engine.take(decode(payload))


def _take_until(
    due: float,
    front: FrameStream,
    engine: PacedEngine,
    decode: Callable[[bytes], SubmitBatch],
) -> None:
    while (left := due - time.monotonic()) > 0:
        if select.select([front], [], [], left)[0]:
            _take(front, engine, decode)
