"""Workers with the real scheduler and cache, but without computation."""

from __future__ import annotations

import pytest

from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.frontend.attachment import Attachment, CacheMirror
from worker.frontend.in_flight_submits import InFlightSubmits
from worker.plan.plan import StepResult
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    EngineInfo,
    LoadSnapshot,
    Submit,
    Tier,
    TokenDelta,
    WorkerDown,
    WorkerItem,
)

PAGE_SIZE = 4
SALT = "salt"


class ScheduledWorker:
    """A worker with its frontend's bookkeeping, and a fake `clock` that `step` advances."""

    def __init__(
        self,
        worker_id: str,
        *,
        num_pages: int = 24,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 90,
        num_host_pages: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = 1
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            page_size=PAGE_SIZE,
            num_pages=num_pages + 1,
            eos_token_ids=(0,),
            block_hash_salt=SALT,
            num_host_pages=num_host_pages,
            host_cache_policy="always",
        )
        self.info = EngineInfo(
            model="m",
            max_model_len=max_model_len,
            max_total_tokens=num_pages * PAGE_SIZE,
            vocab_size=100_000,
            page_size=PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            eos_token_ids=[0],
            block_hash_salt=SALT,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.attachments: dict[str, Attachment] = {}
        self.step_ms = 1.0
        self._begin()

    def _begin(self) -> None:
        self.scheduler = Scheduler(self.config, lambda: 0.0)
        self.mirror = CacheMirror()
        self.reserved = InFlightSubmits()
        self.load = LoadSnapshot(
            num_free_pages=self.config.num_pages - 1,
            num_total_pages=self.config.num_pages - 1,
            max_num_seqs=self.config.max_num_seqs,
        )
        self.num_submits = 0

    def attach(self, gateway_id: str) -> None:
        """Opens a new stream for a gateway; items of an older stream are lost."""
        attachment = self.attachments[gateway_id] = Attachment()
        attachment.put(self.snapshot())

    def take(self, gateway_id: str) -> WorkerItem | None:
        """Next item for the gateway; None if there is none."""
        attachment = self.attachments[gateway_id]
        if not attachment._pending:  # `next` would wait for a step, on an event loop
            return None
        waiting = attachment.next()
        with pytest.raises(StopIteration) as stop:
            waiting.send(None)
        item: WorkerItem | None = stop.value.value
        return item

    def submit(self, submit: Submit) -> int:
        """Submits a request; returns its ordinal."""
        self.num_submits += 1
        self.scheduler.add(submit)
        self.reserved.add([submit], self.num_submits)
        return self.num_submits

    def step(self) -> None:
        """Runs one engine step and reports it to all gateways."""
        plan = self.scheduler.schedule()
        if plan is not None:
            drawn = [7 for row in plan.rows if row.num_samples]
            self.scheduler.apply(StepResult(plan.seq, drawn, self.step_ms))
        report = self.scheduler.take_report()
        self.load = self.reserved.added_to(report.load)
        self.mirror.apply(report.block_events)
        for gateway_id, attachment in self.attachments.items():
            deltas: list[TokenDelta] = report.deltas.get(gateway_id, [])
            attachment.put_step(self.epoch, deltas, report.block_events, self.load)
            attachment.beat(self.epoch, self.load)

    def restart(self) -> None:
        """Simulates failure of the rank group, whose cache is lost, and its restart."""
        for attachment in self.attachments.values():
            attachment.put(WorkerDown(epoch=self.epoch, reason="killed"))
        self.epoch += 1
        self._begin()
        for attachment in self.attachments.values():
            attachment.put(self.snapshot())

    def snapshot(self) -> AttachSnapshot:
        return AttachSnapshot(
            PROTOCOL_VERSION,
            self.worker_id,
            self.epoch,
            self.info,
            self.mirror.chains(),
            self.load,
        )

    def cached_hashes(self, tier: Tier) -> set[int]:
        """Blocks in the radix tree, according to the tree itself."""
        nodes = [node for node in self.scheduler.state.cache._tree.nodes() if not node.is_root]
        on_host = tier == "host"
        return {value for node in nodes if node.on_host == on_host for value in node.hashes}
