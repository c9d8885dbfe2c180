"""All workers of a model side by side, in arrays: what policies compute with."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Floats: TypeAlias = NDArray[np.float64]

OUTPUT_STEPS = 256
"""Steps that a request is taken to occupy a place in the batch for."""
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
    """Prompt tokens that its last report tells of, not computed yet."""
    work_attended: Floats
    """Pairs of one of these and a position that it attends to."""
    work_steps: Floats
    """Steps that they take; half of one where only decodes run."""
    work_first: Floats
    """Part of them that are first pieces, see `first_s`."""
    work_burst: Floats
    """Those that fit into one step."""
    work_rows: Floats
    """Running requests."""
    work_context: Floats
    """Positions that these attend to."""
    queue_s: Floats
    """To compute the prompts that its last report tells of."""
    reported_at: Floats
    """When that was."""
    first_s: Floats
    """Of `queue_s`, the first pieces of prompts that wait: what a step does of a new prompt though
    others are under way."""
    drain_s: Floats
    """As much of `queue_s` can have been done since: what is in one step."""
    queue_until: Floats
    """When `queue_s` has passed since."""
    first_until: Floats
    """The same of `first_s`."""
    left_s: Floats
    """What of `queue_s` is there when that step has ended."""
    reserved_s: Floats
    """To compute what this gateway has sent there since."""
    reserved_first_s: Floats
    """Of `reserved_s`, the same."""
    reserved_tokens: Floats
    """Uncached prompt tokens of these."""
    prefill_token_s: Floats
    """Per prompt token."""
    attended_s: Floats
    """Per pair of a prompt token and a position that it attends to."""
    worth: Floats
    """Of a second of its time, for what it computes in it; 1 on average."""
    step_s: Floats
    """A step without prompts, as its running requests are."""
    row_s: Floats
    """What one more running request adds to that."""
    chunk: Floats
    """Most prompt tokens of one step."""
    piece: Floats
    """Most tokens of such a first piece; 0 where prompts under way leave nothing."""
    stretch: Floats
    """What its time is multiplied by while prompts under way take the rest of each step."""
    stretched: Floats
    """`stretch` less 1."""
    num_queued: Floats
    """Prompts that its last report tells of."""
    num_sent: Floats
    """Prompts that were sent there since."""
    num_packed: Floats
    """Requests whose prompts end in the last step of its queue; that under way is not counted."""
    room_s: Floats
    """What fits into that step beside them."""
    num_active: Floats
    """Requests running, waiting, and on their way."""
    places: Floats
    """Requests that can run at once."""
    free_pages: Floats
    """Free or evictable."""
    total_pages: Floats
    empty_tokens: Floats
    """Room in pages that hold nothing that anyone could hit, less what was sent there since."""
    slowdown_s: Floats
    """What one more request costs those that are there, over the time in which it generates."""
    place_s: Floats
    """Until there is a place in the batch; 0 while there is one."""
    page_size: Floats
    last_chosen: Floats
    """Turn in which it was chosen last."""
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
        self.page_size[row] = self.places[row] = self.chunk[row] = 1.0
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

        One that is a single piece need not wait for those under way: while it and the pieces
        before it are computed, they only get the rest of each step.

        Args:
            now: the clock.
            num_tokens: to compute, per row.
            work_s: what that takes.
            waiting: `waiting_s`.
            coming: tokens that it waits for others to compute; None for none.
        """
        first = self.first_until - now
        np.maximum(first, _ZERO, out=first)
        first += self.reserved_first_s
        first *= self.stretch
        first += self.stretched * work_s
        np.minimum(first, waiting, out=first)
        soon = num_tokens <= self.piece
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
        if coming or num_tokens > self.piece.item(row):
            return waiting
        stretch = self.stretch.item(row)
        first = max(self.first_until.item(row) - now, 0.0) + self.reserved_first_s.item(row)
        return min(waiting, stretch * first + self.stretched.item(row) * work_s)

    def places_s(self, num_active: Floats) -> Floats:
        """Until there is a place in the batch behind so many requests, per row."""
        over: Floats = np.maximum(num_active + 1.0 - self.places, 0.0)
        over /= self.places
        over *= OUTPUT_STEPS
        over *= self.step_s
        return over

    def date_row(self, row: int) -> None:
        """Enters until when the queue of a worker lasts, as it was reported and priced."""
        reported_at, queue_s = self.reported_at.item(row), self.queue_s.item(row)
        self.queue_until[row] = reported_at + queue_s
        self.first_until[row] = reported_at + self.first_s.item(row)
        self.left_s[row] = max(queue_s - self.drain_s.item(row), 0.0)

    def date_all(self) -> None:
        """The same for all rows."""
        np.add(self.reported_at, self.queue_s, out=self.queue_until)
        np.add(self.reported_at, self.first_s, out=self.first_until)
        np.maximum(self.queue_s - self.drain_s, 0.0, out=self.left_s)

    def pack_row(self, row: int, num_queued: int, num_sent: int) -> None:
        """Enters these numbers of prompts, and how full they make the last step of the queue."""
        self.num_queued[row], self.num_sent[row] = num_queued, num_sent
        step_s = self.chunk.item(row) * self.prefill_token_s.item(row)
        left_s = self.left_s.item(row)
        work_s = self.reserved_s.item(row) + left_s
        number: float = num_sent
        if left_s:
            number += num_queued * left_s / self.queue_s.item(row)
        last_s = work_s % step_s if step_s else 0.0
        self.room_s[row] = step_s - last_s
        self.num_packed[row] = number * last_s / work_s if work_s > 0.0 else 0.0

    def pack_all(self) -> None:
        """The same for all rows, whose numbers have not changed."""
        steps_s = self.chunk * self.prefill_token_s
        number = self.num_sent + self.num_queued * self.left_s / np.maximum(self.queue_s, _LEAST)
        work_s = self.reserved_s + self.left_s
        last_s = np.fmod(work_s, np.maximum(steps_s, _LEAST))
        self.room_s[:] = np.maximum(steps_s - last_s, 0.0)
        self.num_packed[:] = number * last_s / np.maximum(work_s, _LEAST)

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
        for name in ("page_size", "places", "chunk"):  # divisors
            array = getattr(self, name)
            array[array == 0.0] = 1.0


def _grown(old: NDArray[Any] | None, capacity: int, dtype: type) -> NDArray[Any]:
    new: NDArray[Any] = np.zeros(capacity, dtype)
    if old is not None:
        new[: len(old)] = old
    return new


_FLOATS = tuple(name for name in WorkerTable.__annotations__ if name not in ("eligible", "seeds"))
