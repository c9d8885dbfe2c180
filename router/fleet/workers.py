"""All workers of a model side by side, in arrays: what policies compute with."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Floats: TypeAlias = NDArray[np.float64]

OUTPUT_STEPS = 256
"""Steps for which a request is taken to occupy a slot of the batch."""
_FIRST_CAPACITY = 8
_LEAST = 1e-12
"""A divisor where there is nothing to divide."""
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
    """Pairs of one of these and a position that it attends to."""
    work_steps: Floats
    """Steps that they take; half of one where only decodes run."""
    work_first_chunks: Floats
    """Part of them that are first chunks, see `first_chunks_s`."""
    work_burst: Floats
    """Those that fit into one step."""
    work_rows: Floats
    """Running requests."""
    work_context: Floats
    """Positions that these attend to."""
    queue_s: Floats
    """Seconds to compute the prompts in its last report."""
    reported_at: Floats
    """When that was."""
    first_chunks_s: Floats
    """Of `queue_s`, the first chunks of prompts that wait: what a step computes of a new prompt
    though others are under way."""
    drain_s: Floats
    """As much of `queue_s` can have been done since: what is in one step."""
    queue_until: Floats
    """When `queue_s` has passed since."""
    first_chunks_until: Floats
    """The same of `first_chunks_s`."""
    left_s: Floats
    """What of `queue_s` is there when that step has ended."""
    reserved_s: Floats
    """To compute what this gateway has sent there since."""
    reserved_first_chunks_s: Floats
    """Of `reserved_s`, the same."""
    reserved_tokens: Floats
    """Uncached prompt tokens of these."""
    prefill_token_s: Floats
    """Per prompt token."""
    attended_s: Floats
    """Per pair of a prompt token and a position that it attends to."""
    relative_speed: Floats
    """What it computes in a second, over the mean of the workers that are ready."""
    step_s: Floats
    """A step without prompts, as its running requests are."""
    row_s: Floats
    """What one more running request adds to that."""
    chunk: Floats
    """Most prompt tokens of one step."""
    first_chunk_tokens: Floats
    """Most tokens of such a first chunk; 0 where prompts under way leave nothing."""
    chunk_slowdown: Floats
    """What its time is multiplied by while prompts under way take the rest of each step."""
    extra_slowdown: Floats
    """`chunk_slowdown` less 1."""
    num_queued: Floats
    """Prompts in its last report."""
    num_sent: Floats
    """Prompts that were sent there since."""
    num_coscheduled: Floats
    """Requests whose prompts end in the last step of its queue; not those of the step under way."""
    step_headroom_s: Floats
    """Seconds of prompts that fit into that step beside them."""
    num_active: Floats
    """Requests running, waiting, and on their way."""
    max_num_seqs: Floats
    """Requests that can run at once."""
    free_pages: Floats
    """Free or evictable."""
    total_pages: Floats
    empty_tokens: Floats
    """Room in pages that hold nothing that anyone could hit, less what was sent there since."""
    slowdown_s: Floats
    """What one more request costs those that are there, over the time in which it generates."""
    slot_wait_s: Floats
    """Until there is a slot in the batch; 0 while there is one."""
    page_size: Floats
    last_chosen: Floats
    """Number of the decision that chose it last."""
    seeds: NDArray[np.uint64]
    """A random number of the worker's own, the same in every gateway."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        """By row; empty where the row is free."""
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
        """Until a new request's prompt is begun, per row."""
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
        """What others take of the time until a prompt with so much to compute is done, per row.

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

    def row_delay_s(
        self,
        row: int,
        now: float,
        num_tokens: float,
        work_s: float,
        *,
        coming: bool,
    ) -> float:
        """The same for one row; all of its queue where what others compute is waited for."""
        waiting = max(self.queue_until.item(row) - now, self.left_s.item(row))
        waiting += self.reserved_s.item(row)
        if coming or num_tokens > self.first_chunk_tokens.item(row):
            return waiting
        chunk_slowdown = self.chunk_slowdown.item(row)
        first = max(
            self.first_chunks_until.item(row) - now, 0.0
        ) + self.reserved_first_chunks_s.item(row)
        return min(waiting, chunk_slowdown * first + self.extra_slowdown.item(row) * work_s)

    def slot_waits_s(self, num_active: Floats) -> Floats:
        """Until there is a slot in the batch behind `num_active` requests: seconds per row."""
        over: Floats = np.maximum(num_active + 1.0 - self.max_num_seqs, 0.0)
        over /= self.max_num_seqs
        over *= OUTPUT_STEPS
        over *= self.step_s
        return over

    def date_row(self, row: int) -> None:
        """Enters until when the queue of a worker lasts, as it was reported and priced."""
        reported_at, queue_s = self.reported_at.item(row), self.queue_s.item(row)
        self.queue_until[row] = reported_at + queue_s
        self.first_chunks_until[row] = reported_at + self.first_chunks_s.item(row)
        self.left_s[row] = max(queue_s - self.drain_s.item(row), 0.0)

    def date_all(self) -> None:
        """The same for all rows."""
        np.add(self.reported_at, self.queue_s, out=self.queue_until)
        np.add(self.reported_at, self.first_chunks_s, out=self.first_chunks_until)
        np.maximum(self.queue_s - self.drain_s, 0.0, out=self.left_s)

    def coschedule_row(self, row: int, num_queued: int, num_sent: int) -> None:
        """Enters these numbers of prompts, and how full they make the last step of the queue."""
        self.num_queued[row], self.num_sent[row] = num_queued, num_sent
        step_s = self.chunk.item(row) * self.prefill_token_s.item(row)
        left_s = self.left_s.item(row)
        work_s = self.reserved_s.item(row) + left_s
        number: float = num_sent
        if left_s:
            number += num_queued * left_s / self.queue_s.item(row)
        last_s = work_s % step_s if step_s else 0.0
        self.step_headroom_s[row] = step_s - last_s
        self.num_coscheduled[row] = number * last_s / work_s if work_s > 0.0 else 0.0

    def coschedule_all(self) -> None:
        """The same for all rows, whose numbers have not changed."""
        steps_s = self.chunk * self.prefill_token_s
        number = self.num_sent + self.num_queued * self.left_s / np.maximum(self.queue_s, _LEAST)
        work_s = self.reserved_s + self.left_s
        last_s = np.fmod(work_s, np.maximum(steps_s, _LEAST))
        self.step_headroom_s[:] = np.maximum(steps_s - last_s, 0.0)
        self.num_coscheduled[:] = number * last_s / np.maximum(work_s, _LEAST)

    def compute_s(self, num_tokens: Floats, num_cached: Floats) -> Floats:
        """To compute so many tokens of a prompt after so many that are cached, per row."""
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

    def row_compute_s(self, row: int, num_tokens: float, num_cached: float) -> float:
        """The same for one row."""
        attended_s = self.attended_s.item(row) * (num_cached + 0.5 * num_tokens)
        steps = max(num_tokens / self.chunk.item(row), 1.0)
        seconds = num_tokens * (self.prefill_token_s.item(row) + attended_s)
        return seconds + steps * self.step_s.item(row)

    def _resize(self, capacity: int) -> None:
        for name in _FLOATS:
            setattr(self, name, _grown(getattr(self, name, None), capacity, np.float64))
        self.eligible = _grown(getattr(self, "eligible", None), capacity, np.bool_)
        self.seeds = _grown(getattr(self, "seeds", None), capacity, np.uint64)
        for name in ("page_size", "max_num_seqs", "chunk"):  # divisors
            array = getattr(self, name)
            array[array == 0.0] = 1.0


def _grown(old: NDArray[Any] | None, capacity: int, dtype: type) -> NDArray[Any]:
    new: NDArray[Any] = np.zeros(capacity, dtype)
    if old is not None:
        new[: len(old)] = old
    return new


_FLOATS = tuple(name for name in WorkerTable.__annotations__ if name not in ("eligible", "seeds"))
