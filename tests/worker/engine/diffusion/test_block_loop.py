"""Rank 0's loop with a block-diffusion model at depth 1, as seen by its frontend."""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch

from tests.support.checkpoints.sdar import SdarCheckpoint, write_sdar
from tests.support.engines.block_engine import BlockEngine
from tests.support.engines.block_requests import prompts, sampling
from tests.support.engines.forked_rank import forking_ranks
from worker.config import EngineConfig
from worker.core.loop import serve_engine
from worker.plan.sockets import FrameStream, listen
from worker.protocol.messages import (
    Abort,
    EngineInfo,
    EngineMessage,
    StepLimit,
    StepReport,
    Submit,
    SubmitBatch,
)

COUNT = 10


class Front:
    """The other end of the loop's socket."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode

    def read(self) -> list[EngineInfo | StepReport]:
        messages = map(self._decode, self._stream.read())
        return [message for message in messages if not isinstance(message, StepLimit)]

    def send(self, batch: SubmitBatch) -> None:
        self._stream.send_all(msgspec.msgpack.encode(batch))


@contextmanager
def serving(config: EngineConfig) -> Iterator[Front]:
    with tempfile.TemporaryDirectory(prefix="rf-") as directory:
        listener = listen(directory, "front", 1)
        loop = threading.Thread(target=serve_engine, args=(config, directory))
        loop.start()
        connection, _ = listener.accept()
        stream = FrameStream(connection)
        try:
            yield Front(stream)
        finally:
            stream.close()
            listener.close()
            loop.join(60)
            gc.unfreeze()
            assert not loop.is_alive()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SdarCheckpoint:
    torch.set_num_threads(1)
    return write_sdar(tmp_path_factory.mktemp("sdar"), 8)


def test_requests_that_arrive_while_steps_run(checkpoint: SdarCheckpoint) -> None:
    """Each report brings a new request; one is aborted. The others are served as if alone."""
    with BlockEngine(checkpoint.folder, kv_cache_tokens=2048, max_num_seqs=1) as engine:
        alone = engine.serve(prompts(COUNT), sampling(COUNT))
    config = EngineConfig.of(
        model=checkpoint.folder, device="cpu", cpu_threads=1, kv_cache_tokens=2048, max_num_seqs=4
    )
    submits = [
        Submit(
            request_id=str(number),
            gateway_id="g",
            prompt=np.asarray(prompt, dtype="<i4").tobytes(),
            sampling=params,
        )
        for number, (prompt, params) in enumerate(zip(prompts(COUNT), sampling(COUNT), strict=True))
    ]
    token_ids: list[list[int]] = [[] for _ in submits]
    rounds, reasons = [0] * COUNT, [""] * COUNT
    num_reports = 0
    with forking_ranks(), serving(config) as front:
        (info,) = front.read()
        assert isinstance(info, EngineInfo)
        assert info.block_size == 8
        front.send(SubmitBatch(submits=submits[:2]))
        num_sent = 2
        while not all(reasons):
            for report in front.read():
                assert isinstance(report, StepReport)
                num_reports += 1
                if num_sent < COUNT:
                    front.send(SubmitBatch(submits=[submits[num_sent]]))
                    num_sent += 1
                elif num_sent == COUNT:
                    front.send(SubmitBatch(aborts=[Abort(request_id=str(COUNT - 1))]))
                    num_sent += 1
                for delta in report.deltas.get("g", ()):
                    number = int(delta.request_id)
                    token_ids[number] += delta.token_ids
                    rounds[number] = delta.num_rounds
                    reasons[number] = delta.finish_reason or ""
    assert num_reports > COUNT
    for number, one in enumerate(alone):
        if reasons[number] == "abort":
            assert token_ids[number] == one.token_ids[: len(token_ids[number])]
        else:
            assert (token_ids[number], rounds[number]) == (one.token_ids, sum(one.rounds))
    assert reasons.count("abort") <= 1
