"""When a request would have its first token at each worker, as the worker's own order has it."""

from __future__ import annotations

from typing import NamedTuple

from router.fleet.constants import HOST_COPY
from router.fleet.request_view import RequestView
from router.fleet.workers import Floats, WorkerTable


class Estimate(NamedTuple):
    """Seconds, one per row of the WorkerTable."""

    queue_s: Floats
    """To compute the prompts that go before it, where they are done one after the other."""
    delay_s: Floats
    """What others take of the time until its prompt is done: less than `queue_s` where a short
    prompt passes long ones under way."""
    slot_wait_s: Floats
    """Until there is a slot in the batch."""
    work_s: Floats
    """To compute what is not in the worker's cache, and to fetch what is in host memory only."""

    @property
    def first_token_s(self) -> Floats:
        """Until its first token."""
        return self.delay_s + self.slot_wait_s + self.work_s


def estimate(request: RequestView, workers: WorkerTable, now: float) -> Estimate:
    """What a request has to expect at each worker; `now` is the fleet's clock."""
    hits = request.hit_tokens
    uncached = request.num_tokens - hits
    queue_s, num_active = workers.waiting_s(now), workers.num_active
    if request.queue is not None:
        queue_s = request.queue.waiting_s(queue_s)
        num_active = num_active - request.queue.num_behind
    work_s = workers.compute_s(uncached, hits)
    delay_s = workers.delay_s(now, uncached, work_s, queue_s, request.coming_tokens)
    if request.host_hit_tokens is not None:
        work_s += request.host_hit_tokens * workers.prefill_token_s * HOST_COPY
    return Estimate(queue_s, delay_s, workers.slot_waits_s(num_active), work_s)
