"""Turning requests away before the scheduler sees them."""

from __future__ import annotations

from worker.wire.messages import EngineInfo, LoadSnapshot, Rejection, Submit
from worker.wire.queue_limits import QueueLimits, queue_full


def reject_early(
    submit: Submit, info: EngineInfo, load: LoadSnapshot, last_ordinal: int
) -> Rejection | None:
    """A 429 where the queue is full of requests that are as urgent, as the scheduler's; else None.

    The load is a step old. What was handed over since is counted as waiting, so a flood between
    two reports does not pass. Whether an arrival takes another's place is left to the scheduler.

    Args:
        submit: new.
        info: knows the limits.
        load: the last that was reported.
        last_ordinal: how many submits have been handed to rank 0.
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
