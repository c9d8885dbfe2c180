"""Host-memory tier of a worker's prefix cache: policy and totals."""

from __future__ import annotations

from typing import Literal

import msgspec

HostCachePolicy = Literal["auto", "always"]
"""When to copy pages back from host memory: only if it is faster than recomputing them (auto), or
always."""


class HostCacheTotals(msgspec.Struct, array_like=True):
    """Totals of the host-memory tier since the epoch began.

    A page is either on the device or in this tier, never in both, and is copied to the tier each
    time it is evicted from the device.
    """

    num_pages: int = 0
    """Capacity of the tier in pages."""
    num_used: int = 0
    """Number of pages currently in the tier."""
    num_stored: int = 0
    """Number of pages copied from the device."""
    num_loaded: int = 0
    """Number of pages copied back to the device for requests."""
    num_evicted: int = 0
    """Number of pages evicted from the tier without having been reused."""
    num_recomputed: int = 0
    """Number of pages recomputed although they were in the tier, because that was faster, or
    because a request generated the page's tokens."""
    num_resumed_tokens: int = 0
    """Number of computed tokens of preempted requests, counted when they are readmitted."""
    num_resumed_cached_tokens: int = 0
    """Number of the tokens in `num_resumed_tokens` that were still on the device."""
    num_resumed_loaded_tokens: int = 0
    """Number of the tokens in `num_resumed_tokens` that were copied back from the host."""
    load_s: float = 0.0
    """Total time of copies back to the device, in seconds."""
    num_hit_tokens: int = 0
    """Number of cached tokens that were copied back from the host for requests."""
