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
        done = np.minimum(now - self.reported_at, self.drain_s)
        waiting = np.maximum(self.queue_s - done, 0.0)
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
        first = self.reserved_first_s + np.maximum(self.first_s - (now - self.reported_at), 0.0)
        first *= self.stretch
        first += (self.stretch - 1.0) * work_s
        np.minimum(first, waiting, out=first)
        soon = num_tokens <= self.piece
        if coming is not None:
            soon &= coming <= 0.0
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
        since = now - self.reported_at.item(row)
        waiting = max(self.queue_s.item(row) - min(since, self.drain_s.item(row)), 0.0)
        waiting += self.reserved_s.item(row)
        if coming or num_tokens > self.piece.item(row):
            return waiting
        stretch = self.stretch.item(row)
        first = max(self.first_s.item(row) - since, 0.0) + self.reserved_first_s.item(row)
        return min(waiting, stretch * first + (stretch - 1.0) * work_s)

    def places_s(self, num_active: Floats) -> Floats:
        """Until there is a place in the batch behind so many requests, per row."""
        over: Floats = np.maximum(num_active + 1.0 - self.places, 0.0)
        over /= self.places
        over *= OUTPUT_STEPS
        over *= self.step_s
        return over

    def compute_s(self, num_tokens: Floats, num_cached: Floats) -> Floats:
        """To compute so many tokens of a prompt after so many that are cached, per row."""
        seconds = self.attended_s * (num_cached + 0.5 * num_tokens)
        seconds += self.prefill_token_s
        seconds *= num_tokens
        seconds += np.maximum(num_tokens / self.chunk, 1.0) * self.step_s
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
