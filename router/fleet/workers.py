"""All workers of a model side by side, in arrays: what policies compute with."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from router.fleet.constants import OUTPUT_STEPS

Floats: TypeAlias = NDArray[np.float64]

_FIRST_CAPACITY = 8
# Arrays: numpy converts any other number with each use.
_ZERO, _HALF, _ONE = np.array(0.0), np.array(0.5), np.array(1.0)


class WorkerTable:
    """One row per worker; rows of workers that are gone are not eligible, and are used again.

    Times are seconds as the step-time model of the fleet prices them for this very worker.
    """

    eligible: NDArray[np.bool_]
    """Attached, loaded and not draining."""
    work_tokens: Floats
    """Prompt tokens in its last report, not computed yet."""
    work_attended: Floats
    """Pairs of a prompt token in its last report and a position that this attends to."""
    work_steps: Floats
    """Steps that these prompt tokens take; half of one where only decodes run."""
    work_first_chunks: Floats
    """Part of these prompt tokens that are in first chunks, see `first_chunks_s`."""
    work_burst: Floats
    """Prompt tokens in its last report that fit into one step."""
    work_rows: Floats
    """Running requests."""
    work_context: Floats
    """Positions that its running requests attend to."""
    queue_s: Floats
    """Seconds to compute the prompts in its last report."""
    reported_at: Floats
    """Seconds of the fleet's clock at the last report."""
    first_chunks_s: Floats
    """Part of `queue_s` for the first chunks of prompts that wait: what a step computes of a new
    prompt though others are under way."""
    drain_s: Floats
    """Most seconds of `queue_s` that can have passed since the report: those of one step."""
    queue_until: Floats
    """Seconds of the fleet's clock at which `queue_s` has passed since the report."""
    first_chunks_until: Floats
    """Seconds of the fleet's clock at which `first_chunks_s` has passed since the report."""
    left_s: Floats
    """Part of `queue_s` that is left when the step of `drain_s` has ended."""
    reserved_s: Floats
    """Seconds to compute what this gateway has sent there since the report."""
    reserved_first_chunks_s: Floats
    """Part of `reserved_s` for first chunks."""
    reserved_tokens: Floats
    """Uncached prompt tokens of what this gateway has sent there since the report."""
    prefill_token_s: Floats
    """Seconds per prompt token."""
    attended_s: Floats
    """Seconds per pair of a prompt token and a position that it attends to."""
    relative_speed: Floats
    """Speed of the worker over the mean of the workers that are ready."""
    step_s: Floats
    """Seconds of a step without prompts, as its running requests are."""
    chunk: Floats
    """Most prompt tokens of one step."""
    first_chunk_tokens: Floats
    """Most tokens of such a first chunk; 0 where prompts under way leave nothing."""
    chunk_slowdown: Floats
    """Factor on the time of a first chunk while prompts under way take the rest of each step."""
    extra_slowdown: Floats
    """`chunk_slowdown` less 1."""
    num_active: Floats
    """Requests running, waiting, and on their way."""
    max_num_seqs: Floats
    """Requests that can run at once."""
    slot_wait_s: Floats
    """Seconds until there is a slot in the batch behind its `num_active` requests."""
    free_pages: Floats
    """Pages of its KV cache that are free or evictable."""
    total_pages: Floats
    page_size: Floats
    last_chosen: Floats
    """Number of the decision that chose it last."""
    seeds: NDArray[np.uint64]
    """A random number of the worker's own, the same in every gateway."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        """Workers' ids by row; empty where the row is free."""
        self._free: list[int] = []
        self._resize(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def capacity(self) -> int:
        """Rows that the arrays have."""
        return len(self.eligible)

    def add(self, worker_id: str) -> int:
        """A row for a worker, all zero."""
        if self._free:
            row = self._free.pop()
            self.ids[row] = worker_id
        else:
            row = len(self.ids)
            self.ids.append(worker_id)
            if row == len(self.eligible):
                self._resize(2 * row)
        for name in _FLOATS:
            getattr(self, name)[row] = 0.0
        self.page_size[row] = self.max_num_seqs[row] = self.chunk[row] = 1.0
        self.seeds[row] = xxh3_64_intdigest(worker_id.encode())
        return row

    def remove(self, row: int) -> None:
        """Frees a row."""
        self.ids[row] = ""
        self.eligible[row] = False
        self._free.append(row)

    def waiting_s(self, now: float) -> Floats:
        """Seconds until a new request's prompt is begun, per row."""
        waiting = self.queue_until - now
        np.maximum(waiting, self.left_s, out=waiting)
        waiting += self.reserved_s
        return waiting

    def delay_s(
        self,
        now: float,
        num_tokens: Floats,
        work_s: Floats,
        waiting: Floats,
        coming: Floats | None,
    ) -> Floats:
        """Seconds that others take until a prompt with so much to compute is done, per row.

        One that is a single chunk need not wait for those under way: while it and the first chunks
        before it are computed, those get the rest of each step only.

        Args:
            now: the clock.
            num_tokens: to compute, per row.
            work_s: what that takes.
            waiting: `waiting_s`.
            coming: tokens that it waits for others to compute; None for none.
        """
        first = self.first_chunks_until - now
        np.maximum(first, _ZERO, out=first)
        first += self.reserved_first_chunks_s
        first *= self.chunk_slowdown
        first += self.extra_slowdown * work_s
        np.minimum(first, waiting, out=first)
        soon = num_tokens <= self.first_chunk_tokens
        if coming is not None:
            soon &= coming <= _ZERO
        result: Floats = np.where(soon, first, waiting)
        return result

    def slot_waits_s(self, num_active: Floats) -> Floats:
        """Seconds until there is a slot in the batch behind `num_active` requests, per row."""
        over: Floats = np.maximum(num_active + 1.0 - self.max_num_seqs, 0.0)
        over /= self.max_num_seqs
        over *= OUTPUT_STEPS
        over *= self.step_s
        return over

    def set_active(self, row: int, num_active: int) -> None:
        """Enters how many requests a worker has, and the `slot_wait_s` behind them."""
        self.num_active[row] = num_active
        most = self.max_num_seqs.item(row)
        over = max(num_active + 1.0 - most, 0.0)
        self.slot_wait_s[row] = over / most * OUTPUT_STEPS * self.step_s.item(row) if over else 0.0

    def date(self, rows: int | slice) -> None:
        """Enters until when the queues of workers last, as they were reported and priced."""
        reported_at, queue_s = self.reported_at[rows], self.queue_s[rows]
        self.queue_until[rows] = reported_at + queue_s
        self.first_chunks_until[rows] = reported_at + self.first_chunks_s[rows]
        self.left_s[rows] = np.maximum(queue_s - self.drain_s[rows], 0.0)

    def compute_s(self, num_tokens: Floats, num_cached: Floats) -> Floats:
        """Seconds to compute so many tokens of a prompt after so many cached ones, per row."""
        seconds = _HALF * num_tokens
        seconds += num_cached
        seconds *= self.attended_s
        seconds += self.prefill_token_s
        seconds *= num_tokens
        steps = num_tokens / self.chunk
        np.maximum(steps, _ONE, out=steps)
        steps *= self.step_s
        seconds += steps
        return seconds

    def _resize(self, capacity: int) -> None:
        for name in _FLOATS:
            setattr(self, name, grown(getattr(self, name, np.zeros(0)), capacity))
        self.eligible = grown(getattr(self, "eligible", np.zeros(0, np.bool_)), capacity)
        self.seeds = grown(getattr(self, "seeds", np.zeros(0, np.uint64)), capacity)
        for name in ("page_size", "max_num_seqs", "chunk"):  # divisors
            array = getattr(self, name)
            array[array == 0.0] = 1.0


def grown(array: NDArray[Any], size: int, fill: float = 0.0) -> NDArray[Any]:
    """A copy of an array with entries of `fill` at its end, `size` entries in all."""
    longer = np.full(size, fill, array.dtype)
    longer[: len(array)] = array
    return longer


_FLOATS = tuple(name for name in WorkerTable.__annotations__ if name not in ("eligible", "seeds"))
