"""Rules of admission that were changed by hand: the same at all gateways, also after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from router.errors import ApiError
from worker.wire.admission import AdmissionChange

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Seconds until a gateway knows what was changed at another: an operator who watches can wait, and
each time is a call to Ray."""
TIMEOUT_S = 5.0
"""Seconds for one call to the store, which may be on a node that is gone."""


class SettingsStore(Protocol):
    """Small values that the gateways of one model share, and that outlive each of them."""

    async def read(self) -> dict[str, bytes]:
        """All values by name. Raises Exception where the store cannot be reached."""
        ...

    async def write(self, values: Mapping[str, bytes]) -> None:
        """Adds values, or replaces them. Raises Exception where they may not be kept."""
        ...


class AdmissionRules:
    """The rules of admission that this gateway sends its workers.

    The store is right: each rule is a value of its own there, so changes at several gateways at a
    time do not undo each other. Without a store this gateway is the only one.

    Args:
        store: shared with the other gateways of the model.
        notify: hands a change to the workers that are there; returns their ids.
    """

    def __init__(
        self, store: SettingsStore | None, notify: Callable[[AdmissionChange], list[str]]
    ) -> None:
        self.change = AdmissionChange()
        """All that differs from the workers' flags; those that come are sent it."""
        self._store = store
        self._notify = notify
        self._lock = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None
        self._reachable = True

    async def set(self, change: AdmissionChange) -> list[str]:
        """Keeps a change, then notifies the workers; returns their ids.

        Raises:
            ApiError: 503, the change cannot be kept; no worker has been notified.
        """
        encode = msgspec.msgpack.encode
        values = {name: encode(value) for name, value in change.given.items()}
        async with self._lock:
            if self._store is not None:
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        await self._store.write(values)
                except Exception as error:
                    problem = f"nothing is changed, the change could not be kept: {error!r}"
                    raise ApiError(503, problem, retry_after_s=1) from error
            self.change = self.change.then(change)
            return self._notify(change)

    async def start(self) -> None:
        """Takes over what was changed before; from now on follows the other gateways."""
        if self._store is not None:
            await self._read(self._store)
            self._follower = asyncio.create_task(self._follow(self._store))

    async def close(self) -> None:
        """Follows no more."""
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
                if self._reachable:  # said once, not with each further try
                    logger.warning("rules of admission stay as they are: %r", error)
                self._reachable = False
                return
            self._reachable = True
            known = self.change
            for name, value in values.items():
                # What another release has left there is not for this one.
                with contextlib.suppress(ValueError):
                    rule = {name: msgspec.msgpack.decode(value)}
                    known = known.then(AdmissionChange(rule))
            before, self.change = self.change.given, known
            if news := {n: v for n, v in known.given.items() if before.get(n) != v}:
                self._notify(AdmissionChange(news))
