"""HitFinder: prefix cache hits of a prompt on each worker, including blocks in flight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.fleet.blocks import BlockKey, PromptBlocks
from router.fleet.in_flight import InFlight
from router.fleet.index import PrefixIndex
from router.fleet.other_gateways import OtherGatewaysPrompts
from router.fleet.request import RequestView
from router.fleet.workers import Floats, grown

Rows = NDArray[np.intp]

_MAX_KNOWN = 4096
"""Maximum number of worker sets for which `_Holders` are cached."""


class _Holders(NamedTuple):
    """Rows of the workers that have a block."""

    any: Rows
    """Rows of workers that have the block in any tier."""
    device: Rows | None
    """Rows of workers that have the block on the device; None if they are the same as `any`."""


class HitFinder:
    """Finds hits in the index of cached blocks and in the trees of prompts in flight.

    Args:
        index: blocks that workers have cached.
        in_flight: this gateway's prompts in flight, whose blocks workers will cache.
        others: other gateways' prompts in flight, whose blocks workers will cache.
    """

    def __init__(
        self, index: PrefixIndex, in_flight: InFlight, others: OtherGatewaysPrompts
    ) -> None:
        self._index = index
        self._in_flight = in_flight
        self._others = others
        self._slot_rows: Rows = np.zeros(0, np.intp)
        """Row of each worker in the WorkerTable, by slot of the index."""
        # Sets of workers recur; their bits are converted to rows once.
        self._holders: dict[int, _Holders] = {}

    def placed(self, slot: int, row: int) -> None:
        """Records that a slot of the index now belongs to the cache of the worker in `row`."""
        if slot >= len(self._slot_rows):
            self._slot_rows = grown(self._slot_rows, max(2 * len(self._slot_rows), slot + 1))
        self._slot_rows[slot] = row
        self._holders.clear()

    def view(
        self, prompt: PromptBlocks, keys: Sequence[BlockKey], eligible: NDArray[np.bool_]
    ) -> RequestView:
        """The prompt as seen by policies.

        Args:
            keys: distinct block-hash parameters of the ready workers.
            eligible: workers that may be chosen, per row.
        """
        cached, on_device, flying, best = self._found(prompt, keys, len(eligible))
        hits = cached
        if flying is not None:
            hits = np.maximum(cached, flying)
            if on_device is not None:
                np.maximum(on_device, flying, out=on_device)
        # One token is always computed, to sample the next one.
        limit = max(prompt.num_tokens - 1, 0)
        host_hits = coming = None
        if best > limit:
            best = limit
            hits, cached = np.minimum(hits, limit), np.minimum(cached, limit)
        if on_device is not None:
            host_hits = np.maximum(hits - on_device, 0.0)
        if flying is not None:
            coming = hits - cached
        hashes = prompt.hashes(keys[0]) if keys else np.zeros(0, np.uint64)
        page_size = keys[0].page_size if keys else 1
        num_shared = best // page_size
        return RequestView(
            num_tokens=prompt.num_tokens,
            eligible=eligible,
            hit_tokens=hits,
            host_hit_tokens=host_hits,
            coming_tokens=coming,
            best_hit=best,
            hashes=hashes,
            page_size=page_size,
            session=prompt.session,
            shared_block=hashes.item(num_shared - 1) if num_shared else 0,
        )

    def _found(
        self, prompt: PromptBlocks, keys: Sequence[BlockKey], size: int
    ) -> tuple[Floats, Floats | None, Floats | None, int]:
        """Number of leading prompt tokens that each of `size` workers has or will have.

        Returns:
            Three arrays with one entry per row, and a number: tokens in any tier of the worker's
            cache; tokens on its device (None if they are the same); tokens that prompts in flight
            compute or use (None if there are none on any worker); and the maximum of all, including
            workers that are not eligible.
        """
        hits = np.zeros(size)
        on_device: Floats | None = None
        flying: Floats | None = None
        best = 0
        for key in keys:
            hashes = prompt.hashes(key)
            page = key.page_size
            longest = 0
            for mask, length in self._index.match(hashes):
                holders = self._holders_of(mask)
                if on_device is not None or holders.device is not None:
                    if on_device is None:
                        on_device = hits.copy()
                    device = holders.any if holders.device is None else holders.device
                    on_device[device] = length * page
                hits[holders.any] = length * page
                longest = length
            if prefixes := self._in_flight.match(hashes):
                if flying is None:
                    flying = np.zeros(size)
                longest = max(longest, prefixes[-1][1])
                for bits, length in prefixes:  # longer prefixes have fewer rows and follow
                    flying[_rows_of(bits)] = length * page
            if self._others.has_prompts and (prefixes := self._others.match(hashes)):
                if flying is None:
                    flying = np.zeros(size)
                longest = max(longest, prefixes[-1][1])
                for bits, length in prefixes:
                    rows = _rows_of(bits)
                    flying[rows] = np.maximum(flying[rows], length * page)
            best = max(best, longest * page)
        return hits, on_device, flying, best

    def _holders_of(self, mask: int) -> _Holders:
        known = self._holders.get(mask)
        if known is None:
            if len(self._holders) >= _MAX_KNOWN:
                self._holders.clear()
            slots = _places(mask)
            anywhere, device = slots[slots & 1 == 1] >> 1, slots[slots & 1 == 0] >> 1
            same = len(device) == len(anywhere)
            known = self._holders[mask] = _Holders(
                self._slot_rows[anywhere], None if same else self._slot_rows[device]
            )
        return known


@lru_cache(_MAX_KNOWN)
def _rows_of(bits: int) -> Rows:
    """Rows in a bit set; cached, since prompts in flight often have the same workers."""
    return _places(bits)


def _places(bits: int) -> Rows:
    """Indices of the set bits of an integer."""
    data = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))
