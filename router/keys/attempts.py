"""FailedAttempts: slows down clients that guess API keys."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict

BURST = 10
"""Failed attempts per source that get an immediate response: a client with a wrong key retries a
few times, and its user should see the error."""
PAUSE_S = 1.0
"""Seconds between responses to further failed attempts of a source."""
MAX_WAIT_S = 10.0
"""Maximum delay of a response in seconds. A source has at most MAX_WAIT_S / PAUSE_S pending
responses."""
MAX_SOURCES = 4096
"""Maximum number of tracked sources, which take 1 MiB in total; the oldest are dropped first."""
_IPV6_NETWORK = 64
"""Number of leading bits of an IPv6 address that identify a provider's customer (RFC 6177)."""


class FailedAttempts:
    """Delays responses to requests with an invalid key, by source address.

    Requests with a valid key are never delayed, regardless of other clients at the same address.
    """

    def __init__(self) -> None:
        self._next: OrderedDict[str, float] = OrderedDict()
        """Time of the response to the next failed attempt, by source."""

    def delay_s(self, address: str, now: float) -> float | None:
        """Seconds by which to delay the response to a failed attempt; None to reject it because too
        many are pending.

        Args:
            address: IP address of the client.
            now: monotonic time in seconds.
        """
        source = _source_of(address)
        slot = max(self._next.get(source, -math.inf), now - BURST * PAUSE_S) + PAUSE_S
        wait = max(0.0, slot - now)
        if wait > MAX_WAIT_S:
            return None
        self._next[source] = slot
        self._next.move_to_end(source)
        if len(self._next) > MAX_SOURCES:
            self._next.popitem(last=False)
        return wait


def _source_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, _IPV6_NETWORK), strict=False))
