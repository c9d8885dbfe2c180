"""WorkingSets: tokens of the KV cache that live agent sessions need on one worker.

A session is a conversation that continues within seconds, such as a coding agent's. While it is
live (a request is in flight, or ended less than `live_s` ago), its context should stay in the
cache. Gateways and workers use the same class: a gateway for its own sessions, a worker for those
of all gateways.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec


class SessionUse(msgspec.Struct, array_like=True, frozen=True):
    """Context of a session, sent with each of its requests."""

    key: int
    """Id of the context. It is the same in all gateways if the client sends a session id."""
    tokens: int
    """Number of prompt tokens that no other session is known to share."""
    shared_key: int = 0
    """Block hash at the end of the prefix that other sessions share; 0 if there is none."""
    shared_tokens: int = 0
    """Number of tokens in the prefix that ends at `shared_key`."""
    live_s: float = 0.0
    """Seconds after the end of a request during which the session counts as live."""
    displaced: tuple[int, ...] = ()
    """Keys of contexts that are no longer part of the worker's working set, even if they have
    requests in flight."""


class _Held:
    """A context that is included in the working set."""

    __slots__ = ("live_until", "num_open", "use")

    def __init__(self, use: SessionUse) -> None:
        self.use = use
        self.num_open = 0
        """Number of requests in flight."""
        self.live_until = 0.0
        """Time until which the context counts without requests in flight."""


class WorkingSets:
    """Total size of the contexts of live sessions on one worker, in which each shared prefix counts
    once.

    Times are in seconds, on any monotonic clock.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Total number of tokens in all contexts that count."""
        self._held: dict[int, _Held] = {}
        self._shared: dict[int, tuple[int, int]] = {}
        """Number of contexts that share each prefix, and the prefix's number of tokens."""
        self._ends: list[tuple[float, int]] = []
        """Heap of (`live_until`, key); outdated entries are skipped."""

    def __len__(self) -> int:
        """Number of contexts that count."""
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        """Keys of the contexts that count."""
        return iter(self._held)

    def needed(self, use: SessionUse) -> int:
        """Number of tokens that `begin` would add: the growth of a context that already counts, or
        all tokens of a new one."""
        held = self._held.get(use.key)
        if held is not None:
            return max(use.tokens - held.use.tokens, 0)
        is_new = use.shared_key and use.shared_key not in self._shared
        return use.tokens + (use.shared_tokens if is_new else 0)

    def begin(self, use: SessionUse) -> None:
        """Adds a request in flight, and sets its context to `use`."""
        held = self._held.get(use.key)
        if held is None:
            held = self._held[use.key] = _Held(use)
        else:
            self._count(held.use, -1)
            held.use = use
        self._count(use, 1)
        held.num_open += 1

    def end(self, key: int, now: float) -> None:
        """Ends a request in flight. After the last one, the context stays live for `live_s`."""
        held = self._held.get(key)
        if held is None or not held.num_open:
            return
        held.num_open -= 1
        if not held.num_open:
            held.live_until = now + held.use.live_s
            heapq.heappush(self._ends, (held.live_until, key))

    def leave(self, key: int) -> None:
        """Removes a request in flight. After the last one, the context no longer counts."""
        held = self._held.get(key)
        if held is not None and held.num_open:
            held.num_open -= 1
            self.forget(key)

    def forget(self, key: int) -> None:
        """Removes a context unless it has requests in flight. Idempotent."""
        held = self._held.get(key)
        if held is not None and not held.num_open:
            del self._held[key]
            self._count(held.use, -1)

    def drop(self, key: int) -> int:
        """Removes a context even if it has requests in flight; returns the tokens that no longer
        count. Idempotent."""
        held = self._held.pop(key, None)
        if held is None:
            return 0
        before = self.tokens
        self._count(held.use, -1)
        return before - self.tokens

    def expire(self, now: float) -> None:
        """Removes contexts that are no longer live."""
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            held = self._held.get(key)
            if held is not None and held.live_until <= now:
                self.forget(key)

    def check_invariants(self) -> None:
        """Raises AssertionError if the sums differ from the contexts."""
        prefixes: dict[int, tuple[int, int]] = {}
        for held in self._held.values():
            if held.use.shared_key:
                number = prefixes.get(held.use.shared_key, (0, 0))[0]
                prefixes[held.use.shared_key] = number + 1, held.use.shared_tokens
        assert {k: n for k, (n, _) in prefixes.items()} == {
            k: n for k, (n, _) in self._shared.items()
        }
        shared = sum(tokens for _, tokens in self._shared.values())
        assert self.tokens == shared + sum(held.use.tokens for held in self._held.values())
        ends = {key for _, key in self._ends}
        assert all(held.num_open or key in ends for key, held in self._held.items())

    def _count(self, use: SessionUse, change: int) -> None:
        self.tokens += change * use.tokens
        if not use.shared_key:
            return
        number, tokens = self._shared.get(use.shared_key, (0, use.shared_tokens))
        if number + change == 0:
            del self._shared[use.shared_key]
            self.tokens -= tokens
            return
        if not number:
            self.tokens += tokens
        self._shared[use.shared_key] = number + change, tokens
