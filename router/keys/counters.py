"""KeyCounters: usage of one API key across all gateways, on the gateway that owns the key."""

from __future__ import annotations

import math

import msgspec

from router.keys.bucket import Bucket
from router.keys.entry import KeyEntry


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of a key; 0 means no limit."""

    requests_per_minute: float
    tokens_per_minute: float
    max_concurrent_requests: int

    @classmethod
    def of(cls, entry: KeyEntry) -> Limits:
        """The limits in a key's entry."""
        return cls(
            entry.requests_per_minute, entry.tokens_per_minute, entry.max_concurrent_requests
        )


class KeyReport(msgspec.Struct, frozen=True, array_like=True):
    """Usage of a key on one gateway, reported to the gateway that owns the key."""

    name: str
    limits: Limits
    num_open: int
    """Number of the gateway's open requests, all admitted by the owner."""
    num_begins: int
    """Number of the gateway's requests that wait to be admitted."""
    num_tokens: int
    """Tokens used since the last report."""
    left: tuple[float, float] | None = None
    """Requests and tokens left according to the last response that the gateway received, from which
    a new owner continues; None if the owner has newer values."""


class KeyAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The owning gateway's response to a KeyReport."""

    num_admitted: int
    """Number of waiting requests that are admitted; the oldest ones come first."""
    left: tuple[float, float]
    """Requests and tokens left in the token buckets."""
    message: str = ""
    """Reason why the other waiting requests are rejected."""
    retry_after_s: int = 0
    """Seconds after which the rejected requests may be admitted."""
    is_concurrency: bool = False
    """Whether the rejected requests exceed the limit on concurrent requests."""


class KeyCounters:
    """Open requests by gateway, and token buckets for requests and tokens per minute.

    A request is admitted while the token bucket is not empty, and its tokens are taken when their
    number is known. The bucket may therefore become negative; later requests wait for the refill.
    """

    __slots__ = ("limits", "num_open", "requests", "tokens")

    def __init__(self, limits: Limits) -> None:
        self.num_open: dict[str, int] = {}
        """Number of open requests by gateway."""
        self.requests = Bucket()
        self.tokens = Bucket()
        self.limits = limits

    def left(self, now: float) -> tuple[float, float]:
        """Requests and tokens left in the token buckets."""
        return self.requests.left(now), self.tokens.left(now)

    def take(self, gateway_id: str, report: KeyReport, now: float) -> KeyAnswer:
        """Records a gateway's report, and admits as many of its waiting requests as the limits
        allow; returns the response."""
        self.limits = limits = report.limits
        self.requests.per_minute = limits.requests_per_minute
        self.tokens.per_minute = limits.tokens_per_minute
        if report.left is not None:
            for bucket, left in zip((self.requests, self.tokens), report.left, strict=True):
                bucket.set(min(left, bucket.left(now)), now)
        self.tokens.take(report.num_tokens, now)
        self.num_open[gateway_id] = report.num_open
        for number in range(report.num_begins):
            answer = self._begin(gateway_id, number, now)
            if answer is not None:
                return answer
        return KeyAnswer(report.num_begins, self.left(now))

    def _begin(self, gateway_id: str, num_admitted: int, now: float) -> KeyAnswer | None:
        """Counts a request. If it exceeds a limit, returns the response that rejects it and the
        requests after it."""
        maximum = self.limits.max_concurrent_requests
        if maximum and sum(self.num_open.values()) >= maximum:
            message = f"this API key is limited to {maximum} concurrent request(s)"
            return KeyAnswer(num_admitted, self.left(now), message, 1, is_concurrency=True)
        for bucket, minimum, unit in (
            (self.requests, 1.0, "requests"),
            (self.tokens, 0.0, "tokens"),
        ):
            wait_s = bucket.wait_s(minimum, now)
            if wait_s > 0.0:
                message = f"this API key is limited to {bucket.per_minute:.0f} {unit} per minute"
                return KeyAnswer(num_admitted, self.left(now), message, max(1, math.ceil(wait_s)))
        self.requests.take(1.0, now)
        self.num_open[gateway_id] += 1
        return None
