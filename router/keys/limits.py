"""KeyLimits: counts the use of API keys against their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.errors import ApiError, rate_limited
from router.keys.entry import KeyEntry

MINUTE_S = 60.0


class KeyLimits:
    """The use of all keys at one gateway, on its event loop.

    Each of n gateways counts its own requests against 1/n of a limit, without communication:
    requests are spread evenly over gateways, so the limit holds for all of them together.

    Args:
        num_gateways: number of gateways.
    """

    def __init__(self, num_gateways: int = 1) -> None:
        self._num_gateways = num_gateways
        self._uses: dict[str, KeyUse] = {}

    def of(self, entry: KeyEntry) -> KeyUse:
        """The use of a key, which is found by its name, also after its limits or digests
        changed."""
        use = self._uses.get(entry.name)
        if use is None:
            use = self._uses[entry.name] = KeyUse(entry, self._num_gateways)
        elif use.entry is not entry:
            use.change(entry)
        return use

    def keep(self, entries: Sequence[KeyEntry]) -> None:
        """Forgets the use of keys that are not among `entries`; open requests are not affected."""
        names = {entry.name for entry in entries}
        for name in self._uses.keys() - names:
            del self._uses[name]


class KeyUse:
    """Use of one key: open requests, and token buckets for requests and tokens per minute.

    A request is admitted while the bucket of tokens is not empty, and its tokens are taken when
    they are known. So the bucket may go below zero, and later requests wait until it is refilled.

    Args:
        entry: the key.
        num_gateways: number of gateways.
    """

    __slots__ = ("_part", "entry", "num_open", "requests", "tokens")

    def __init__(self, entry: KeyEntry, num_gateways: int = 1) -> None:
        self._part = 1.0 / num_gateways
        """Fraction of the limits that this gateway may use."""
        self.num_open = 0
        """Number of open requests."""
        self.requests = Bucket()
        self.tokens = Bucket()
        self.change(entry)

    def change(self, entry: KeyEntry) -> None:
        """Replaces the limits by those of `entry`."""
        self.entry = entry
        self.requests.per_minute = entry.requests_per_minute * self._part
        self.tokens.per_minute = entry.tokens_per_minute * self._part

    @property
    def max_open(self) -> int:
        """Most requests that may be open at this gateway; 0 for no limit."""
        return math.ceil(self.entry.max_concurrent_requests * self._part)

    def begin(self, now: float) -> ApiError | None:
        """Counts a request, which must be followed by `end`.

        Returns:
            The error (429) of a request that reaches a limit, which is not counted; else None.
        """
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
        """Ends a request that `begin` has counted."""
        self.num_open -= 1
        assert self.num_open >= 0

    def spend(self, num_tokens: int, now: float) -> None:
        """Takes tokens of a request from the bucket, which may go below zero."""
        self.tokens.take(num_tokens, now)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit headers; numbers are estimates for all gateways."""
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
    """A token bucket that is refilled at a rate per minute; a rate of 0 is no limit."""

    __slots__ = ("_at", "_left", "_per_minute")

    def __init__(self) -> None:
        self._per_minute = 0.0
        self._left = 0.0
        self._at = -math.inf

    @property
    def capacity(self) -> float:
        """Size of the bucket: what is refilled in a minute, at least 1."""
        return max(1.0, self._per_minute)

    @property
    def per_minute(self) -> float:
        """Rate of refilling, per minute."""
        return self._per_minute

    @per_minute.setter
    def per_minute(self, rate: float) -> None:
        if rate and not self._per_minute:
            self._at = -math.inf  # a limit begins full
        self._per_minute = rate

    def left(self, now: float) -> float:
        """Content of the bucket; may be below 0."""
        grown = self._left + (now - self._at) * self._per_minute / MINUTE_S
        return min(self.capacity, grown)

    def take(self, amount: float, now: float) -> None:
        """Takes an amount, whatever is left."""
        if self._per_minute:
            self._left = self.left(now) - amount
            self._at = now

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until the content is at least `least`, and above 0."""
        if not self._per_minute:
            return 0.0
        left = self.left(now)
        if left >= least and left > 0.0:
            return 0.0
        return max(1e-9, (least - left) * MINUTE_S / self._per_minute)
