"""Queue limits: how much may wait at a worker, and the 429 for what may not."""

from __future__ import annotations

from typing import NamedTuple

from worker.protocol.messages import Rejection


class QueueLimits(NamedTuple):
    """Bounds of a worker's queue.

    A frontend checks them against the load that was reported last, the scheduler against the queue.
    """

    max_requests: int
    """Most requests that may wait; 0 for any number."""
    max_tokens: int
    """Most tokens of all waiting requests together; 0 for any number. A single request may have
    more."""

    def has_room(
        self, num_waiting: int, num_tokens: int, *, num_free_slots: int, num_new_tokens: int = 1
    ) -> bool:
        """Whether one more request may wait.

        Requests for which there is a free slot do not count as waiting: they are in the queue only
        until the next step.

        Args:
            num_waiting: requests in the queue.
            num_tokens: tokens of these.
            num_free_slots: requests that could run at once.
            num_new_tokens: tokens of the new request, at least 1.
        """
        if num_waiting < num_free_slots:
            return True
        if self.max_requests and num_waiting >= self.max_requests + num_free_slots:
            return False
        if self.max_tokens and num_waiting:
            return num_tokens + num_new_tokens <= self.max_tokens
        return True


def queue_full(
    request_id: str, attempt: int, *, num_waiting: int, num_tokens: int, retry_after_s: int
) -> Rejection:
    """The 429 for a request that may not wait.

    Args:
        request_id: id of the request.
        attempt: its attempt.
        num_waiting: requests in the queue.
        num_tokens: tokens of these.
        retry_after_s: seconds in which the queue should have drained.
    """
    return Rejection(
        request_id=request_id,
        attempt=attempt,
        message=(
            f"{num_waiting} requests with {num_tokens} tokens wait at this worker already, none of "
            "them less urgent: try again later"
        ),
        status=429,
        retry_after_s=max(retry_after_s, 1),
    )
