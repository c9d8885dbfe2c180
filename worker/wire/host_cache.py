"""What the host-memory tier of a worker's prefix cache has done."""

from __future__ import annotations

from typing import Literal

import msgspec

HostCachePolicy = Literal["auto", "always"]
"""When pages in host memory are copied back: where that is quicker than computing them, always."""


class HostCacheTotals(msgspec.Struct, array_like=True):
    """Pages that left the device for host memory, and what became of them; since the epoch began.

    A page is stored at most once for each time it leaves the device, and is in one of the two
    tiers at a time.
    """

    num_pages: int = 0
    """Pages that the host has room for."""
    num_used: int = 0
    """Pages of the host in use."""
    num_stored: int = 0
    """Pages copied from the device."""
    num_loaded: int = 0
    """Pages copied back, for a request that needed them."""
    num_evicted: int = 0
    """Pages that left the host without being needed again."""
    num_recomputed: int = 0
    """Pages computed again though the host had them: that was quicker, or a request drew the same
    tokens as another."""
    num_resumed_tokens: int = 0
    """Tokens computed for requests that were preempted, when they were."""
    num_resumed_cached_tokens: int = 0
    """Tokens of such requests found on the device when they came again."""
    num_resumed_loaded_tokens: int = 0
    """Tokens of such requests copied back."""
    load_s: float = 0.0
    """Seconds that the copies back took."""
