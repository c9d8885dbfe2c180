"""Ranks that are stopped during a step: the frontend kills them, and another group takes over."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support.engines.forked_rank import RANK_FORKER, ForkedRank
from tests.support.worker.played_engine import Gateway, submit
from worker.config import EngineConfig
from worker.core.loop import serve_engine
from worker.frontend.server import WorkerFrontend
from worker.protocol.messages import EngineInfo, SubmitBatch, WorkerDown, WorkerUpdate
from worker.protocol.sampling import SamplingParams

pytestmark = pytest.mark.slow

DEADLINE_S = 600.0


@asynccontextmanager
async def ranks(front: WorkerFrontend, config: EngineConfig) -> AsyncIterator[EngineInfo]:
    """All ranks of an epoch, started as by WorkerGroup but forked and without Ray."""
    directory = front.open()
    first = RANK_FORKER.start(serve_engine, config, directory)
    others = [ForkedRank(rank, config, directory) for rank in range(1, config.tensor_parallel_size)]
    try:
        yield await front.wait_ready()
    finally:
        for process in (first, *others):
            process.kill()
        await asyncio.to_thread(first.join)
        for other in others:
            await asyncio.to_thread(other.wait)


async def first_token(gateway: Gateway, request_id: str) -> None:
    while True:
        item = await gateway.next()
        if isinstance(item, WorkerUpdate) and any(
            delta.request_id == request_id and delta.token_ids for delta in item.deltas
        ):
            return


def payload(request_id: str) -> bytes:
    request = submit(request_id)
    request.sampling = SamplingParams(max_tokens=1900, ignore_eos=True, seed=1)
    return msgspec.msgpack.encode(SubmitBatch(submits=[request]))


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        (1, "the step of rank 0"),
        pytest.param(1, "rank 0", marks=pytest.mark.long),
        pytest.param(2, "rank 1", marks=pytest.mark.long),
    ],
)
async def test_a_stopped_process_is_killed(
    tiny_chat_model: Path, num_ranks: int, name: str
) -> None:
    config = EngineConfig.of(
        model=str(tiny_chat_model),
        device="cpu",
        cpu_threads=1,
        kv_cache_tokens=4096,
        tensor_parallel_size=num_ranks,
        step_timeout_s=2.0,
    )
    front = WorkerFrontend("w0", "/tmp", step_timeout_s=config.step_timeout_s)
    gateway = Gateway(front, "g0")
    async with asyncio.timeout(DEADLINE_S):
        await gateway.news()
        async with ranks(front, config) as info:
            assert len(info.processes) == 1 + num_ranks
            await front.submit(payload("lost"))
            await first_token(gateway, "lost")
            os.kill(info.processes[name], signal.SIGSTOP)
            reason = await front.wait_broken()
            assert f"{name} (process {info.processes[name]}) is stopped" in reason
            while any(Path(f"/proc/{pid}").exists() for pid in _living(info)):
                await asyncio.sleep(0.05)
        front.engine_lost(reason)
        while not isinstance(item := await gateway.next(), WorkerDown):
            pass
        assert "engine hung" in item.reason
        if name == "rank 0":  # the rest is the same for all
            async with ranks(front, config):
                await front.submit(payload("served"))
                await first_token(gateway, "served")
    await gateway.close()
    front.close()


def _living(info: EngineInfo) -> list[int]:
    """Processes that have not exited, whether or not their parents have reaped them."""
    living = []
    for pid in info.processes.values():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            living.append(pid)
    return living
