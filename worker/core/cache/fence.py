"""Fence: defers items until the last step that uses them has completed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Fence(Generic[T]):
    """Holds items back until the step given for each has completed.

        step 7 launched ── release(page, fence 7) ── step 7 completed ── page usable again

    Steps complete in the order of their sequence numbers, which start at 1; fence 0 means that no
    step uses the item.
    """

    def __init__(self) -> None:
        self._completed = 0
        self._held: list[tuple[int, T]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self._held)

    def passed(self, seq: int) -> bool:
        """Whether step `seq` has completed."""
        return seq <= self._completed

    def hold(self, item: T, seq: int) -> None:
        """Holds `item` until step `seq`, which has not completed yet."""
        assert seq > self._completed, f"step {seq} has already completed"
        self._held.append((seq, item))

    def complete(self, seq: int) -> list[T]:
        """Marks all steps up to `seq` as completed; returns the items held for them."""
        assert seq > self._completed, f"step {seq} completed after step {self._completed}"
        self._completed = seq
        if not self._held:
            return []
        due = [item for fence, item in self._held if fence <= seq]
        self._held = [(fence, item) for fence, item in self._held if fence > seq]
        return due
