"""The main of rank 0's coordinator: takes submits from the front, steps, sends reports."""

from __future__ import annotations

import select
import time

import msgspec

from worker.engine.base import Executor
from worker.engine.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.factory import create_executor
from worker.heap import settle_heap
from worker.parallel.frames import FrameStream, connect
from worker.wire.canary import sing
from worker.wire.messages import Canary, EngineInfo, EngineMessage, SubmitBatch
from worker.wire.tokenizer import load_tokenizer


def serve_engine(config: EngineConfig, directory: str, host: str = "") -> None:
    """Runs a worker group's engine for the front that owns `directory`; blocks.

    Connects to the front's socket: SubmitBatches come in; one EngineInfo goes out when all ranks
    are ready, then a StepReport per step. Ranks 1 and up are started by the caller; `host` is this
    node's address where they are on several nodes. Returns when the front has closed its end.

    Raises:
        RankFailure: a rank ended; its last word is in the message.
    """
    front = connect(directory, "front")
    executor = create_executor(config, directory, spawn_peers=False, host=host)
    try:
        info = executor.start()
        info.canary = _canary(config.model, info)
        front.send(msgspec.msgpack.encode(info))
        core = EngineCore(config, info, executor, time.monotonic)
        settle_heap()
        _Loop(core, executor, front).run()
    except EOFError:
        return
    finally:
        executor.close()
        front.close()


def _canary(model: str, info: EngineInfo) -> Canary | None:
    """The probe chat done here; the tokenizer, which may be large, is let go again."""
    try:
        tokenizer = load_tokenizer(model)
    except ValueError:  # nothing to compare, and gateways could not serve it either
        return None
    return sing(tokenizer, info.page_size, info.block_hash_salt)


class _Loop:
    """Alternates between the front and the engine; blocks while idle."""

    def __init__(self, core: EngineCore, executor: Executor, front: FrameStream) -> None:
        self._core = core
        self._executor = executor
        self._front = front
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SubmitBatch)

    def run(self) -> None:
        """Ends by EOFError, by RankFailure or with the process."""
        while True:
            if not self._core.has_work():
                self._wait()
                self._executor.raise_on_death()
                self._core.take_grammars()
            self._take_in()
            if self._core.has_work():
                report: EngineMessage = self._core.step(self._take_in)
                self._front.send(self._encoder.encode(report))
            if self._front.has_unsent:
                self._front.flush()

    def _take_in(self) -> None:
        for payload in self._front.read(wait=False):
            self._core.receive(self._decoder.decode(payload))

    def _wait(self) -> None:
        poller = select.poll()
        unsent = select.POLLOUT if self._front.has_unsent else 0
        poller.register(self._front, select.POLLIN | unsent)
        for fd in (self._core.grammars.wake_fd, *self._executor.death_fds):
            poller.register(fd, select.POLLIN)
        poller.poll()
