"""The WorkerTable: load, capacity and speed of all workers of a model, in numpy arrays."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from router.fleet.constants import OUTPUT_STEPS

Floats: TypeAlias = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
"""A number of one worker, or an array with one per row of the WorkerTable."""

_FIRST_CAPACITY = 8
# Arrays: numpy converts any other number on each use.
_ZERO, _HALF, _ONE = np.array(0.0), np.array(0.5), np.array(1.0)


class WorkerTable:
    """Arrays with one entry (row) per worker, from which policies compute all costs at once.

    Rows of workers that have left are not eligible and are reused. Times are in seconds, as
    predicted by the fleet's step-time model for the worker (see pricing); the clock is the fleet's.
    The report is the worker's last LoadSnapshot. A first chunk is the part of a waiting prompt that
    fits into its first step alongside running prefills (chunked prefill).
    """

    eligible: NDArray[np.bool_]
    """Whether the worker accepts requests: it is attached, loaded, and not draining."""
    work_tokens: Floats
    """Uncomputed prompt tokens of the requests in the report."""
    work_attended: Floats
    """Number of (token, attended position) pairs, over all `work_tokens`."""
    work_steps: Floats
    """Number of steps that prefill `work_tokens`; 0.5 if only decodes run."""
    work_first_chunks: Floats
    """Fraction of `work_tokens` in first chunks, 0 to 1."""
    work_burst: Floats
    """Tokens of `work_tokens` that fit into one step."""
    work_rows: Floats
    """Number of running requests in the report, each of which has a row in decode steps."""
    work_context: Floats
    """Number of positions that a decode step of all running requests attends to."""
    queue_s: Floats
    """Seconds to prefill `work_tokens`."""
    reported_at: Floats
    """Time of the report, on the clock."""
    first_chunks_s: Floats
    """Seconds of `queue_s` spent on first chunks."""
    drain_s: Floats
    """Seconds that one step takes: at most this much of `queue_s` is done before the next report.
    """
    queue_until: Floats
    """Time on the clock at which `queue_s` has passed since the report."""
    first_chunks_until: Floats
    """Time on the clock at which `first_chunks_s` has passed since the report."""
    left_s: Floats
    """Seconds of `queue_s` beyond `drain_s`, which remain until the next report."""
    reserved_s: Floats
    """Seconds to prefill the requests that this gateway has sent since the report."""
    reserved_first_chunks_s: Floats
    """Seconds of `reserved_s` spent on first chunks."""
    reserved_tokens: Floats
    """Uncached prompt tokens of the requests that this gateway has sent since the report."""
    prefill_token_s: Floats
    """Seconds per prompt token, without attention."""
    attended_s: Floats
    """Seconds per (prompt token, attended position) pair."""
    relative_speed: Floats
    """Speed of the worker relative to the mean speed of the ready workers."""
    step_s: Floats
    """Seconds of a decode step of the running requests in the report."""
    chunk: Floats
    """Maximum prompt tokens per step (max_num_batched_tokens)."""
    first_chunk_tokens: Floats
    """Maximum tokens of a first chunk; 0 if running prefills leave no room."""
    chunk_slowdown: Floats
    """`chunk` / `first_chunk_tokens`: factor by which a first chunk takes longer, since running
    prefills take the rest of each step; 1 if no first chunk fits."""
    extra_slowdown: Floats
    """`chunk_slowdown` minus 1."""
    num_active: Floats
    """Requests running, waiting, and sent since the report."""
    max_num_seqs: Floats
    """Maximum number of running requests (batch slots)."""
    slot_wait_s: Floats
    """Seconds that another request, beyond the `num_active` ones, waits for a batch slot."""
    free_pages: Floats
    """Number of KV cache pages that are free or evictable."""
    total_pages: Floats
    """Number of KV cache pages."""
    page_size: Floats
    """Tokens per page."""
    last_chosen: Floats
    """Number of the last decision that chose the worker; 0 before the first."""
    seeds: NDArray[np.uint64]
    """Hash of the worker's id for rendezvous hashing: the same in every gateway."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        """Worker ids by row; empty for free rows."""
        self._free: list[int] = []
        self._resize(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def capacity(self) -> int:
        """Number of rows, including free ones."""
        return len(self.eligible)

    def add(self, worker_id: str) -> int:
        """Assigns a row to a worker and returns it. All entries of the row are 0, except for the
        seed and for divisors."""
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
        """Seconds until all prompts ahead of a new request are prefilled, per row."""
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
        """Seconds that a prompt's prefill is delayed by other prompts, per row.

        A prompt that is a single first chunk does not wait for running prefills: while the prompt
        and the first chunks ahead of it are computed, running prefills only get the rest of each
        step.

        Args:
            now: time on the clock.
            num_tokens: tokens of the prompt to compute, per row.
            work_s: seconds to compute them, per row.
            waiting: `waiting_s`, per row.
            coming: tokens of the prompt's prefix that requests ahead of it compute, per row; None
                if there are none on any worker.
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
        """Seconds until a batch slot is free after `num_active` requests, per row."""
        over: Floats = np.maximum(num_active + 1.0 - self.max_num_seqs, 0.0)
        over /= self.max_num_seqs
        over *= OUTPUT_STEPS
        over *= self.step_s
        return over

    def set_active(self, row: int, num_active: int) -> None:
        """Sets a worker's `num_active`, and updates `slot_wait_s`."""
        self.num_active[row] = num_active
        num_slots = self.max_num_seqs.item(row)
        over = max(num_active + 1.0 - num_slots, 0.0)
        self.slot_wait_s[row] = (
            over / num_slots * OUTPUT_STEPS * self.step_s.item(row) if over else 0.0
        )

    def set_queue(
        self, rows: int | slice, queue_s: Number, first_chunks_s: Number, drain_s: Number
    ) -> None:
        """Sets the queues of workers, and computes when the queues end; see the fields."""
        self.queue_s[rows] = queue_s
        self.first_chunks_s[rows] = first_chunks_s
        self.drain_s[rows] = drain_s
        reported_at = self.reported_at[rows]
        self.queue_until[rows] = reported_at + queue_s
        self.first_chunks_until[rows] = reported_at + first_chunks_s
        left_s = queue_s - drain_s
        self.left_s[rows] = 0.5 * (left_s + abs(left_s))  # max(left_s, 0), for arrays and numbers

    def compute_s(self, num_tokens: Floats, num_cached: Floats) -> Floats:
        """Seconds to prefill `num_tokens` of a prompt after `num_cached` cached ones, per row."""
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
    """A copy of an array, extended to `size` entries with `fill`."""
    longer = np.full(size, fill, array.dtype)
    longer[: len(array)] = array
    return longer


_FLOATS = tuple(name for name in WorkerTable.__annotations__ if name not in ("eligible", "seeds"))
