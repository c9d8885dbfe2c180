"""RequestView: a request with its hits on all workers. Estimate: its predicted times there."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.fleet.constants import HOST_COPY
from router.fleet.queue_order import QueueView
from router.fleet.workers import Floats, WorkerTable
from worker.protocol.blocks import BlockHashes


class RequestView(msgspec.Struct):
    """A request as seen by policies. Arrays have one entry per row of the WorkerTable."""

    num_tokens: int
    """Tokens of the prompt."""
    eligible: NDArray[np.bool_]
    """Whether the worker may be chosen for the request."""
    hit_tokens: Floats
    """Leading prompt tokens that are in the worker's prefix cache, or will be once the requests in
    flight there are computed."""
    host_hit_tokens: Floats | None
    """Tokens of `hit_tokens` that are only in host memory; None if there are none on any worker."""
    coming_tokens: Floats | None
    """Tokens of `hit_tokens` that requests in flight must compute first; None if there are none on
    any worker."""
    best_hit: float
    """Maximum of `hit_tokens`, including workers that are not eligible."""
    hashes: BlockHashes
    """Block hashes of the prompt's full pages."""
    page_size: int
    """Page size in tokens for which `hashes` was computed."""
    session: str
    """The client's conversation id; empty if there is none."""
    shared_block: int
    """Hash of the last block of the longest prefix that any worker has; 0 if there is none."""
    queue: QueueView | None = None
    """Prompts in flight at the workers by priority; None if the request overtakes none of them."""
    adapter_s: Floats | None = None
    """Seconds until the worker has the request's LoRA adapter on the device; None if it uses
    none."""


class Estimate(NamedTuple):
    """Predicted times of a request on each worker: seconds, one per row of the WorkerTable."""

    queue_s: Floats
    """Seconds to compute all prompts ahead of the request."""
    delay_s: Floats
    """Seconds that other prompts delay the request's prefill: less than `queue_s` if a short prompt
    overtakes long ones by chunked prefill."""
    slot_wait_s: Floats
    """Seconds until a batch slot is free."""
    work_s: Floats
    """Seconds to compute the tokens missing in the worker's prefix cache, and to load those that
    are only in host memory."""

    @property
    def first_token_s(self) -> Floats:
        """Seconds to the first token: delay, slot wait and work."""
        return self.delay_s + self.slot_wait_s + self.work_s


def estimate(request: RequestView, workers: WorkerTable, now: float) -> Estimate:
    """Predicted times of a request on each worker; `now` is the time on the fleet's clock."""
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
