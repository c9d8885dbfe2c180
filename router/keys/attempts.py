"""FailedAttempts: slows down clients that try keys."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict

BURST = 10
"""Failed attempts of a source that are answered at once: a client with a wrong key retries a few
times, and its user should see the error."""
PAUSE_S = 1.0
"""Seconds between the answers to further failed attempts of a source."""
MAX_WAIT_S = 10.0
"""Maximum seconds that an answer is delayed. A source has at most MAX_WAIT_S / PAUSE_S of them."""
MAX_SOURCES = 4096
"""Sources that are remembered, the most recent ones: 1 MiB."""
_IPV6_NETWORK = 64
"""Bits of an IPv6 address that a provider gives to one customer (RFC 6177)."""


class FailedAttempts:
    """Delays of answers to requests with an invalid key, by source address.

    Requests with a valid key are never delayed, whatever others at the same address do.
    """

    def __init__(self) -> None:
        self._next: OrderedDict[str, float] = OrderedDict()
        """Time from which on a source's next failed attempt is answered, by source."""

    def delay_s(self, address: str, now: float) -> float | None:
        """Seconds by which to delay the answer to a failed attempt; None to reject it as one too
        many.

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
