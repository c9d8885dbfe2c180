"""KeyUse: usage of one API key on one gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.errors import rate_limited
from router.keys.bucket import MINUTE_S, Bucket
from router.keys.counters import KeyAnswer, KeyReport, Limits
from router.keys.entry import KeyEntry

ENDS_ARRIVE_S = 0.05
"""Seconds after which a request over the concurrency limit is retried if there are several
gateways: the end of a request on another gateway is reported within 1 to 5 ms on a loaded machine,
and a client may send its next request sooner."""

Waiting = asyncio.Future[KeyAnswer | None]
"""Future of a request that waits for admission. The result is None if the request is admitted,
otherwise the owner's response that rejects it."""


class KeyUse:
    """Open requests of a key on this gateway, and the last response of the gateway that owns the
    key (counts its requests).

    Args:
        entry: the key.
        settle: reports this usage to the owning gateway.
        has_peers: returns whether there are other gateways.
        clock: time in seconds.
    """

    def __init__(
        self,
        entry: KeyEntry,
        settle: Callable[[KeyUse], None],
        has_peers: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._settle = settle
        self._has_peers = has_peers
        self._clock = clock
        self.num_open = 0
        """Number of open requests."""
        self.owner = ""
        """Id of the gateway that counts the key's requests for all gateways."""
        self.reported_to = ""
        """Id of the owner that replied last."""
        self._waiting: list[Waiting] = []
        self._num_tokens = 0
        """Number of tokens used since the last report."""
        self._requests = Bucket()
        self._tokens = Bucket()
        self.change(entry)

    def change(self, entry: KeyEntry) -> None:
        """Replaces the key's permissions and limits with those of `entry`."""
        self.entry = entry
        self._limits = Limits.of(entry)
        self._requests.per_minute = entry.requests_per_minute
        self._tokens.per_minute = entry.tokens_per_minute

    @property
    def is_limited(self) -> bool:
        """Whether the key has any limit."""
        limits = self._limits
        return bool(
            limits.requests_per_minute or limits.tokens_per_minute or limits.max_concurrent_requests
        )

    async def begin_request(self) -> None:
        """Counts a request, which must be followed by `end_request`. If it exceeds a limit, raises
        ApiError (429) without counting it."""
        if not self.is_limited:
            self.num_open += 1
            return
        rejection = await self._request_admission()
        if rejection is not None and rejection.is_concurrency and self._has_peers():
            await asyncio.sleep(ENDS_ARRIVE_S)
            rejection = await self._request_admission()
        if rejection is not None:
            raise rate_limited(rejection.message, rejection.retry_after_s)

    def end_request(self) -> None:
        """Ends a request that `begin_request` has counted."""
        self.num_open -= 1
        assert self.num_open >= 0
        if self.is_limited:
            self._settle(self)

    def spend(self, num_tokens: int) -> None:
        """Takes tokens of a request from the bucket, which may become negative."""
        if self.is_limited:
            self._num_tokens += num_tokens
            self._tokens.take(num_tokens, self._clock())
            self._settle(self)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit headers, as of the owner's last response."""
        now = self._clock()
        headers: list[tuple[bytes, bytes]] = []
        for bucket, unit in ((self._requests, b"requests"), (self._tokens, b"tokens")):
            if bucket.per_minute:
                left = max(0.0, bucket.left(now))
                full_s = (bucket.capacity - left) * MINUTE_S / bucket.per_minute
                headers += [
                    (b"x-ratelimit-limit-" + unit, b"%d" % round(bucket.per_minute)),
                    (b"x-ratelimit-remaining-" + unit, b"%d" % int(left)),
                    (b"x-ratelimit-reset-" + unit, b"%.3fs" % max(0.0, full_s)),
                ]
        return headers

    def left(self) -> tuple[float, float]:
        """Requests and tokens left: those in the owner's last response, plus the refill since."""
        now = self._clock()
        return self._requests.left(now), self._tokens.left(now)

    def report(self, left: tuple[float, float] | None) -> tuple[KeyReport, list[Waiting]]:
        """The next report, and the requests in it that wait for the response."""
        waiting, self._waiting = self._waiting, []
        num_tokens, self._num_tokens = self._num_tokens, 0
        name, num_open = self.entry.name, self.num_open
        return KeyReport(name, self._limits, num_open, len(waiting), num_tokens, left), waiting

    def take(self, owner: str, answer: KeyAnswer, waiting: list[Waiting]) -> None:
        """Applies the owner's response to a report."""
        self.reported_to = owner
        now = self._clock()
        requests, tokens = answer.left
        self._requests.set(requests, now)
        self._tokens.set(tokens - self._num_tokens, now)
        for number, request in enumerate(waiting):
            if request.done():  # its client has disconnected: the next report does not count it
                continue
            is_admitted = number < answer.num_admitted
            self.num_open += is_admitted
            request.set_result(None if is_admitted else answer)

    def restore(self, report: KeyReport, waiting: list[Waiting]) -> None:
        """Restores the state before a report that was not delivered."""
        self._waiting = waiting + self._waiting
        self._num_tokens += report.num_tokens

    async def _request_admission(self) -> KeyAnswer | None:
        waiting: Waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._settle(self)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.result() is None:
                self.end_request()
            raise
