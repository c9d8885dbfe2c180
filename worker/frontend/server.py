"""Frontend of a worker group, between many gateways and the engine loop of rank 0.

It runs on the event loop of the WorkerGroup replica, independent of Ray:

    gateways ──submit──> WorkerFrontend ──SubmitBatch──> rank 0
    gateways <──attach── WorkerFrontend <──StepReport─── rank 0      (one socket: engine_link.py)

For each engine step that concerns it, a gateway gets one item with all of its tokens. Items that a
slow gateway has not received are merged, so that memory grows with tokens, not with items.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

import msgspec

from worker.frontend.adapters import AdapterChecks
from worker.frontend.attachment import Attachment, CacheMirror
from worker.frontend.engine_link import EngineConnection
from worker.frontend.event_loop_monitor import EventLoopMonitor
from worker.frontend.grammar.service import GrammarService
from worker.frontend.in_flight_submits import InFlightSubmits
from worker.frontend.intake import Intake, reject_early, slices
from worker.frontend.prompts_in_flight import PromptsInFlight
from worker.frontend.rank_processes import RankProcesses
from worker.frontend.session_load import SessionLoad
from worker.frontend.traces import WorkerTraces
from worker.frontend.watchdog import StepWatchdog
from worker.metrics.latency import WorkerLatency
from worker.protocol.admission import AdmissionChange
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AttachSnapshot,
    CompiledGrammar,
    EngineInfo,
    EngineMessage,
    LoadSnapshot,
    Rejection,
    StepLimit,
    StepReport,
    Submit,
    SubmitBatch,
    SubmitReply,
    WorkerDown,
    share_sampling,
)

logger = logging.getLogger(__name__)

MAX_PENDING_EVENTS = 100_000
"""Maximum number of block events pending for one gateway. A gateway with more is assumed to have
stopped reading and is detached."""

HEARTBEAT_S = 0.2
"""Seconds between heartbeats of an attach stream. Each has the load and all block events since the
last report; gateways expect one within 250 ms."""


class WorkerFrontend:
    """Accepts requests for one worker group and distributes its engine's reports to gateways.

    For use on one event loop. A failed rank group is replaced by a new one, in a new directory and
    with the next epoch: `open()`, `wait_ready()`, `engine_lost()`, `open()`...

    Args:
        worker_id: id of the worker.
        parent_directory: folder in which each epoch's private directory is created.
        traces: creates spans for requests; None if tracing is disabled.
        step_timeout_s: minimum time in seconds without a report before the engine counts as hung;
            0 disables the watchdog.
        loop_monitor: monitor of the event loop; None if there is none.
    """

    def __init__(
        self,
        worker_id: str,
        parent_directory: str = "/tmp",
        traces: WorkerTraces | None = None,
        step_timeout_s: float = 10.0,
        loop_monitor: EventLoopMonitor | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = 1
        self.info: EngineInfo | None = None
        """The engine, as reported when all ranks were ready; None while loading."""
        self.latency = WorkerLatency()
        self._parent_directory = parent_directory
        self._mirror = CacheMirror()
        self.load = LoadSnapshot()
        """Last reported load plus the submits sent since then; all zero while loading."""
        self._traces = traces
        self._reserved = InFlightSubmits()
        self._sessions: SessionLoad | None = None
        """Live sessions in this epoch; None before the first request of a session."""
        self._prompts = PromptsInFlight()
        self._attachments: dict[str, Attachment] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._intake = Intake()
        self._engine: EngineConnection | None = None
        self._admission_change = AdmissionChange()
        """All changes to admission options so far, which are sent again to rebuilt rank groups."""
        self._last_ordinal = 0
        """Ordinal of the last submit sent to rank 0 in this epoch."""
        self._num_reports = 0
        """Sequence number of the engine's last report in this epoch."""
        self._opened_at = 0.0
        """Earliest time at which the ranks of this epoch could be started, in seconds on the
        monotonic clock."""
        self._adapters = AdapterChecks()
        self._grammars: GrammarService | None = None
        """Compiles grammars; None until the first engine is ready."""
        self._step_timeout_s = step_timeout_s
        self._loop_monitor = loop_monitor
        self._processes = RankProcesses({})
        self._watchdog: StepWatchdog | None = None
        """Monitors the engine's steps; None while no engine runs."""
        self._ready = asyncio.Event()
        self._heartbeat: asyncio.Task[None] | None = None

    def open(self) -> str:
        """Creates the private directory and the socket of the current epoch; returns the directory.

        The ranks of this epoch must be started with this directory.
        """
        assert self._engine is None, "the epoch is already open"
        self._num_reports = self._last_ordinal = 0
        self._opened_at = time.monotonic()
        self._engine = EngineConnection(self._parent_directory, self._on_message)
        if self._heartbeat is None:
            self._heartbeat = asyncio.create_task(self._send_heartbeats())
        return self._engine.directory

    async def wait_ready(self) -> EngineInfo:
        """Waits until all ranks of the current epoch are ready; returns the engine's properties.

        Raises:
            RuntimeError: the engine's reports cannot be read.
        """
        assert self._engine is not None, "call open() first"
        broken = self._engine.broken
        ready = asyncio.ensure_future(self._ready.wait())
        either: list[asyncio.Future[Any]] = [ready, broken]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if broken.done():
            broken.result()
        assert self.info is not None
        return self.info

    async def wait_broken(self) -> str:
        """Waits until the connection to the engine breaks; returns the reason."""
        assert self._engine is not None, "call open() first"
        broken = self._engine.broken
        await asyncio.wait({broken})
        return str(broken.exception()) if not broken.cancelled() else "closed"

    async def attach(self, gateway_id: str) -> AsyncIterator[bytes]:
        """Stream of encoded WorkerItems for one gateway (see `add`). Closing it detaches the
        gateway."""
        attachment = Attachment()
        self.add(gateway_id, attachment)
        try:
            while (item := await attachment.next()) is not None:
                yield self._encode(item)
        finally:
            self.remove(gateway_id, attachment)

    def add(self, gateway_id: str, attachment: Attachment) -> None:
        """Starts a gateway's stream of WorkerItems: a snapshot, then an update per step.

        A gateway that attaches again has lost its previous stream: that stream is ended and its
        requests are aborted.
        """
        earlier = self._attachments.pop(gateway_id, None)
        if earlier is not None:
            self._abandon(earlier)
        self._attachments[gateway_id] = attachment
        attachment.put(self._snapshot())

    def remove(self, gateway_id: str, attachment: Attachment) -> None:
        """Ends a stream that is no longer read, and aborts its requests."""
        if self._attachments.get(gateway_id) is attachment:
            del self._attachments[gateway_id]
        self._abandon(attachment)

    async def submit(self, payload: bytes) -> bytes:
        """Sends a SubmitBatch to rank 0, except for invalid submits; returns the SubmitReply.

        Batch and reply are encoded as msgpack. Raises msgspec.DecodeError for an invalid payload.
        """
        arrived_ns = 0 if self._traces is None else time.time_ns()
        info = self.info
        batch, rejections = await self._intake.decode(payload, info)
        grammars: dict[str, CompiledGrammar] = {}
        if self._grammars is not None and any(s.sampling.structured_outputs for s in batch.submits):
            # Other submits of the batch also wait, but gateways send submits with new grammars
            # separately.
            rejected_ids = {rejection.request_id for rejection in rejections}
            valid = [s for s in batch.submits if s.request_id not in rejected_ids]
            grammars, broken = await self._grammars.compile(valid)
            rejections += broken
        if any(submit.adapter is not None for submit in batch.submits):
            rejections += await self._adapters.rejections(batch.submits, info)
        check = None
        if batch.check_adapter:
            check = await self._adapters.check(batch.check_adapter, info)
        # No await below: the state must not change until the batch is sent.
        rejections = self._drop_repeated(batch, rejections)
        if batch.admission is not None:
            self._admission_change = self._admission_change.then(batch.admission)
        rejected_ids = {rejection.request_id for rejection in rejections}
        rejections += self._rejections(batch, rejected_ids, info)
        if rejections or grammars:
            attempts = {(rejection.request_id, rejection.attempt) for rejection in rejections}
            batch.submits = [s for s in batch.submits if (s.request_id, s.attempt) not in attempts]
            if self._grammars is not None:
                self._grammars.attach(batch, grammars)
        for abort in batch.aborts:
            self._end(abort.request_id)
        for submit in batch.submits:
            self._attachments[submit.gateway_id].open_requests[submit.request_id] = submit.attempt
        last_ordinal = 0
        if self._engine is not None and (batch.submits or batch.aborts or batch.admission):
            for part in slices(batch):
                last_ordinal = self._engine.send(
                    self._encode(share_sampling(part)), num_submits=len(part.submits)
                )
            self._record_sent(batch.submits, last_ordinal, arrived_ns)
        reply = SubmitReply(
            epoch=self.epoch, rejections=rejections, last_ordinal=last_ordinal, adapter=check
        )
        return self._encode(reply)

    def engine_lost(self, reason: str) -> None:
        """Notifies all gateways that the rank group has failed, and starts the next epoch."""
        self._close_engine()
        if self._traces is not None:
            self._traces.engine_lost(reason)
        for attachment in self._attachments.values():
            attachment.open_requests.clear()
            attachment.put(WorkerDown(epoch=self.epoch, reason=reason))
        self.epoch += 1
        self.info = None
        self._ready.clear()
        self._mirror = CacheMirror()
        self.load = LoadSnapshot()
        self._reserved = InFlightSubmits()
        self._sessions = None
        self._prompts = PromptsInFlight()
        self._watchdog = None
        self._adapters = AdapterChecks()  # the next ranks read the folders again

    def close(self) -> None:
        """Ends all attach streams and removes the directory."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._close_engine()
        if self._traces is not None:
            self._traces.close()
        if self._grammars is not None:
            self._grammars.close()
        for attachment in self._attachments.values():
            attachment.end_stream()

    def _on_message(self, message: EngineMessage) -> None:
        """Handles a message from rank 0. Raises RuntimeError if a report is missing."""
        if isinstance(message, EngineInfo):
            self._engine_ready(message)
            return
        assert self._watchdog is not None, "the first message is the EngineInfo"
        if isinstance(message, StepLimit):
            self._watchdog.allow(message)
            return
        self._watchdog.report_received(message)
        self._num_reports += 1
        if message.seq != self._num_reports:
            raise RuntimeError(f"got engine report {message.seq}, expected {self._num_reports}")
        self._apply(message)

    def _engine_ready(self, info: EngineInfo) -> None:
        took_s = time.monotonic() - self._opened_at
        info.startup["launch"] = max(took_s - sum(info.startup.values()), 0.0)
        self.info = info
        if self._grammars is None:
            self._grammars = GrammarService(info)
        self._grammars.engine_changed()
        self.load = LoadSnapshot(
            num_free_pages=info.num_blocks,
            num_total_pages=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
        )
        self._processes = RankProcesses(info.processes)
        self._watchdog = StepWatchdog(self._step_timeout_s, self._processes.snapshot)
        if self._engine is not None and self._admission_change.given:
            self._engine.send(self._encode(SubmitBatch(admission=self._admission_change)))
        self._ready.set()
        snapshot = self._snapshot()
        for attachment in self._attachments.values():
            attachment.put(snapshot)

    def _apply(self, report: StepReport) -> None:
        if self._sessions is not None:
            self._sessions.apply(report.deltas)
        self.load = load = self._total(report.load)
        self.latency.add_report(report)
        if self._traces is not None:
            for changes in report.deltas.values():
                self._traces.deltas_received(changes)
        if report.block_events:
            self._mirror.apply(report.block_events)
        stalled = []
        computed: list[int] = []
        if self._prompts.open or self._prompts.computed:
            self._prompts.apply(report.deltas)
            computed = self._prompts.take_computed()
        for gateway_id, attachment in self._attachments.items():
            deltas = report.deltas.get(gateway_id)
            if deltas or report.block_events or computed:
                attachment.put_step(
                    self.epoch, deltas or [], report.block_events, load, computed=computed
                )
                if report.block_events and attachment.num_pending_events > MAX_PENDING_EVENTS:
                    stalled.append(gateway_id)
        for gateway_id in stalled:
            logger.warning("gateway %s is not reading its stream: disconnecting", gateway_id)
            self._abandon(self._attachments.pop(gateway_id))

    def _record_sent(self, submits: list[Submit], last_ordinal: int, arrived_ns: int) -> None:
        """Records submits sent to rank 0, the last of which has ordinal `last_ordinal`."""
        self._last_ordinal = last_ordinal
        if submits:
            self._reserve(submits, last_ordinal)
            if self._watchdog is not None:
                self._watchdog.submits_sent(last_ordinal)
        if self._traces is not None:
            self._traces.submits_sent(submits, arrived_ns)

    def _reserve(self, submits: list[Submit], last_ordinal: int) -> None:
        """Adds submits to the load. Immediately sends the load and the submits' prompts to other
        gateways, so that they take the load into account, and route prompts with the same prefixes
        to this worker."""
        self._reserved.add(submits, last_ordinal)
        if self._sessions is None and any(submit.session is not None for submit in submits):
            self._sessions = SessionLoad()
        if self._sessions is not None:
            self._sessions.begin(submits)
        prompts = self._prompts.add(submits, last_ordinal)
        self.load = self._total(self.load)
        for gateway_id, attachment in self._attachments.items():
            if gateway_id != submits[0].gateway_id:
                attachment.put_prompts(self.epoch, prompts, self.load)

    def _total(self, load: LoadSnapshot) -> LoadSnapshot:
        """The load, plus the submits that it does not include and all gateways' sessions."""
        if self._reserved.submits:
            load = self._reserved.added_to(load)
        return load if self._sessions is None else self._sessions.added_to(load)

    def _end(self, request_id: str) -> None:
        """Ends an aborted request in its session and among the prompts in flight."""
        if self._sessions is not None:
            self._sessions.end(request_id)
        self._prompts.end(request_id)

    def _drop_repeated(self, batch: SubmitBatch, rejections: list[Rejection]) -> list[Rejection]:
        """Drops submits whose request is already open with the same or a later attempt, which
        continues; returns `rejections` without those of the dropped submits."""
        attempts = {
            submit.request_id: attachment.open_requests[submit.request_id]
            for submit in batch.submits
            if (attachment := self._attachments.get(submit.gateway_id)) is not None
            and submit.request_id in attachment.open_requests
        }
        kept, seen = [], set[tuple[str, int]]()
        for submit in batch.submits:
            key = (submit.request_id, submit.attempt)
            if key in seen or submit.attempt <= attempts.get(submit.request_id, -1):
                logger.warning(
                    "ignoring duplicate submit (attempt %d)",
                    submit.attempt,
                    extra={"request_id": submit.request_id},
                )
                continue
            seen.add(key)
            kept.append(submit)
        batch.submits = kept
        return [r for r in rejections if (r.request_id, r.attempt) in seen]

    def _rejections(
        self, batch: SubmitBatch, rejected_ids: Collection[str], info: EngineInfo | None
    ) -> list[Rejection]:
        """Rejections of submits that cannot be served now.

        Args:
            batch: a batch whose submits were validated against `info`.
            rejected_ids: request ids that are already rejected.
            info: the engine when the batch was received; None if it was still loading.
        """
        rejections = []
        last_ordinal = self._last_ordinal
        for submit in batch.submits:
            if submit.request_id in rejected_ids:
                continue
            rejection = self._rejection(submit, last_ordinal, info)
            if rejection is None:
                last_ordinal += 1
            else:
                rejections.append(rejection)
        return rejections

    def _rejection(
        self, submit: Submit, last_ordinal: int, info: EngineInfo | None
    ) -> Rejection | None:
        if self.info is None or self._engine is None or self.info is not info:
            problem = "this worker is loading"
        elif submit.gateway_id not in self._attachments:
            problem = f"gateway {submit.gateway_id} is not attached to this worker"
        else:
            return reject_early(submit, self.info, self.load, last_ordinal)
        return Rejection(
            request_id=submit.request_id, attempt=submit.attempt, message=problem, status=503
        )

    def _abandon(self, attachment: Attachment) -> None:
        """Ends a stream immediately, and aborts its requests, which would otherwise hold pages."""
        attachment.drop_stream()
        aborts = [Abort(request_id=r, attempt=a) for r, a in attachment.open_requests.items()]
        for abort in aborts:
            self._end(abort.request_id)
        attachment.open_requests.clear()
        if aborts and self._engine is not None:
            self._engine.send(self._encode(SubmitBatch(aborts=aborts)))

    def _snapshot(self) -> AttachSnapshot:
        return AttachSnapshot(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            epoch=self.epoch,
            info=self.info,
            blocks=self._mirror.chains(),
            load=self.load,
            prompts=self._prompts.all,
        )

    async def _send_heartbeats(self) -> None:
        clock, last = time.monotonic, time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._loop_monitor is not None:
                self._loop_monitor.beat()
            if self._sessions is not None:
                self.load = self._sessions.added_to(self.load)
            computed = self._prompts.take_computed()
            for attachment in self._attachments.values():
                attachment.beat(self.epoch, self.load, computed)
            now = clock()
            # While this process was blocked, the engine's reports could not be read.
            self._watch(min(now - last, 2 * HEARTBEAT_S))
            last = now

    def _watch(self, elapsed_s: float) -> None:
        """Kills a hung rank group; `wait_broken` then returns the reason."""
        if self._engine is None or self._watchdog is None:
            return
        problem = self._watchdog.tick(elapsed_s)
        if problem is not None:
            self._engine.fail(problem)
            self._processes.kill()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
