"""The main of rank 0's coordinator: takes submits from the front, steps, sends reports."""

from __future__ import annotations

import gc
import time

import msgspec
import zmq

from worker.engine.base import Executor
from worker.engine.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.factory import create_executor
from worker.parallel.channel import endpoint, open_socket
from worker.wire.messages import EngineMessage, StepReport, SubmitBatch


def serve_engine(config: EngineConfig, directory: str) -> None:
    """Runs a worker group's engine for the front that owns `directory`; blocks.

    Binds `inbox` (SubmitBatch comes in), connects `reports` (one EngineInfo goes out when all
    ranks are ready, then a StepReport per step). Ranks 1 and up are started by the caller.

    Raises:
        RankFailure: a rank ended; its last word is in the message.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = open_socket(context, zmq.PULL)
    inbox.bind(endpoint(directory, "inbox"))
    reports = open_socket(context, zmq.PUSH)
    reports.connect(endpoint(directory, "reports"))
    executor = create_executor(config, directory, spawn_peers=False)
    try:
        info = executor.start()
        reports.send(msgspec.msgpack.encode(info))
        core = EngineCore(config, info, executor, time.monotonic)
        # What start-up made lives as long as the process: no collection need walk it again.
        gc.freeze()
        _Loop(core, executor, inbox, reports).run()
    finally:
        executor.close()
        reports.close()
        inbox.close()
        context.term()


class _Loop:
    """Alternates between the inbox and the engine; blocks on the inbox while idle."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        inbox: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
    ) -> None:
        self._core = core
        self._executor = executor
        self._inbox = inbox
        self._reports = reports
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SubmitBatch)
        self._idle_poller = zmq.Poller()
        self._idle_poller.register(inbox, zmq.POLLIN)
        self._idle_poller.register(core.grammars.wake_fd, zmq.POLLIN)
        for fd in executor.death_fds:
            self._idle_poller.register(fd, zmq.POLLIN)

    def run(self) -> None:
        """Never returns; ends by RankFailure or with the process."""
        while True:
            if not self._core.has_work():
                self._idle_poller.poll()
                self._executor.raise_on_death()
                self._core.take_grammars()
            self._drain_inbox()
            if self._core.has_work():
                self._send(self._core.step())

    def _drain_inbox(self) -> None:
        while True:
            try:
                payload = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            batch = self._decoder.decode(payload)
            self._core.receive(batch)

    def _send(self, report: StepReport) -> None:
        message: EngineMessage = report
        self._reports.send(self._encoder.encode(message))
