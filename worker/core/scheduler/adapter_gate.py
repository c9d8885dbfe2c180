"""AdapterGate: holds requests until their LoRA adapter has a slot on the device."""

from __future__ import annotations

from collections.abc import Iterator

from worker.core.adapters import Adapter, AdapterPool, HostCopy
from worker.core.request import Request
from worker.protocol.adapters import AdapterTotals

TURN_S = 0.5
"""Time, in seconds, that an adapter in host memory waits for a slot before new requests for one of
the adapters on the device have to wait, so that its slot becomes free. Requests usually run longer
than this, so it adds little to the time until a slot is free."""


class AdapterGate:
    """Holds requests back until their adapter has a slot, so that they do not delay other requests.

    A request locks the slot from the time it enters the queue until it ends. All waiting adapters
    are read into host memory in the order of their first requests, while there is room. Slots go
    to adapters by the priority of their requests, then in the same order.

    Args:
        pool: copies and slots of the adapters.
    """

    def __init__(self, pool: AdapterPool) -> None:
        self.pool = pool
        self.num_tokens = 0
        """Total number of tokens in waiting requests."""
        self._waiting: dict[int, dict[str, Request]] = {}
        """Waiting requests by adapter key and request id, in order of arrival."""
        self._urgency: dict[int, int] = {}
        """Highest priority of the requests that have waited for an adapter, by key."""
        self._waits_since: dict[int, float] = {}
        """Time at which each adapter in host memory started to wait for a slot, by key."""
        self._draining: dict[int, Adapter] = {}
        """Adapters on the device whose further requests have to wait, by the key of the adapter
        that waits for their slot."""

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    @property
    def is_reading(self) -> bool:
        """Whether any requests are waiting for an adapter to be read."""
        adapters = map(self.pool.of_key, self._waiting)
        return any(a is not None and a.host is HostCopy.READING for a in adapters)

    def enter(self, request: Request) -> bool:
        """Admits a request to the queue if its adapter has a slot; otherwise the request waits.

        Returns:
            Whether the request may be queued.
        """
        if request.adapter_ref is None:
            return True
        adapter = request.adapter = self.pool.find(request.adapter_ref)
        if adapter.slot and not self._is_draining(adapter):
            self.pool.use(adapter)
            return True
        adapter.num_waiting += 1
        self.num_tokens += len(request.token_ids)
        self._waiting.setdefault(adapter.key, {})[request.request_id] = request
        urgency = self._urgency.get(adapter.key, 0)
        self._urgency[adapter.key] = max(urgency, request.priority)
        return False

    def leave(self, request: Request, fence: int = 0) -> None:
        """Records that a request has ended or is held, so that it neither waits for its adapter nor
        uses it.

        Args:
            request: a request with an adapter that has entered.
            fence: last step with a row of the request; 0 if there is none.
        """
        adapter, request.adapter = request.adapter, None
        assert adapter is not None, "the request has not entered"
        waiting = self._waiting.get(adapter.key)
        if waiting is None or waiting.pop(request.request_id, None) is None:
            self.pool.release(adapter, fence)
            return
        self.num_tokens -= len(request.token_ids)
        if not waiting:
            self._stop_waiting(adapter.key)
        self.pool.forget_waiter(adapter)

    def open(self, now: float) -> list[Request]:
        """Starts reads, gives slots to waiting adapters, and returns the requests to be queued;
        `now` is the time on the scheduler's clock, in seconds."""
        opened: list[Request] = []
        has_room = has_slots = True
        for adapter in self._in_order():
            if self._is_draining(adapter):
                continue
            if not adapter.slot:
                has_room = has_room and self.pool.read(adapter)
                if adapter.host is not HostCopy.PRESENT:
                    continue
                has_slots = has_slots and self.pool.take_slot(adapter)
            if adapter.slot:
                opened += self._admit(adapter)
            else:
                self._drain_for(adapter, now)
        return opened

    def load(self) -> AdapterTotals:
        """Totals for a load report, with the adapters that are on the device and in host memory."""
        return self.pool.load(self.num_waiting)

    def check_invariants(self) -> None:
        """Asserts that the counts match the waiting requests."""
        self.pool.check_invariants()
        waits = [request for waiting in self._waiting.values() for request in waiting.values()]
        assert self.num_tokens == sum(len(request.token_ids) for request in waits)
        for key, waiting in self._waiting.items():
            adapter = self.pool.of_key(key)
            assert adapter is not None, "an adapter with waiting requests is forgotten"
            assert adapter.num_waiting == len(waiting) > 0, "waiting requests miscounted"
        assert self._draining.keys() <= self._waits_since.keys() <= self._waiting.keys()

    def _in_order(self) -> Iterator[Adapter]:
        """Adapters with waiting requests, most urgent first."""
        for key in sorted(self._waiting, key=lambda key: -self._urgency[key]):
            adapter = self.pool.of_key(key)
            assert adapter is not None, "an adapter with waiting requests is known"
            yield adapter

    def _is_draining(self, adapter: Adapter) -> bool:
        return any(holder is adapter for holder in self._draining.values())

    def _drain_for(self, adapter: Adapter, now: float) -> None:
        """Makes room for an adapter that has waited for at least TURN_S: further requests for
        another adapter have to wait, so that its slot becomes free."""
        since = self._waits_since.setdefault(adapter.key, now)
        if adapter.key in self._draining or now - since < TURN_S:
            return
        others = [holder for holder in self.pool.on_device() if not self._is_draining(holder)]
        if others:
            self._draining[adapter.key] = min(others, key=lambda a: (a.num_users, a.used))

    def _admit(self, adapter: Adapter) -> list[Request]:
        """Admits all requests that are waiting for an adapter that has a slot, and returns them."""
        requests = list(self._waiting[adapter.key].values())
        self._stop_waiting(adapter.key)
        for request in requests:
            self.num_tokens -= len(request.token_ids)
            self.pool.use(adapter)
            self.pool.forget_waiter(adapter)
        return requests

    def _stop_waiting(self, key: int) -> None:
        del self._waiting[key], self._urgency[key]
        self._waits_since.pop(key, None)
        self._draining.pop(key, None)
