"""Main loop of rank 0's coordinator: receives submits, runs steps, sends reports."""

from __future__ import annotations

import select
import time

import msgspec

from worker.config import EngineConfig
from worker.core.engine import EngineCore
from worker.core.executor import Executor
from worker.core.executor_factory import create_executor
from worker.memory import freeze_gc
from worker.plan.plan import Plan
from worker.plan.sockets import FrameStream, connect
from worker.protocol.messages import (
    EngineInfo,
    StepLimit,
    StepReport,
    StepShape,
    SubmitBatch,
    TokenizerFingerprint,
)
from worker.protocol.text.tokenizer import load_tokenizer
from worker.protocol.tokenizer_fingerprint import fingerprint


def serve_engine(config: EngineConfig, directory: str, host: str = "") -> None:
    """Runs a worker group's engine for the frontend that owns `directory`; blocks.

    Connects to the frontend's socket, receives SubmitBatches, and sends one EngineInfo when all
    ranks are ready, then a StepReport per step. The caller starts the other ranks; `host` is this
    node's address if ranks are on several nodes, otherwise empty. Returns when the frontend closes
    the connection.

    Raises:
        RankFailure: a rank exited; the message includes its last error.
    """
    frontend = connect(directory, "front")
    executor = create_executor(config, directory, spawn_peers=False, host=host)
    try:
        info = executor.start()
        info.tokenizer_fingerprint = _fingerprint(config.tokenizer_checkpoint, info)
        frontend.send(msgspec.msgpack.encode(info))
        loop = _Loop(config, info, executor, frontend)
        freeze_gc()
        loop.run()
    except EOFError:
        return
    finally:
        executor.close()
        frontend.close()


def _fingerprint(model: str, info: EngineInfo) -> TokenizerFingerprint | None:
    """Fingerprint of this worker's tokenizer, which may be large and is therefore not kept in
    memory; None if the tokenizer cannot be loaded."""
    try:
        tokenizer = load_tokenizer(model)
    except ValueError:  # no fingerprint; gateways could not serve the model either
        return None
    return fingerprint(tokenizer, info.page_size, info.block_hash_salt)


class _Loop:
    """Alternates between frontend and engine; blocks while idle.

    Every message from the frontend is answered by a report, which states whether another one will
    follow. A missing report therefore means that a rank or this process has hung.
    """

    def __init__(
        self, config: EngineConfig, info: EngineInfo, executor: Executor, frontend: FrameStream
    ) -> None:
        self._core = EngineCore(config, info, executor, time.monotonic, self._launching)
        self._timeout_s = config.step_timeout_s
        self._executor = executor
        self._frontend = frontend
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SubmitBatch)

    def run(self) -> None:
        """Runs until the frontend has exited (EOFError) or a rank fails (RankFailure)."""
        while True:
            was_idle = not self._core.has_work()
            if was_idle:
                self._wait()
                self._executor.raise_on_death()
                self._core.take_grammars()
            has_input = self._take_in()
            if not self._core.has_work():
                if has_input:
                    self._send(self._core.report())
            else:
                if was_idle and not has_input:  # a grammar is ready, unknown to the frontend
                    self._send(self._core.report())
                self._send(self._core.step(self._take_in))
            if self._frontend.unsent:
                self._frontend.flush()

    def _take_in(self) -> bool:
        """Receives pending messages from the frontend without waiting; returns whether there were
        any."""
        payloads = self._frontend.read(wait=False)
        for payload in payloads:
            self._core.receive(self._decoder.decode(payload))
        return bool(payloads)

    def _send(self, report: StepReport) -> None:
        report.more = self._core.has_work()
        self._frontend.send(self._encoder.encode(report))

    def _launching(self, plan: Plan, shape: StepShape) -> None:
        """Sends a StepLimit before a step that may exceed the timeout."""
        forecast = self._core.scheduler.forecast
        seconds = forecast.limit_s(shape, self._timeout_s, plan.max_rounds)
        if seconds > self._timeout_s > 0.0:
            self._frontend.send(self._encoder.encode(StepLimit(plan.seq, seconds)))

    def _wait(self) -> None:
        poller = select.poll()
        unsent = select.POLLOUT if self._frontend.unsent else 0
        poller.register(self._frontend, select.POLLIN | unsent)
        for fd in (self._core.grammars.wake_fd, *self._executor.death_fds):
            poller.register(fd, select.POLLIN)
        poller.poll()
