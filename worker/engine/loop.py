"""The main of rank 0's coordinator: takes submits from the front, steps, sends reports."""

from __future__ import annotations

import gc
import logging
import time

import msgspec

from worker.engine.base import Executor
from worker.engine.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.factory import create_executor
from worker.parallel.front_link import EngineLink
from worker.wire.messages import EngineMessage, StepReport, SubmitBatch

logger = logging.getLogger(__name__)


def serve_engine(config: EngineConfig, directory: str) -> None:
    """Runs a worker group's engine for the front that owns `directory`; blocks.

    Connects to the front's socket: SubmitBatches come in; one EngineInfo goes out when all ranks
    are ready, then a StepReport per step. Ranks 1 and up are started by the caller. Returns when
    the front has gone, since nobody is left to serve.

    Raises:
        RankFailure: a rank ended; its last word is in the message.
    """
    link = EngineLink(directory)
    executor = create_executor(config, directory, spawn_peers=False)
    try:
        info = executor.start()
        link.send(msgspec.msgpack.encode(info))
        core = EngineCore(config, info, executor, time.monotonic)
        # What start-up made lives as long as the process: no collection need walk it again.
        gc.freeze()
        _Loop(core, executor, link).run()
        logger.warning("the worker's front has closed the connection: this engine ends")
    finally:
        executor.close()
        link.close()


class _Loop:
    """Alternates between the front and the engine; blocks on the front while idle."""

    def __init__(self, core: EngineCore, executor: Executor, link: EngineLink) -> None:
        self._core = core
        self._executor = executor
        self._link = link
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SubmitBatch)

    def run(self) -> None:
        """Returns when the front has gone. Raises RankFailure."""
        while self._link.is_open:
            if not self._core.has_work():
                self._link.wait(self._executor.death_fds)
                self._executor.raise_on_death()
            self._drain_inbox()
            if self._core.has_work():
                self._send(self._core.step())

    def _drain_inbox(self) -> None:
        for payload in self._link.receive():
            batch = self._decoder.decode(payload)
            for submit in batch.submits:
                self._core.add(submit)
            for abort in batch.aborts:
                self._core.abort(abort)

    def _send(self, report: StepReport) -> None:
        message: EngineMessage = report
        self._link.send(self._encoder.encode(message))
