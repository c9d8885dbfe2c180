"""What is known of a request that is to be placed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.fleet.queue_order import QueueView
from router.fleet.workers import Floats
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
    """Those of `hit_tokens` that have to be fetched from host memory; None where none have."""
    coming_tokens: Floats | None
    """Those of `hit_tokens` that other requests are about to compute; None where there are none."""
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
