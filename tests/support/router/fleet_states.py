"""Compares a gateway's view of its workers with the workers' own state."""

from __future__ import annotations

import numpy as np

from router.fleet import Fleet, PromptBlocks
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    BlockStored,
    EngineInfo,
    LoadSnapshot,
    WorkerUpdate,
)

INFO = EngineInfo("m", 1000, 1000, 100, 4, 8, [0], "salt")
IDLE = LoadSnapshot(num_free_pages=250, num_total_pages=250, max_num_seqs=8)


def prompt_of(num_tokens: int, cache_salt: str = "") -> PromptBlocks:
    return PromptBlocks(np.arange(num_tokens, dtype="<i4").tobytes(), cache_salt)


def snapshot(
    worker_id: str, blocks: list[int] | None = None, load: LoadSnapshot = IDLE, epoch: int = 1
) -> AttachSnapshot:
    stored = [BlockStored(block_hashes=blocks or [], parent_hash=None)]
    return AttachSnapshot(PROTOCOL_VERSION, worker_id, epoch, INFO, stored, load)


def fleet_of(*worker_ids: str) -> Fleet:
    fleet = Fleet(clock=lambda: 0.0)
    for worker_id in worker_ids:
        fleet.attach(worker_id, snapshot(worker_id))
    return fleet


def update(load: LoadSnapshot) -> WorkerUpdate:
    return WorkerUpdate(1, 1, [], [], load)
