"""KeyLimits: enforces the limits of API keys across all gateways."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence

import msgspec

from router.keys.counters import KeyAnswer, KeyCounters, KeyReport
from router.keys.entry import KeyEntry
from router.keys.use import KeyUse
from router.peers import Peers
from worker.protocol.analyzed import analyzed

METHOD = "keys"
TIMEOUT_S = 1.0
"""Timeout in seconds of a call to an owner; calls take 1 to 5 ms. A gateway that is blocked for
longer than the timeout does not serve clients either."""
SUSPECT_S = 5.0
"""Seconds for which an unresponsive gateway owns no keys. By then, Serve has replaced a failed
gateway, and a slow one has recovered."""


class _Reports(msgspec.Struct, frozen=True, array_like=True):
    """Reports of one gateway to one owner."""

    gateway_id: str
    reports: list[KeyReport]


class KeyLimits:
    """The usage of all keys, on the event loop of one gateway.

    Each key is owned by one gateway, chosen by rendezvous hashing, which counts and admits all
    requests of the key. Other gateways report the starts, ends and tokens of their requests to the
    owner, with one call at a time for all keys. Limits are therefore exact while the set of
    gateways is stable.

    When the set changes, or an owner does not respond within TIMEOUT_S, another gateway becomes the
    owner. Every gateway then reports to the new owner its open requests, and the remaining limits
    from the previous owner's last response. Requests of an exited gateway no longer count. While
    gateways see different sets, for about 100 ms, a key may have two owners, each of which admits
    up to the remaining limit.

    Args:
        peers: the gateways of the fleet; None for a single one.
        clock: time in seconds.
    """

    def __init__(
        self, peers: Peers | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peers = peers or Peers("single")
        self._clock = clock
        self._uses: dict[str, KeyUse] = {}
        self._counters: dict[str, KeyCounters] = {}
        """Counters of keys that this gateway owns or has owned."""
        self._lanes: dict[str, _Lane] = {}
        """Senders of usage reports, by owner."""
        self._suspects: set[str] = set()
        """Gateways that did not respond within the last SUSPECT_S."""
        self._peers.handle_call(METHOD, self._handle)
        self._peers.on_change(self._on_change)

    def of(self, entry: KeyEntry) -> KeyUse:
        """Usage of a key on this gateway, looked up by name, so that it survives changes to its
        limits or digests."""
        use = self._uses.get(entry.name)
        if use is None:
            use = KeyUse(entry, self._settle, lambda: len(self._peers.ids) > 1, self._clock)
            use.owner = self._owner_of(entry.name)
            self._uses[entry.name] = use
        elif use.entry is not entry:
            use.change(entry)
        return use

    def keep(self, entries: Sequence[KeyEntry]) -> None:
        """Removes all keys except those in `entries`; open requests are not affected."""
        names = {entry.name for entry in entries}
        for name in self._uses.keys() - names:
            del self._uses[name]
        for name in self._counters.keys() - names:
            del self._counters[name]

    def _owner_of(self, name: str) -> str:
        candidates = self._peers.ids - self._suspects or {self._peers.own_id}
        return max(candidates, key=lambda peer: _weight(name, peer))

    def _settle(self, use: KeyUse) -> None:
        """Reports a key's usage: directly if this gateway owns the key, otherwise in the next call
        to the owner."""
        if self._uses.get(use.entry.name) is not use:
            return  # the key was removed while the request was open
        if use.owner != self._peers.own_id:
            if use.owner not in self._lanes:
                self._lanes[use.owner] = _Lane(use.owner, self)
            self._lanes[use.owner].add(use)
            return
        report, waiting = use.report(self._handover(use))
        use.take(use.owner, self._take(self._peers.own_id, report), waiting)

    async def deliver(self, owner: str, uses: Sequence[KeyUse]) -> None:
        """Reports the usage of several keys to their owner in one call."""
        sent = [(use, *use.report(self._handover(use))) for use in uses]
        reports = _Reports(self._peers.own_id, [report for _, report, _ in sent])
        try:
            async with asyncio.timeout(TIMEOUT_S):
                encoded = await self._peers.call(owner, METHOD, msgspec.msgpack.encode(reports))
        except (ConnectionError, TimeoutError):
            for use, report, waiting in sent:
                use.restore(report, waiting)
            self._suspect(owner)
            for use in uses:
                self._settle(use)
            return
        answers = msgspec.msgpack.decode(encoded, type=analyzed(list[KeyAnswer]))
        for (use, _, waiting), answer in zip(sent, answers, strict=True):
            use.take(owner, answer, waiting)
            is_gone = any(request.cancelled() for request in waiting)
            if is_gone or use.owner != owner:
                self._settle(use)

    def _handover(self, use: KeyUse) -> tuple[float, float] | None:
        """Estimate of the requests and tokens left, for a new owner; None if there is no estimate,
        or if the owner is unchanged."""
        if use.owner == use.reported_to:
            return None
        counters = self._counters.get(use.entry.name)
        known = [use.left()] if use.reported_to else []
        if counters is not None:
            known.append(counters.left(self._clock()))
        return (min(k[0] for k in known), min(k[1] for k in known)) if known else None

    def _take(self, gateway_id: str, report: KeyReport) -> KeyAnswer:
        counters = self._counters.get(report.name)
        if counters is None:
            counters = self._counters[report.name] = KeyCounters(report.limits)
        return counters.take(gateway_id, report, self._clock())

    async def _handle(self, payload: bytes) -> bytes:
        """Handles the reports of another gateway."""
        reports = msgspec.msgpack.decode(payload, type=analyzed(_Reports))
        answers = [self._take(reports.gateway_id, report) for report in reports.reports]
        return msgspec.msgpack.encode(answers)

    def _suspect(self, peer: str) -> None:
        self._suspects.add(peer)
        asyncio.get_running_loop().call_later(SUSPECT_S, self._trust, peer)
        self._reassign()

    def _trust(self, peer: str) -> None:
        self._suspects.discard(peer)
        self._reassign()

    def _on_change(self) -> None:
        for counters in self._counters.values():
            for gateway_id in counters.num_open.keys() - self._peers.ids:
                del counters.num_open[gateway_id]
        self._reassign()

    def _reassign(self) -> None:
        """Recomputes the owners of all keys, and reports to the new ones."""
        for name, counters in list(self._counters.items()):
            if name not in self._uses:  # no request of the key has arrived here, only reports
                self.of(_entry_of(name, counters))
        for name, use in list(self._uses.items()):
            owner = self._owner_of(name)
            if owner != use.owner or use.num_open:
                use.owner = owner
                if use.is_limited:
                    self._settle(use)


class _Lane:
    """Reports to one owner. One call is in flight at a time, so that they arrive in order."""

    def __init__(self, owner: str, limits: KeyLimits) -> None:
        self._owner = owner
        self._limits = limits
        self._uses: dict[str, KeyUse] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, use: KeyUse) -> None:
        """Adds a key's usage to the next call."""
        self._uses[use.entry.name] = use
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._uses:
            uses, self._uses = list(self._uses.values()), {}
            await self._limits.deliver(self._owner, uses)


def _weight(name: str, peer: str) -> bytes:
    return hashlib.blake2b(f"{peer}/{name}".encode(), digest_size=8).digest()


def _entry_of(name: str, counters: KeyCounters) -> KeyEntry:
    """A placeholder entry with the limits of a key, until a request with the key replaces it."""
    limits = counters.limits
    return KeyEntry(
        name=name,
        digests=(),
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        max_concurrent_requests=limits.max_concurrent_requests,
    )
