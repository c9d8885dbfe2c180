"""Simulated gateway: production code, with timers around all of its work."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from cluster.bench.report import note
from deploy.benchmarks.routing.simulated import Clock, GatewayRouter, Placement
from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import Arrival
from router.config import RoutingConfig
from tests.campaigns.scale.options import ScaleOptions
from tests.campaigns.scale.scaling import Scaler
from tests.campaigns.scale.stopwatch import Stopwatch
from worker.protocol.messages import (
    AttachSnapshot,
    BlockStored,
    LoadSnapshot,
    StepReport,
    WorkerItem,
    WorkerUpdate,
)

_CHAIN = 2048
"""Blocks per event from an old cache."""


class TimedGateway(GatewayRouter):
    """A gateway to which every worker is attached.

    Args:
        options: size of the old caches, and the routing policy.
        clock: clock of the simulation.
    """

    def __init__(self, options: ScaleOptions, clock: Clock) -> None:
        super().__init__(RoutingConfig(routing_policy=options.routing_policy), clock)  # type: ignore[arg-type]
        self.decisions = Stopwatch()
        """Durations from a prompt's token ids to the reserved worker."""
        self.reports = Stopwatch()
        """Durations from a report's bytes to its effects."""
        self.losses = Stopwatch()
        self.joins = Stopwatch()
        """Durations from a snapshot's bytes to a ready worker."""
        self.scaler = Scaler(options, self.fleet, clock)
        self.num_decided = 0
        self.num_blocks = 0
        """Number of blocks in the index at the start of the traffic."""
        self.fill_s = 0.0
        """Wall time until the start of the traffic."""
        self._options = options
        self._old = options.blocks // options.workers
        self._random = np.random.default_rng(options.seed)
        self._decoder = msgspec.msgpack.Decoder(WorkerItem)
        self._began = time.perf_counter()
        self._serving = False

    def joined(self, worker: SimWorker) -> None:
        """Attaches a worker, with an old cache at first and with an empty one after a failure."""
        snapshot = worker.snapshot()
        snapshot.load = self._load(worker, snapshot.load)
        old = self._old_blocks(worker)
        for start in range(0, old, _CHAIN):
            size = min(_CHAIN, old - start)
            hashes = self._random.integers(1, 2**64, size, dtype=np.uint64).tolist()
            snapshot.blocks.append(BlockStored(hashes, None))
        data = msgspec.msgpack.encode(snapshot)
        with self.joins:
            item = self._decoder.decode(data)
            assert isinstance(item, AttachSnapshot), "a snapshot was encoded"
            self.fleet.attach(worker.worker_id, item)
        number = len(self.fleet.table)
        if not self._serving and not number % 1000:
            note(f"{number:,} workers, {len(self.fleet.index):,} blocks")

    def lost(self, worker: SimWorker) -> None:
        """Removes a worker that failed or left."""
        with self.losses:
            self.fleet.lose(worker.worker_id)

    def place(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        """Chooses workers for requests that arrive at the same time."""
        if not self._serving:
            self._serve()
        self.num_decided += len(arrivals)
        with self.decisions:
            placements = super().place(arrivals)
        for arrival, placement in zip(arrivals, placements, strict=True):
            if placement is not None:
                self.scaler.arrived(arrival.num_tokens, placement.hit_tokens)
        return placements

    def reported(self, worker: SimWorker, report: StepReport) -> None:
        """Handles the report of a worker's step."""
        load = self._load(worker, report.load)
        data = msgspec.msgpack.encode(
            WorkerUpdate(worker.epoch, report.seq, [], report.block_events, load)
        )
        with self.reports:
            item = self._decoder.decode(data)
            assert isinstance(item, WorkerUpdate), "an update was encoded"
            self.fleet.update(worker.worker_id, item)
        for deltas in report.deltas.values():
            for delta in deltas:
                if delta.num_cached_tokens >= 0:
                    self.fleet.release_booking(worker.worker_id, delta.request_id)
        self.scaler.reported(report, self._options.output_len)

    def close(self) -> None:
        """Releases resources after the simulation."""
        gc.unfreeze()

    def _serve(self) -> None:
        """Starts the measurement once all workers are attached. Their thousands of objects belong
        to the simulation, so they are excluded from garbage collection."""
        self._serving = True
        self.num_blocks = len(self.fleet.index)
        self.fill_s = time.perf_counter() - self._began
        self.joins.clear()
        gc.collect()
        gc.freeze()

    def _load(self, worker: SimWorker, load: LoadSnapshot) -> LoadSnapshot:
        """The worker's load. Pages of its old cache count as free, because they can be evicted."""
        old = self._old_blocks(worker)
        return msgspec.structs.replace(
            load,
            num_free_pages=load.num_free_pages + old,
            num_total_pages=load.num_total_pages + old,
        )

    def _old_blocks(self, worker: SimWorker) -> int:
        """Number of blocks in the worker's old cache; 0 for workers that join or return later."""
        first = worker.epoch == 1 and int(worker.worker_id[1:]) < self._options.workers
        return self._old if first else 0
