"""The use of each API key now, held against what it may use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.errors import ApiError, rate_limited
from router.keys.entry import KeyEntry

MINUTE_S = 60.0


class KeyLimits:
    """The use of all keys at one gateway. Belongs to the event loop.

    Requests spread evenly over gateways, so each counts its own against its part of a limit, and no
    two have to agree: a key's limit holds for all of them as far as they are asked evenly.

    Args:
        num_gateways: how many there are.
    """

    def __init__(self, num_gateways: int = 1) -> None:
        self._num_gateways = num_gateways
        self._uses: dict[str, KeyUse] = {}

    def of(self, entry: KeyEntry) -> KeyUse:
        """The use of a key; it continues where its limits or the key itself are exchanged."""
        use = self._uses.get(entry.name)
        if use is None:
            use = self._uses[entry.name] = KeyUse(entry, self._num_gateways)
        elif use.entry is not entry:
            use.change(entry)
        return use

    def keep(self, entries: Sequence[KeyEntry]) -> None:
        """Forgets keys that are no more; requests they have open end as they would."""
        names = {entry.name for entry in entries}
        for name in self._uses.keys() - names:
            del self._uses[name]


class KeyUse:
    """One key's requests and tokens.

    What is left of a rate grows evenly, up to what comes in a minute. A request is let in while
    something is left, and its tokens are taken off when they are known; so that may be less than
    none, and the next one waits until it is made up for.
    """

    __slots__ = ("_part", "entry", "num_open", "requests", "tokens")

    def __init__(self, entry: KeyEntry, num_gateways: int = 1) -> None:
        self._part = 1.0 / num_gateways
        self.num_open = 0
        self.requests = Bucket()
        self.tokens = Bucket()
        self.change(entry)

    def change(self, entry: KeyEntry) -> None:
        """Other limits hold from now on."""
        self.entry = entry
        self.requests.per_minute = entry.requests_per_minute * self._part
        self.tokens.per_minute = entry.tokens_per_minute * self._part

    @property
    def max_open(self) -> int:
        """Requests that it may have open here; 0 for any number."""
        return math.ceil(self.entry.max_concurrent_requests * self._part)

    def begin(self, now: float) -> ApiError | None:
        """Counts a request, which `end` is to follow; or why it has to wait, and is not counted."""
        if self.max_open and self.num_open >= self.max_open:
            most = self.entry.max_concurrent_requests
            return rate_limited(f"this API key may have {most} request(s) open at a time", 1)
        for bucket, least, unit in ((self.requests, 1.0, "requests"), (self.tokens, 0.0, "tokens")):
            wait_s = bucket.wait_s(least, now)
            if wait_s > 0.0:
                limit = bucket.per_minute / self._part
                message = f"this API key may use {limit:.0f} {unit} per minute"
                return rate_limited(message, max(1, math.ceil(wait_s)))
        self.requests.take(1.0, now)
        self.num_open += 1
        return None

    def end(self) -> None:
        """A request that was begun has ended, however."""
        self.num_open -= 1
        assert self.num_open >= 0

    def spend(self, num_tokens: int, now: float) -> None:
        """Takes tokens of a request off, which it may owe."""
        self.tokens.take(num_tokens, now)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Headers that tell what is left, under OpenAI's names; of all gateways, as far as this one
        knows."""
        headers: list[tuple[bytes, bytes]] = []
        for bucket, unit in ((self.requests, b"requests"), (self.tokens, b"tokens")):
            if bucket.per_minute:
                left = max(0.0, bucket.left(now))
                full_s = (bucket.capacity - left) * MINUTE_S / bucket.per_minute
                headers += [
                    (b"x-ratelimit-limit-" + unit, b"%d" % round(bucket.per_minute / self._part)),
                    (b"x-ratelimit-remaining-" + unit, b"%d" % int(left / self._part)),
                    (b"x-ratelimit-reset-" + unit, b"%.3fs" % max(0.0, full_s)),
                ]
        return headers


class Bucket:
    """A token bucket: what is left of a rate per minute; 0 for a rate without end."""

    __slots__ = ("_at", "_left", "_per_minute")

    def __init__(self) -> None:
        self._per_minute = 0.0
        self._left = 0.0
        self._at = -math.inf

    @property
    def capacity(self) -> float:
        """Most that may be left: what comes in a minute, and one where that is less."""
        return max(1.0, self._per_minute)

    @property
    def per_minute(self) -> float:
        """The rate."""
        return self._per_minute

    @per_minute.setter
    def per_minute(self, rate: float) -> None:
        if rate and not self._per_minute:
            self._at = -math.inf  # a limit begins full
        self._per_minute = rate

    def left(self, now: float) -> float:
        """May be below 0."""
        grown = self._left + (now - self._at) * self._per_minute / MINUTE_S
        return min(self.capacity, grown)

    def take(self, amount: float, now: float) -> None:
        """Takes it off, whatever is left."""
        if self._per_minute:
            self._left = self.left(now) - amount
            self._at = now

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until there is `least` left, and more than nothing."""
        if not self._per_minute:
            return 0.0
        left = self.left(now)
        if left >= least and left > 0.0:
            return 0.0
        return max(1e-9, (least - left) * MINUTE_S / self._per_minute)
