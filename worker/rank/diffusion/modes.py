"""The two ways to run the rounds of a batch. Neither knows an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

Advance = Callable[[Sequence[int]], Sequence[bool]]
"""One forward pass and one step for these rows of the batch: which of them are done now."""


class ExecutionMode(ABC):
    """Runs rounds until control is to go back to the scheduler."""

    @abstractmethod
    def run(self, advance: Advance, num_rows: int, max_rounds: int) -> None:
        """At least one round over all rows.

        Args:
            advance: runs one round.
            num_rows: rows of the batch.
            max_rounds: most rounds, where the mode lets itself be interrupted.
        """


class Synchronous(ExecutionMode):
    """Until all blocks are done: rows that were done earlier ride along."""

    def run(self, advance: Advance, num_rows: int, max_rounds: int) -> None:
        """See ExecutionMode.run; a barrier is not interrupted, so `max_rounds` is not read."""
        rows = range(num_rows)
        done = [False] * num_rows
        while not all(done):
            done = [was or now for was, now in zip(done, advance(rows), strict=True)]


class FirstDoneFirstOut(ExecutionMode):
    """Until any block is done: it leaves, and the others come again just as they stand."""

    def run(self, advance: Advance, num_rows: int, max_rounds: int) -> None:
        """See ExecutionMode.run."""
        rows = range(num_rows)
        for _ in range(max_rounds):
            if any(advance(rows)):
                return
