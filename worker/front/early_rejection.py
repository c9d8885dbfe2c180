"""What a front decides about new requests before rank 0 sees them."""

from __future__ import annotations

from worker.wire.admission import AdmissionChange
from worker.wire.messages import EngineInfo, LoadSnapshot, Rejection, Submit


class AdmissionDesk:
    """Turns requests away early where rank 0 surely would, and remembers what it was told.

    The load is a step old. What was handed over since is counted as waiting, so a flood between
    two reports does not pass; whether an urgent arrival takes another's place is left to rank 0,
    which turns away exactly, by the same limits.
    """

    def __init__(self) -> None:
        self.change = AdmissionChange()
        """All that was changed by hand: a rebuilt rank group is told again."""

    def take(self, change: AdmissionChange) -> None:
        """Remembers a change."""
        self.change = self.change.then(change)

    def refuse(
        self, submit: Submit, info: EngineInfo, load: LoadSnapshot, last_ordinal: int
    ) -> Rejection | None:
        """A 429 where the queue is full of requests that are as urgent; else None.

        Args:
            submit: new.
            info: knows the limits.
            load: the last that rank 0 told.
            last_ordinal: how many submits have been handed to rank 0.
        """
        if submit.num_resumed or submit.is_resubmitted or submit.tenant:
            return None
        if submit.priority > load.least_queued_priority >= 0:
            return None
        num_new = last_ordinal - load.num_submits_seen
        num_waiting = load.num_waiting + num_new
        num_free = max(info.max_num_seqs - load.num_running, 0)
        full = 0 < info.max_queued_requests <= num_waiting - num_free
        if 0 < info.max_queued_tokens <= load.num_queued_tokens and num_waiting > num_free:
            full = True
        if not full:
            return None
        return Rejection(
            request_id=submit.request_id,
            attempt=submit.attempt,
            message=(
                f"{num_waiting} requests wait at this worker already, none of them less urgent: "
                "try again later"
            ),
            status=429,
            retry_after_s=max(load.retry_after_s, 1),
        )
