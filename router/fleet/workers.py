"""All workers of a model side by side, in arrays: what policies compute with."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Floats: TypeAlias = NDArray[np.float64]

_FIRST_CAPACITY = 8


class WorkerTable:
    """One row per worker; rows of workers that are gone are not eligible, and are used again.

    Times are seconds as the step-time model of the fleet prices them for this very worker.
    """

    eligible: NDArray[np.bool_]
    """Attached, loaded and not draining."""
    queue_s: Floats
    """To compute the prompts that its last report tells of."""
    reported_at: Floats
    """When that was."""
    drain_s: Floats
    """As much of `queue_s` can have been done since: what is in one step."""
    reserved_s: Floats
    """To compute what this gateway has sent there since."""
    reserved_tokens: Floats
    """Uncached prompt tokens of these."""
    prefill_token_s: Floats
    """Per prompt token."""
    attended_s: Floats
    """Per pair of a prompt token and a position that it attends to."""
    step_s: Floats
    """A step without prompts, as its running requests are."""
    row_s: Floats
    """What one more running request adds to that."""
    chunk: Floats
    """Most prompt tokens of one step."""
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

    def compute_s(self, num_tokens: Floats, num_cached: Floats) -> Floats:
        """To compute so many tokens of a prompt after so many that are cached, per row."""
        seconds = self.attended_s * (num_cached + 0.5 * num_tokens)
        seconds += self.prefill_token_s
        seconds *= num_tokens
        seconds += np.maximum(num_tokens / self.chunk, 1.0) * self.step_s
        return seconds

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
