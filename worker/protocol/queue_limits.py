"""Limits of a worker's queue, and the HTTP 429 rejection of requests that exceed them."""

from __future__ import annotations

from typing import NamedTuple

from worker.protocol.messages import Rejection


class QueueLimits(NamedTuple):
    """Limits of a worker's queue.

    The frontend checks them against the last reported load, and the scheduler checks them against
    the queue.
    """

    max_requests: int
    """Maximum number of waiting requests; 0 for no limit."""
    max_tokens: int
    """Maximum total number of tokens in waiting requests; 0 for no limit. A single request may
    exceed it."""

    def has_room(
        self, num_waiting: int, num_tokens: int, *, num_free_slots: int, num_new_tokens: int = 1
    ) -> bool:
        """Whether another request may wait.

        Requests with a free slot do not count as waiting, since they only stay in the queue until
        the next step.

        Args:
            num_waiting: number of requests in the queue.
            num_tokens: total number of tokens in waiting requests.
            num_free_slots: number of requests that can start running immediately.
            num_new_tokens: number of tokens of the new request, at least 1.
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
    """HTTP 429 rejection of a request that exceeds the limits.

    Args:
        request_id: id of the request.
        attempt: attempt of the request.
        num_waiting: number of requests in the queue.
        num_tokens: total number of tokens in waiting requests.
        retry_after_s: estimated time until the queue has drained, in seconds.
    """
    return Rejection(
        request_id=request_id,
        attempt=attempt,
        message=(
            f"the worker's queue is full ({num_waiting} requests, {num_tokens} tokens), and no "
            "queued request is less urgent: retry later"
        ),
        status=429,
        retry_after_s=max(retry_after_s, 1),
    )
