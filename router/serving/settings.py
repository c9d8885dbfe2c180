"""Settings that an operator changes at run time, shared by the gateways of one model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from router.errors import ApiError

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 5.0
"""Seconds between reads of the store, each a call to Ray: the maximum delay until a gateway
applies another gateway's change."""
TIMEOUT_S = 5.0
"""Timeout in seconds of a call to the store, which may be on a failed node."""


class SettingsStore(Protocol):
    """Key-value store shared by the gateways of one model, which outlives them."""

    async def read(self) -> dict[str, bytes]:
        """All values by name. Raises Exception if the store is unreachable."""
        ...

    async def write(self, values: Mapping[str, bytes]) -> None:
        """Adds or replaces values. Raises Exception if they may not have been stored."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes values. Raises Exception if they may not have been deleted."""
        ...


class SharedSettings:
    """Applies the contents of a store, at startup and whenever they change.

    Args:
        store: store of the model's gateways; None if this gateway is the only one.
        title: name of the settings in messages, such as "admission rules".
        apply: applies the store's values. It runs with `lock` held.
    """

    def __init__(
        self, store: SettingsStore | None, title: str, apply: Callable[[dict[str, bytes]], None]
    ) -> None:
        self.store = store
        self.lock = asyncio.Lock()
        """Held while the settings are read or changed."""
        self._title = title
        self._apply = apply
        self._follower: asyncio.Task[None] | None = None
        self._reachable = True
        self._is_due = asyncio.Event()

    async def start(self) -> None:
        """Reads the store, and applies other gateways' changes until `close`."""
        if self.store is not None:
            await self.read()
            self._follower = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stops applying other gateways' changes."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower

    async def read(self) -> None:
        """Reads the store and applies its values; keeps the previous ones if it is unreachable."""
        if self.store is None:
            return
        async with self.lock:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    values = await self.store.read()
            except Exception as error:
                if self._reachable:  # logged once, not with each read
                    logger.warning(
                        "failed to read %s (%r); keeping the previous values", self._title, error
                    )
                self._reachable = False
                return
            self._reachable = True
            self._apply(values)

    def read_soon(self) -> None:
        """Wakes the polling task, so that it reads the store now instead of after POLL_S."""
        self._is_due.set()

    async def refresh(self) -> None:
        """Applies the store's values before a change that depends on them, with `lock` held. Raises
        ApiError (503) if the store is unreachable."""
        if self.store is not None:
            self._apply(await self.changed(self.store.read()))

    async def changed(self, change: Coroutine[Any, Any, T]) -> T:
        """Waits for a call to the store that is part of a change; returns its result. Raises
        ApiError (503) if it may have failed."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await change
        except Exception as error:
            reason = str(error) or type(error).__name__
            problem = f"{self._title}: the change may not have been stored ({reason}): try again"
            raise ApiError(503, problem, retry_after_s=1) from error

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._is_due.wait()
            self._is_due.clear()
            await self.read()
