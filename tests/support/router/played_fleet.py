"""A gateway's view of workers whose reports are scripted; no event loop, and a fake clock."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from router.config import RoutingConfig
from router.fleet import Fleet, PromptBlocks
from worker.protocol.blocks import block_hash_array, root_hash
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    BlockStored,
    EngineInfo,
    LoadSnapshot,
    WorkerUpdate,
)
from worker.protocol.options import from_options

PAGE = 16
INFO = EngineInfo("m", 10**6, 10**6, 10**5, PAGE, 32, [0], "salt", max_num_batched_tokens=2048)
IDLE = LoadSnapshot(num_free_pages=5000, num_total_pages=5000, max_num_seqs=32)


class PlayedFleet:
    """A Fleet of idle workers.

    Args:
        policy: routing policy.
        num_workers: number of workers, named w0, w1 and so on.
        names: names of the workers; replaces `num_workers`.
        options: other fields of RoutingConfig.
    """

    def __init__(
        self,
        policy: str = "adaptive",
        num_workers: int = 4,
        *,
        names: Sequence[str] = (),
        **options: float,
    ) -> None:
        self.now = 0.0
        config = from_options(RoutingConfig, {"routing_policy": policy, **options})
        self.fleet = Fleet(config, clock=lambda: self.now)
        self.names = list(names) or [f"w{number}" for number in range(num_workers)]
        for name in self.names:
            self.attach(name)
        self.num_requests = 0

    def attach(self, name: str, load: LoadSnapshot = IDLE, info: EngineInfo = INFO) -> None:
        """Adds a worker, or reattaches it with an empty cache."""
        self.fleet.attach(name, AttachSnapshot(PROTOCOL_VERSION, name, 1, info, [], load))

    def cache(self, name: str, tokens: np.ndarray, tier: str = "device") -> None:
        """Adds the full pages of `tokens` (int32) to a worker's cache."""
        hashes = block_hash_array(tokens, PAGE, root_hash("salt")).tolist()
        self.fleet.index.apply(name, [BlockStored(hashes, None, tier)])  # type: ignore[arg-type]

    def load(self, name: str, *, seq: int = 1, **fields: object) -> None:
        """Reports that a worker is idle except for these fields of LoadSnapshot."""
        load = msgspec.structs.replace(IDLE, **fields)
        totals = self.fleet.worker(name).load.prefill_steps
        if load.step_shape.prefill_tokens:
            totals = totals.with_step(load.step_shape, load.step_ms)
        load = msgspec.structs.replace(load, prefill_steps=totals)
        self.fleet.update(name, WorkerUpdate(1, seq, [], [], load))

    def choose(self, tokens: np.ndarray, *, keep: bool = False, session: str = "") -> str:
        """Worker chosen for a prompt; its booking is released unless kept."""
        self.num_requests += 1
        name = f"r{self.num_requests}"
        choice = self.fleet.reserve(name, PromptBlocks(tokens.tobytes(), session=session))
        assert choice is not None
        if not keep:
            self.fleet.release_booking(choice.worker_id, name)
        return choice.worker_id
