"""A request that is to be placed: what is known of it, and when each worker would serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.fleet.constants import HOST_COPY
from router.fleet.queue_order import QueueView
from router.fleet.workers import Floats, WorkerTable
from worker.wire.blocks import BlockHashes


@dataclass(slots=True)
class RequestView:
    """A request as policies see it. Arrays have one entry per row of the WorkerTable."""

    num_tokens: int
    """Tokens of its prompt."""
    eligible: NDArray[np.bool_]
    """Workers that may take it."""
    hit_tokens: Floats
    """Leading tokens that the worker's cache holds, or will by the time it gets to them."""
    host_hit_tokens: Floats | None
    """The part of `hit_tokens` that must be fetched from host memory; None where none must."""
    coming_tokens: Floats | None
    """The part of `hit_tokens` that other requests are about to compute; None where none are."""
    best_hit: float
    """The most of `hit_tokens`, eligible or not."""
    hashes: BlockHashes
    """Hashes of its full blocks."""
    page_size: int
    """Tokens per block of `hashes`."""
    session: str
    """Name of the conversation, where the client gave one."""
    queue: QueueView | None = None
    """The workers' queues as it finds them; None where it goes before no other prompt."""


class Estimate(NamedTuple):
    """Seconds, one per row of the WorkerTable."""

    queue_s: Floats
    """Time to compute the prompts that go before it, where they are done one by one."""
    delay_s: Floats
    """Seconds that others take until its prompt is done: less than `queue_s` where a short prompt
    passes long ones under way."""
    slot_wait_s: Floats
    """Time until there is a slot in the batch."""
    work_s: Floats
    """Time to compute what the worker's cache lacks, and to fetch what host memory alone has."""

    @property
    def first_token_s(self) -> Floats:
        """Time to the first token: the sum of delay, slot wait and work."""
        return self.delay_s + self.slot_wait_s + self.work_s


def estimate(request: RequestView, workers: WorkerTable, now: float) -> Estimate:
    """The times that a request has to expect at each worker; `now` is the fleet's clock."""
    hits = request.hit_tokens
    uncached = request.num_tokens - hits
    queue_s, slot_wait_s = workers.waiting_s(now), workers.slot_wait_s
    if request.queue is not None:
        queue_s = request.queue.waiting_s(queue_s)
        slot_wait_s = workers.slot_waits_s(workers.num_active - request.queue.num_behind)
    work_s = workers.compute_s(uncached, hits)
    delay_s = workers.delay_s(now, uncached, work_s, queue_s, request.coming_tokens)
    if request.host_hit_tokens is not None:
        work_s += request.host_hit_tokens * workers.prefill_token_s * HOST_COPY
    return Estimate(queue_s, delay_s, slot_wait_s, work_s)
