"""Intake of a frontend: decodes batches without blocking the event loop, and rejects submits
early."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from worker.protocol.admission import AdmissionChange
from worker.protocol.limits import Problem, refuse
from worker.protocol.messages import Abort, EngineInfo, LoadSnapshot, Rejection, Submit, SubmitBatch
from worker.protocol.queue_limits import QueueLimits, queue_full
from worker.protocol.sampling import SamplingParams

SLICE_BYTES = 1 << 16
"""Maximum encoded size, in bytes, of a slice: the submits and parameters that are decoded before
the event loop runs again. The largest parameters that a single request can have, 33 KB, take 0.8 ms
to decode and validate."""
SLICE_SUBMITS = 512
"""Maximum number of submits per slice. Each takes about 10 us here and 20 us at rank 0."""
SLICE_ENTRIES = 1 << 14
"""Maximum number of texts and token ids in the sampling parameters that rank 0 decodes between
steps. Each takes about 0.1 us."""


class _RawBatch(msgspec.Struct):
    """A gateway's SubmitBatch with undecoded submits and sampling parameters."""

    submits: list[msgspec.Raw] = []
    aborts: list[Abort] = []
    admission: AdmissionChange | None = None
    samplings: list[msgspec.Raw] = []
    check_adapter: str = ""


class Intake:
    """Decodes batches, and rejects submits that an engine could never serve."""

    def __init__(self) -> None:
        self._decode_batch = msgspec.msgpack.Decoder(_RawBatch).decode
        self._decode_submit = msgspec.msgpack.Decoder(Submit).decode
        self._decode_sampling = msgspec.msgpack.Decoder(SamplingParams).decode

    async def decode(
        self, payload: bytes, info: EngineInfo | None
    ) -> tuple[SubmitBatch, list[Rejection]]:
        """Decodes a batch; also returns rejections of submits that `info`'s engine cannot serve.

        Raises:
            msgspec.DecodeError: the payload is not a valid batch.
        """
        raw = self._decode_batch(payload)
        slice_ = _Slice()
        samplings = []
        for encoded in raw.samplings:
            if slice_.is_over(len(encoded)):
                await asyncio.sleep(0)
            samplings.append(self._decode_sampling(encoded))
        submits = []
        for encoded in raw.submits:
            if slice_.is_over(len(encoded)):
                await asyncio.sleep(0)
            submits.append(self._decode_submit(encoded))
        batch = SubmitBatch(
            submits=submits,
            aborts=raw.aborts,
            admission=raw.admission,
            samplings=samplings,
            check_adapter=raw.check_adapter,
        )
        rejections: list[Rejection] = []
        known: dict[int, Problem | None] = {}
        if info is None:
            return batch, rejections
        for submit, encoded in zip(submits, raw.submits, strict=True):
            if slice_.is_over(len(encoded)):
                await asyncio.sleep(0)
            if (rejection := refuse(submit, info, known)) is not None:
                rejections.append(rejection)
        return batch, rejections


def slices(batch: SubmitBatch) -> Iterator[SubmitBatch]:
    """Splits a batch into parts, each of which rank 0 receives between steps. Grammars are in
    the first part, aborts in the last."""
    first = msgspec.structs.replace(batch, submits=[], aborts=[], admission=None)
    *parts, last = _parts(batch.submits)
    for part in parts:
        yield msgspec.structs.replace(first, submits=part)
        first = SubmitBatch()
    yield msgspec.structs.replace(
        first, submits=last, aborts=batch.aborts, admission=batch.admission
    )


def _parts(submits: Sequence[Submit]) -> Iterator[list[Submit]]:
    """Splits submits by SLICE_ENTRIES and SLICE_SUBMITS; shared parameters count once per part."""
    part: list[Submit] = []
    seen: dict[int, None] = {}
    num_entries = 0
    for submit in submits:
        sampling = submit.sampling
        more = 0 if id(sampling) in seen else sampling.num_entries
        if part and (num_entries + more > SLICE_ENTRIES or len(part) == SLICE_SUBMITS):
            yield part
            part, seen, num_entries, more = [], {}, 0, sampling.num_entries
        part.append(submit)
        seen[id(sampling)] = None
        num_entries += more
    yield part


class _Slice:
    """Counts the objects decoded since the event loop last ran."""

    def __init__(self) -> None:
        self._num_submits = self._num_bytes = 0

    def is_over(self, num_bytes: int) -> bool:
        """Counts an object of `num_bytes` bytes; returns whether a new slice begins with it."""
        is_over = (
            self._num_submits == SLICE_SUBMITS or 0 < self._num_bytes > SLICE_BYTES - num_bytes
        )
        if is_over:
            self._num_submits = self._num_bytes = 0
        self._num_submits += 1
        self._num_bytes += num_bytes
        return is_over


def reject_early(
    submit: Submit, info: EngineInfo, load: LoadSnapshot, last_ordinal: int
) -> Rejection | None:
    """HTTP 429 rejection if the queue is full of requests of at least equal urgency; otherwise
    None.

    The load is one step old. Submits sent since then count as waiting, so that bursts between two
    reports are limited. Replacing a queued request with a more urgent one is left to the scheduler.

    Args:
        submit: a new submit.
        info: the engine, with its queue limits.
        load: last reported load.
        last_ordinal: ordinal of the last submit sent to rank 0.
    """
    if submit.num_resumed or submit.is_resubmitted or submit.tenant:
        return None
    if submit.priority > load.least_queued_priority >= 0:
        return None
    num_waiting = load.num_waiting + last_ordinal - load.num_submits_seen
    limits = QueueLimits(info.max_queued_requests, info.max_queued_tokens)
    num_free_slots = max(info.max_num_seqs - load.num_running, 0)
    if limits.has_room(num_waiting, load.num_queued_tokens, num_free_slots=num_free_slots):
        return None
    return queue_full(
        submit.request_id,
        submit.attempt,
        num_waiting=num_waiting,
        num_tokens=load.num_queued_tokens,
        retry_after_s=load.retry_after_s,
    )
