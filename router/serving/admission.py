"""AdmissionRules: changes to the workers' admission rules by an operator, shared by all
gateways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from router.serving.settings import SettingsStore, SharedSettings
from worker.protocol.admission import AdmissionChange


class AdmissionRules:
    """Changes to the workers' admission rules, which this gateway sends to its workers.

    The store is authoritative. It has one value per rule, so that concurrent changes to different
    rules at several gateways do not undo each other.

    Args:
        store: store of the model's gateways; None if this gateway is the only one.
        notify: sends a change to all attached workers; returns their ids.
    """

    def __init__(
        self, store: SettingsStore | None, notify: Callable[[AdmissionChange], list[str]]
    ) -> None:
        self.change = AdmissionChange()
        """All rules that an operator has changed; sent to each worker that attaches."""
        self._notify = notify
        self._shared = SharedSettings(store, "admission rules", self._apply)

    async def set(self, change: AdmissionChange) -> list[str]:
        """Stores a change, then sends it to the workers; returns their ids.

        Raises:
            ApiError: 503 if the change could not be stored; then no worker receives it.
        """
        encode = msgspec.msgpack.encode
        values = {name: encode(value) for name, value in change.given.items()}
        async with self._shared.lock:
            if (store := self._shared.store) is not None:
                await self._shared.changed(store.write(values))
            self.change = self.change.then(change)
            return self._notify(change)

    async def start(self) -> None:
        """Reads the stored changes, and applies other gateways' changes until `close`."""
        await self._shared.start()

    async def close(self) -> None:
        """Stops applying other gateways' changes."""
        await self._shared.close()

    def _apply(self, values: dict[str, bytes]) -> None:
        known = self.change
        for name, value in values.items():
            # Values stored by another release may be unknown to this one.
            with contextlib.suppress(ValueError):
                rule = {name: msgspec.msgpack.decode(value)}
                known = known.then(AdmissionChange(rule))
        before, self.change = self.change.given, known
        if news := {n: v for n, v in known.given.items() if before.get(n) != v}:
            self._notify(AdmissionChange(news))
