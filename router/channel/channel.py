"""WorkerChannel: the channel between this gateway and one worker.

    gateway ──SubmitBatch (one call in flight)──> worker
    gateway <──WorkerItem (one per step)───────── worker

The stream is ordered and reliable, and has an item at least every 0.2 s, which bounds the age of
the gateway's view of the worker. The worker counts as failed if item numbers have a gap, heartbeats
time out or the stream breaks; the channel then reconnects until the worker is removed from the set
of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection

import msgspec

from router.channel.heartbeat_timeout import TICK_S, HeartbeatTimeout
from router.channel.protocols import (
    ChannelListener,
    Receiver,
    SubmitRejected,
    WorkerTransport,
    WorkerUnreachable,
)
from router.channel.submit_queue import SubmitQueue
from worker.protocol.adapters import AdapterCheck
from worker.protocol.admission import AdmissionChange
from worker.protocol.analyzed import analyzed
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    Rejection,
    Submit,
    SubmitBatch,
    SubmitReply,
    TokenDelta,
    WorkerDown,
    WorkerItem,
    WorkerUpdate,
)

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 60.0
"""Timeout in seconds for a worker to read an adapter, which may have tens of GB."""
FIRST_BACKOFF_S = 0.05
"""Seconds between the first two attempts to attach; doubled after each failure."""
LAST_BACKOFF_S = 2.0
"""Maximum seconds between attempts to attach."""


class _InFlight:
    """A request submitted on this channel that has not ended."""

    __slots__ = ("ack", "attempt", "epoch", "receiver")

    def __init__(self, receiver: Receiver, attempt: int, ack: asyncio.Future[None]) -> None:
        self.receiver = receiver
        self.attempt = attempt
        self.ack = ack
        """Done when the worker has replied to the submit."""
        self.epoch: int | None = None
        """Epoch of the worker in which it accepted the request; None before its reply."""


class WorkerChannel:
    """Attach stream and submit queue of one worker.

    Args:
        worker_id: the worker's id in the transport.
        gateway_id: id of this gateway.
        transport: connects to the worker.
        listener: receives the worker's state.
    """

    def __init__(
        self,
        worker_id: str,
        gateway_id: str,
        transport: WorkerTransport,
        listener: ChannelListener,
    ) -> None:
        self.worker_id = worker_id
        self._gateway_id = gateway_id
        self._transport = transport
        self._listener = listener
        self._submit_queue = SubmitQueue(worker_id, transport, self._on_reply, self._on_failure)
        self._in_flight: dict[str, _InFlight] = {}
        self._orphaned: dict[str, int] = {}
        """Aborted attempts whose end the worker has not reported yet, by request id."""
        self.leaving = False
        """Whether the worker was removed from the set of workers: it finishes its requests, then
        the stream ends."""
        self._epoch: int | None = None
        """Epoch of the last snapshot; None while not attached."""
        self._oldest_epoch = 0
        """Oldest epoch whose rank group may still exist."""
        self._seq = 0
        """Number of the stream's last WorkerUpdate."""
        self._heartbeat_timeout = HeartbeatTimeout(lambda: transport.heartbeat(worker_id))
        self._task: asyncio.Task[None] | None = None
        self._decode = msgspec.msgpack.Decoder[WorkerItem](WorkerItem).decode
        self._clock: Callable[[], float]
        """The event loop's clock, in seconds."""

    def start(self) -> None:
        """Attaches, and reattaches after each failure until the worker leaves or `close` is
        called."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Detaches from the worker; open requests are lost."""
        self._lose("the gateway is shutting down")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def serves_others(self, prefix: str) -> bool:
        """Whether there is an open request whose id does not start with `prefix`."""
        return any(not request_id.startswith(prefix) for request_id in self._in_flight)

    async def submit(self, submit: Submit, receiver: Receiver) -> None:
        """Submits a request; returns when the worker has accepted it.

        Raises:
            WorkerUnreachable: the worker did not receive the request, or failed after receiving it.
            SubmitRejected: the worker has rejected the request.
        """
        if self._epoch is None:
            raise WorkerUnreachable(f"worker {self.worker_id} is not attached")
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = _InFlight(receiver, submit.attempt, ack)
        self._in_flight[submit.request_id] = request
        self._submit_queue.submit(submit)
        try:
            await ack
        finally:
            # The exception's traceback refers to this frame: a cycle that would keep the request
            # alive.
            del ack, request

    def abort(self, request_id: str) -> None:
        """Aborts a request; its receiver is not called again. Unknown ids are ignored."""
        request = self._in_flight.pop(request_id, None)
        if request is None:
            return
        if request.epoch is not None:
            self._orphaned[request_id] = request.attempt
        if not request.ack.done():
            request.ack.set_result(None)
        self._submit_queue.abort(request_id, request.attempt)

    def set_admission(self, change: AdmissionChange) -> bool:
        """Sends changed admission rules to the worker; returns False if it is not attached."""
        if self._epoch is None:
            return False
        self._submit_queue.set_admission(change)
        return True

    async def check_adapter(self, folder: str) -> AdapterCheck:
        """Makes the worker check the folder of a LoRA adapter.

        Raises:
            ConnectionError: the worker is unreachable.
            TimeoutError: the worker does not respond within CHECK_TIMEOUT_S.
        """
        payload = msgspec.msgpack.encode(SubmitBatch(check_adapter=folder))
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            reply = await self._transport.submit(self.worker_id, payload)
        check = msgspec.msgpack.decode(reply, type=analyzed(SubmitReply)).adapter
        assert check is not None, "a worker of this protocol version answers"
        return check

    # The attach stream.

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_S
        try:
            while not (self.leaving and not self._in_flight):
                reason = await self._attach_once()
                if self._epoch is not None:
                    backoff = FIRST_BACKOFF_S
                elif backoff == FIRST_BACKOFF_S:  # logged once, not with each attempt
                    extra = {"worker_id": self.worker_id}
                    logger.warning("failed to attach to worker: %s", reason, extra=extra)
                self._lose(reason)
                if self.leaving:
                    break
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, LAST_BACKOFF_S)
        finally:
            self._lose("the worker was removed")
            self._listener.on_closed(self.worker_id)

    async def _attach_once(self) -> str:
        """Reads one attach stream until it ends; returns the reason."""
        self._epoch, self._seq = None, 0
        self._heartbeat_timeout.received = True
        pump = asyncio.create_task(self._pump())
        try:
            while True:
                done, _ = await asyncio.wait([pump], timeout=TICK_S)
                if pump.cancelled():  # by the transport: it is not cancelled here
                    return "the stream was cancelled"
                if done:
                    error = pump.exception()
                    return "the stream ended" if error is None else f"{error!r}"
                reason = self._heartbeat_timeout.tick(is_attached=self._epoch is not None)
                if reason is not None:
                    return reason
                if self.leaving and not self._in_flight:
                    return "the worker was removed"
        finally:
            self._heartbeat_timeout.close()
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await pump

    async def _pump(self) -> None:
        self._clock = asyncio.get_running_loop().time
        await self._transport.attach(self.worker_id, self._gateway_id, self._on_item)

    def _on_item(self, payload: bytes) -> None:
        self._heartbeat_timeout.received = True
        item = self._decode(payload)
        if isinstance(item, WorkerUpdate):
            self._on_update(item)
        elif isinstance(item, AttachSnapshot):
            self._on_snapshot(item)
        else:
            self._on_down(item)

    def _on_update(self, update: WorkerUpdate) -> None:
        self._seq += 1
        if update.seq != self._seq:
            raise ConnectionError(f"update {update.seq} out of order, expected {self._seq}")
        if update.epoch != self._epoch:
            return  # a report of a former rank group
        self._listener.on_update(self.worker_id, update)
        now, in_flight = self._clock(), self._in_flight
        for delta in update.deltas:
            request = in_flight.get(delta.request_id)
            if request is None or request.attempt != delta.attempt:
                self._on_orphaned(delta)
                continue
            if not request.ack.done():  # tokens may overtake the reply to the submit
                self._accept(request, update.epoch)
            if delta.finish_reason is not None:
                del in_flight[delta.request_id]
            try:
                request.receiver.deliver(delta, now)
            except Exception:
                # An error of one request must not end the stream, which would fail all others.
                logger.exception(
                    "failed to process a delta", extra={"request_id": delta.request_id}
                )
                self.abort(delta.request_id)
                request.receiver.fail("internal error: failed to process generated tokens")

    def _on_orphaned(self, delta: TokenDelta) -> None:
        """Handles tokens of a request that is not open, since it was aborted or failed.

        Aborts the request on the worker, once: if the reply to its submit was lost, or the submit
        arrived after its abort, the worker would otherwise run it to completion.
        """
        request_id, attempt = delta.request_id, delta.attempt
        if delta.finish_reason is not None:
            self._orphaned.pop(request_id, None)
        elif self._orphaned.get(request_id, -1) < attempt:
            self._orphaned[request_id] = attempt
            self._submit_queue.abort(request_id, attempt)

    def _on_snapshot(self, snapshot: AttachSnapshot) -> None:
        if snapshot.protocol_version != PROTOCOL_VERSION:
            raise ConnectionError(
                f"worker {self.worker_id} uses protocol {snapshot.protocol_version}, but this "
                f"gateway uses {PROTOCOL_VERSION}: run the same release on both"
            )
        if snapshot.epoch != self._epoch:
            self._orphaned.clear()
            self._lose_in_flight("its rank group was rebuilt", before=snapshot.epoch)
        self._epoch = self._oldest_epoch = snapshot.epoch
        self._listener.on_snapshot(self.worker_id, snapshot)

    def _on_down(self, down: WorkerDown) -> None:
        if down.epoch == self._epoch:
            self._oldest_epoch = down.epoch + 1
            self._lose_in_flight(down.reason, before=self._oldest_epoch)
            self._listener.on_lost(self.worker_id, down.reason)

    # Replies to submits.

    def _on_reply(self, submits: list[Submit], reply: SubmitReply) -> None:
        rejections = {rejection.request_id: rejection for rejection in reply.rejections}
        ordinal = reply.last_ordinal - (len(submits) - len(rejections))
        for submit in submits:
            rejection: Rejection | None = rejections.get(submit.request_id)
            ordinal += rejection is None
            request = self._in_flight.get(submit.request_id)
            if request is None or request.attempt != submit.attempt or request.ack.done():
                continue
            if rejection is not None:
                del self._in_flight[submit.request_id]
                request.ack.set_exception(SubmitRejected(rejection))
            elif self._epoch is None or reply.epoch < self._oldest_epoch:
                del self._in_flight[submit.request_id]
                reason = "its rank group was rebuilt"
                request.ack.set_exception(WorkerUnreachable(reason, had_it=True))
            else:
                self._accept(request, reply.epoch)
                self._listener.on_accepted(self.worker_id, submit.request_id, reply.epoch, ordinal)

    def _on_failure(self, submits: list[Submit], reason: str, *, is_lost: bool) -> None:
        if is_lost and self._epoch is not None:
            # Wait for the stream, which soon shows whether the worker has failed: a request on a
            # failed worker is suspected to have caused the failure.
            asyncio.get_running_loop().call_later(TICK_S, self._fail, submits, reason)
        else:
            self._fail(submits, reason)

    def _fail(self, submits: list[Submit], reason: str) -> None:
        for submit in submits:
            request = self._in_flight.get(submit.request_id)
            if request is None or request.attempt != submit.attempt or request.ack.done():
                continue
            del self._in_flight[submit.request_id]
            request.ack.set_exception(WorkerUnreachable(reason))
            # The submit may have arrived and only its reply was lost.
            self._submit_queue.abort(submit.request_id, submit.attempt)

    def _accept(self, request: _InFlight, epoch: int) -> None:
        request.epoch = epoch
        request.ack.set_result(None)

    # Failure of the worker.

    def _lose(self, reason: str) -> None:
        unsent = self._submit_queue.clear()
        self._lose_in_flight(reason, before=None, unsent=unsent)
        if self._epoch is not None:
            self._epoch = None
            self._listener.on_lost(self.worker_id, reason)

    def _lose_in_flight(
        self, reason: str, before: int | None, unsent: Collection[str] = ()
    ) -> None:
        """Ends the open requests that a failure has affected.

        Args:
            reason: reason for the failure.
            before: first epoch whose requests are not lost; None if all requests are lost.
            unsent: ids of requests that were never sent to the worker.
        """
        for request_id, request in list(self._in_flight.items()):
            if before is not None and (request.epoch is None or request.epoch >= before):
                continue  # its submit has no reply yet, or the new rank group has accepted it
            del self._in_flight[request_id]
            if request.ack.done():
                request.receiver.lose(f"worker {self.worker_id} failed: {reason}")
            else:
                had_it = request_id not in unsent
                request.ack.set_exception(WorkerUnreachable(reason, had_it=had_it))
