"""Mailbox: passes completions with new output to the task that writes the response."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Queue of items for one reader on the same event loop; cheaper than asyncio.Queue.

    The reader takes all items at once, so an engine step wakes it once for all its completions.
    """

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, item: T) -> None:
        """Adds an item and wakes the reader."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """Drops all items."""
        self._items.clear()

    async def take(self) -> list[T]:
        """Waits until there is an item; returns all items."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items
