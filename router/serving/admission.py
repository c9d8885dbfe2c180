"""AdmissionRules: workers' admission rules changed by an operator, shared by all gateways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from router.errors import ApiError
from worker.protocol.admission import AdmissionChange

logger = logging.getLogger(__name__)

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


class AdmissionRules:
    """Changes to the workers' admission rules, which this gateway sends to its workers.

    The store is authoritative. It has one value per rule, so that concurrent changes of different
    rules at several gateways do not undo each other.

    Args:
        store: store of the model's gateways; None if this gateway is the only one.
        notify: sends a change to all attached workers; returns their ids.
    """

    def __init__(
        self, store: SettingsStore | None, notify: Callable[[AdmissionChange], list[str]]
    ) -> None:
        self.change = AdmissionChange()
        """All rules that differ from the workers' flags; sent to each worker that attaches."""
        self._store = store
        self._notify = notify
        self._lock = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None
        self._reachable = True

    async def set(self, change: AdmissionChange) -> list[str]:
        """Stores a change, then sends it to the workers; returns their ids.

        Raises:
            ApiError: 503 if the change could not be stored; then no worker receives it.
        """
        encode = msgspec.msgpack.encode
        values = {name: encode(value) for name, value in change.given.items()}
        async with self._lock:
            if self._store is not None:
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        await self._store.write(values)
                except Exception as error:
                    problem = f"admission rules unchanged, storing the change failed: {error!r}"
                    raise ApiError(503, problem, retry_after_s=1) from error
            self.change = self.change.then(change)
            return self._notify(change)

    async def start(self) -> None:
        """Reads the stored changes, and applies those of other gateways until `close`."""
        if self._store is not None:
            await self._read(self._store)
            self._follower = asyncio.create_task(self._follow(self._store))

    async def close(self) -> None:
        """Stops applying changes of other gateways."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower

    async def _follow(self, store: SettingsStore) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._read(store)

    async def _read(self, store: SettingsStore) -> None:
        async with self._lock:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    values = await store.read()
            except Exception as error:
                if self._reachable:  # logged once, not with each read
                    logger.warning(
                        "failed to read admission rules, keeping the current ones: %r", error
                    )
                self._reachable = False
                return
            self._reachable = True
            known = self.change
            for name, value in values.items():
                # Values stored by another release may be unknown to this one.
                with contextlib.suppress(ValueError):
                    rule = {name: msgspec.msgpack.decode(value)}
                    known = known.then(AdmissionChange(rule))
            before, self.change = self.change.given, known
            if news := {n: v for n, v in known.given.items() if before.get(n) != v}:
                self._notify(AdmissionChange(news))
