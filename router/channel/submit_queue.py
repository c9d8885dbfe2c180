"""SubmitQueue: batches submits and aborts to a worker, one call in flight at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
from cachetools import LRUCache

from router.channel.protocols import WorkerTransport
from worker.protocol.adapters import AdapterRef
from worker.protocol.admission import AdmissionChange
from worker.protocol.messages import Abort, Submit, SubmitBatch, SubmitReply, share_sampling
from worker.protocol.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)

SUBMIT_TIMEOUT_S = 10.0
"""Timeout in seconds of a call that submits or aborts requests."""

ABORT_RETRY_S = 1.0
"""Seconds after which the aborts of a failed call are sent again, unless another call is made
first."""

MAX_KNOWN_GRAMMARS = 64
"""Maximum number of grammars assumed to be cached by the worker, which caches many more. If the
worker has dropped one anyway, the batch waits while that grammar is compiled."""
MAX_KNOWN_ADAPTERS = 1024
"""Maximum number of LoRA adapters that the worker is assumed to have checked already."""

Novelty = StructuredOutputsParams | AdapterRef
"""A grammar that the worker must compile, or an adapter that it must check, before it replies."""


class OnFailure(Protocol):
    """Callback for the submits of a call that failed."""

    def __call__(self, submits: list[Submit], reason: str, *, is_lost: bool) -> None:
        """Called when a call has failed.

        Args:
            submits: submits that may not have arrived.
            reason: the error.
            is_lost: whether the connection broke, so that the worker may have failed.
        """
        ...


class SubmitQueue:
    """Queue of submits, aborts and changed admission rules for one worker.

    Args:
        worker_id: the worker.
        transport: sends the batches.
        on_reply: called with the submits of each batch that arrived, and the worker's reply.
        on_failure: called with the submits of each batch that failed.
    """

    def __init__(
        self,
        worker_id: str,
        transport: WorkerTransport,
        on_reply: Callable[[list[Submit], SubmitReply], None],
        on_failure: OnFailure,
    ) -> None:
        self._worker_id = worker_id
        self._transport = transport
        self._on_reply = on_reply
        self._on_failure = on_failure
        self._submits: dict[str, Submit] = {}
        self._aborts: list[Abort] = []
        self._admission: AdmissionChange | None = None
        self._sender: asyncio.Task[None] | None = None
        self._alone: dict[asyncio.Task[None], None] = {}
        """Calls in flight that are sent apart from the others, because their grammar or adapter may
        be new to the worker."""
        self._followers: dict[Novelty, dict[str, Submit]] = {}
        """Submits that wait for the reply to an earlier submit with the same grammar or adapter."""
        self._known_grammars: LRUCache[int, None] = LRUCache(MAX_KNOWN_GRAMMARS)
        """Hashes of the grammars that the worker has recently compiled, whose texts may be large.
        After a hash collision, a batch merely waits while the worker compiles."""
        self._known_adapters: LRUCache[int, None] = LRUCache(MAX_KNOWN_ADAPTERS)
        """Hashes of the adapters that the worker has recently used."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SubmitReply)

    def submit(self, submit: Submit) -> None:
        """Sends a submit with the next call, or in a separate call if the worker must compile its
        grammar or check its adapter.

        The reply to a separate call is late, and would delay other submits in it. Further submits
        with the same grammar or adapter wait for that reply.
        """
        novelty = self._novelty(submit)
        if novelty is None:
            self._submits[submit.request_id] = submit
            self._kick()
        elif novelty in self._followers:
            self._followers[novelty][submit.request_id] = submit
        else:
            self._call_alone([submit], novelty)

    def abort(self, request_id: str, attempt: int) -> None:
        """Sends an abort with the next call, or drops the submit if it has not been sent yet."""
        waiting = (self._submits, *self._followers.values())
        if all(submits.pop(request_id, None) is None for submits in waiting):
            self._aborts.append(Abort(request_id=request_id, attempt=attempt))
            self._kick()

    def set_admission(self, change: AdmissionChange) -> None:
        """Sends changed admission rules with the next call."""
        self._admission = change if self._admission is None else self._admission.then(change)
        self._kick()

    def clear(self) -> list[str]:
        """Drops all queued items and cancels calls in flight after a worker failure.

        Returns the ids of submits that were not sent.
        """
        unsent = [*self._submits, *(i for waiting in self._followers.values() for i in waiting)]
        self._submits.clear()
        self._aborts.clear()
        self._admission = None
        self._known_grammars.clear()
        self._known_adapters.clear()
        self._followers.clear()
        for task in self._alone:
            task.cancel()
        if self._sender is not None:
            self._sender.cancel()
            self._sender = None
        return unsent

    def _kick(self) -> None:
        if self._sender is None and (self._submits or self._aborts or self._admission):
            self._sender = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        # Requests that arrive together are read within one iteration of the event loop: in one call
        # they can be prefilled in one engine step.
        await asyncio.sleep(0)
        while self._submits or self._aborts or self._admission:
            submits, aborts = list(self._submits.values()), self._aborts
            batch = SubmitBatch(submits=submits, aborts=aborts, admission=self._admission)
            self._submits, self._aborts, self._admission = {}, [], None
            try:
                payload = self._encoder.encode(share_sampling(batch))
            except Exception as error:
                # HAZARD: if it were kept for the next call, that and all later ones would fail too.
                logger.exception("failed to encode a batch", extra={"worker_id": self._worker_id})
                self._on_failure(submits, _text(error), is_lost=False)
                if submits or batch.admission:
                    self._aborts = aborts + self._aborts
                continue
            try:
                reply = await self._send(payload)
            except (Exception, asyncio.CancelledError) as error:
                # Every error needs a reply, or the submits' callers wait forever. CancelledError
                # may also come from the transport's own call, while this task is not cancelled.
                if _is_cancelled():
                    raise
                logger.warning(
                    "submit failed: %s", _text(error), extra={"worker_id": self._worker_id}
                )
                self._on_failure(submits, _text(error), is_lost=_is_loss(error))
                self._aborts = aborts + self._aborts
                self._keep(batch.admission)
                if not self._submits:
                    asyncio.get_running_loop().call_later(ABORT_RETRY_S, self._kick)
                    break
            else:
                self._on_reply(submits, reply)
        self._sender = None

    def _keep(self, change: AdmissionChange | None) -> None:
        """Keeps the changed admission rules of a failed call; later changes take precedence."""
        if change is not None:
            later = self._admission
            self._admission = change if later is None else change.then(later)

    def _novelty(self, submit: Submit) -> Novelty | None:
        """The grammar or adapter of a submit that may be new to the worker, if any."""
        grammar, adapter = submit.sampling.structured_outputs, submit.adapter
        if grammar is not None and hash(grammar) not in self._known_grammars:
            return grammar
        if adapter is not None and hash(adapter) not in self._known_adapters:
            return adapter
        return None

    def _call_alone(self, submits: list[Submit], novelty: Novelty) -> None:
        self._followers[novelty] = {}
        task = asyncio.create_task(self._send_alone(submits, novelty))
        self._alone[task] = None
        task.add_done_callback(self._alone.pop)

    async def _send_alone(self, submits: list[Submit], novelty: Novelty) -> None:
        try:
            reply = await self._send(
                self._encoder.encode(share_sampling(SubmitBatch(submits=submits)))
            )
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled():
                raise
            logger.warning("submit failed: %s", _text(error), extra={"worker_id": self._worker_id})
            followers = self._followers.pop(novelty, {})
            self._on_failure(submits, _text(error), is_lost=_is_loss(error))
            self._on_failure(list(followers.values()), _text(error), is_lost=False)
            return
        followers = self._followers.pop(novelty, {})
        self._on_reply(submits, reply)
        if any(rejection.status >= 500 for rejection in reply.rejections):
            message = reply.rejections[0].message
            self._on_failure(list(followers.values()), message, is_lost=False)
        elif any(rejection.param == "structured_outputs" for rejection in reply.rejections):
            # The worker may not cache a grammar that it rejects, and compiles it for each call.
            if followers:
                self._call_alone(list(followers.values()), novelty)
        else:
            # From now on the worker replies to submits with this grammar or adapter at once.
            is_adapter = isinstance(novelty, AdapterRef)
            known = self._known_adapters if is_adapter else self._known_grammars
            known[hash(novelty)] = None
            for follower in followers.values():
                self.submit(follower)

    async def _send(self, payload: bytes) -> SubmitReply:
        async with asyncio.timeout(SUBMIT_TIMEOUT_S):
            reply = await self._transport.submit(self._worker_id, payload)
        return self._decoder.decode(reply)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_loss(error: BaseException) -> bool:
    """Whether the connection broke; after a timeout the worker is still connected."""
    return isinstance(error, ConnectionError)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
