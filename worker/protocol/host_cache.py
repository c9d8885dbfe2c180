"""Host-memory tier of a worker's prefix cache: its policy and totals."""

from __future__ import annotations

from typing import Literal

import msgspec

HostCachePolicy = Literal["auto", "always"]
"""Policy of copying pages back from host memory: where that is quicker than computing them (auto),
or always."""


class HostCacheTotals(msgspec.Struct, array_like=True):
    """Totals of the host-memory tier since the epoch began.

    A page is in one of the two tiers at a time, and is stored once whenever it leaves the device.
    """

    num_pages: int = 0
    """Pages that the tier has room for."""
    num_used: int = 0
    """Pages in the tier at present."""
    num_stored: int = 0
    """Pages copied from the device."""
    num_loaded: int = 0
    """Pages copied back, for a request that needed them."""
    num_evicted: int = 0
    """Pages that left the tier without having been needed again."""
    num_recomputed: int = 0
    """Pages computed again though the tier had them: that was quicker, or a request drew the same
    tokens as another."""
    num_resumed_tokens: int = 0
    """Tokens that preempted requests had computed, counted when they are admitted again."""
    num_resumed_cached_tokens: int = 0
    """Tokens of `num_resumed_tokens` that were found on the device."""
    num_resumed_loaded_tokens: int = 0
    """Tokens of preempted requests that were copied back when they were admitted again."""
    load_s: float = 0.0
    """Seconds of the copies back to the device."""
