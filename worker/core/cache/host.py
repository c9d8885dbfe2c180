"""Host-memory tier of the KV cache: slots, and the page copies of the next Plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from worker.core.cache.fence import CompletedSteps
from worker.core.cache.pool import FencedPool
from worker.plan.plan import PageCopies
from worker.protocol.host_cache import HostCacheTotals


class TakenCopies(NamedTuple):
    """Page copies of a Plan. A field is None if there are no such copies."""

    stores: PageCopies | None
    loads: PageCopies | None
    load_stores: PageCopies | None = None
    """Stores from device pages that `loads` overwrite."""


class HostTier(Protocol):
    """Host memory of the radix tree: entries for evicted pages.

    An entry is a slot (HostPool) or, for models with sliding windows, a block of slots
    (HostBlocks).
    """

    def num_missing(self, pages: Sequence[int]) -> int:
        """Number of slots to free before all `pages` can be stored; 0 or less if they fit."""

    def num_fitting(self, pages: Sequence[int]) -> int:
        """Number of leading pages that can be stored now."""

    def num_kept(self, entries: Sequence[int], count: int) -> int:
        """Number of leading entries that can stay if entries at the end are freed until at least
        `count` slots are free; 0 if none can."""

    def is_idle(self, entries: Sequence[int]) -> bool:
        """Whether no copy in flight uses any of `entries`."""

    def store(self, pages: Sequence[int]) -> list[int]:
        """Schedules copies of evicted pages with the next Plan; returns their entries."""

    def load(self, entries: Sequence[int], pages: Sequence[int]) -> None:
        """Schedules copies of `entries` to device pages with the next Plan, after which the entries
        are free."""

    def forget(self, entries: Sequence[int]) -> None:
        """Releases entries that are evicted from the cache."""

    def supersede(self, entries: Sequence[int], pages: Sequence[int]) -> None:
        """Releases `entries`, whose content was recomputed in the device pages `pages`."""


class HostPool:
    """Slots of one page each in host memory, and copies between slots and device pages.

        device page ──store──> slot ──load──> device page

    Copies are part of the next Plan, in the order stores, loads. A page that is stored can thus be
    overwritten by a load or a row of the same Plan. Loads are asynchronous: steps continue in the
    meantime, except for rows that read the pages.

    HAZARD(fence): a slot is only reused after the last step with a copy from or to it, and that
    step's loads, have completed. Pages need no fence: a stored page was not locked, so no step in
    flight uses it, and a loaded page is locked by the lease that it is loaded for, until the load
    has ended.

    Args:
        num_slots: number of slots.
        copied: the steps that have completed with all loads of their Plans.
    """

    def __init__(self, num_slots: int, copied: CompletedSteps) -> None:
        self._slots = FencedPool(0, num_slots, copied)
        self._touched = [0] * num_slots
        """Last step that stores to each slot."""
        self.next_seq = 1
        """Number of the next Plan, which includes the copies."""
        self._stores = PageCopies([], [])
        """Copies to the host in the next Plan; their device pages must not change before that Plan.
        """
        self._loads = PageCopies([], [])
        """Copies back to the device in the next Plan."""
        self._totals = HostCacheTotals(num_pages=num_slots)

    @property
    def num_free(self) -> int:
        """Number of slots available to `store`."""
        return self._slots.num_free

    @property
    def num_to_load(self) -> int:
        """Number of pages that the next Plan loads."""
        return len(self._loads.pages)

    @property
    def totals(self) -> HostCacheTotals:
        """Totals since the pool was created, for metrics."""
        used = self._totals.num_pages - self._slots.num_free - self._slots.num_fenced
        return replace(self._totals, num_used=used)

    def num_missing(self, pages: Sequence[int]) -> int:
        """Number of slots to free before all `pages` can be stored; 0 or less if they fit."""
        return len(pages) - self._slots.num_free

    def num_fitting(self, pages: Sequence[int]) -> int:
        """Number of leading pages that can be stored now."""
        return min(len(pages), self._slots.num_free)

    def num_kept(self, slots: Sequence[int], count: int) -> int:
        """Number of leading slots that can stay if `count` slots are freed from the end."""
        return max(0, len(slots) - count)

    def is_idle(self, slots: Iterable[int]) -> bool:
        """Whether no copy in flight uses any of `slots`, so that they can be reused immediately."""
        return all(self._slots.passed(self._touched[slot]) for slot in slots)

    def store(self, pages: Sequence[int]) -> list[int]:
        """Schedules copies of device pages to free slots with the next Plan; returns the slots.

        The caller must check that enough slots are free.
        """
        slots = self._slots.take(len(pages))
        self._stores.pages.extend(pages)
        self._stores.slots.extend(slots)
        for slot in slots:
            self._touched[slot] = self.next_seq
        self._totals.num_stored += len(pages)
        return slots

    def reserve(self) -> int:
        """Takes a slot without storing anything; the caller must check that one is free."""
        self._totals.num_stored += 1
        (slot,) = self._slots.take(1)
        self._touched[slot] = 0
        return slot

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Schedules copies of slots to device pages with the next Plan, after which the slots are
        free."""
        self._loads.pages.extend(pages)
        self._loads.slots.extend(slots)
        self._slots.release(slots, self.next_seq)
        self._totals.num_loaded += len(slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Releases slots whose content is evicted from the cache."""
        self._totals.num_evicted += len(slots)
        self._release(slots)

    def supersede(self, slots: Sequence[int], pages: Sequence[int] = ()) -> None:
        """Releases slots whose content was recomputed on the device."""
        self._totals.num_recomputed += len(slots)
        self._release(slots)

    def note_resumed(self, num_tokens: int, num_cached: int, num_loaded: int) -> None:
        """Adds the tokens of a readmitted request to the totals: `num_tokens` were computed before
        its preemption; `num_cached` are cached on the device, `num_loaded` are loaded from the
        host."""
        self._totals.num_resumed_tokens += num_tokens
        self._totals.num_resumed_cached_tokens += min(num_cached, num_tokens)
        self._totals.num_resumed_loaded_tokens += num_loaded

    def note_hit(self, num_tokens: int) -> None:
        """Counts the cached tokens of a request that are loaded from the host."""
        self._totals.num_hit_tokens += num_tokens

    def note_load(self, seconds: float) -> None:
        """Adds the duration of one step's loads, in seconds."""
        self._totals.load_s += seconds

    def take_copies(self, seq: int) -> TakenCopies:
        """Returns the copies for Plan `seq`. Must be called for every Plan."""
        assert seq == self.next_seq, f"Plan {seq} takes the copies of Plan {self.next_seq}"
        self.next_seq += 1
        stores, self._stores = self._stores, PageCopies([], [])
        loads, self._loads = self._loads, PageCopies([], [])
        if not (stores.pages and loads.pages):
            return TakenCopies(stores if stores.pages else None, loads if loads.pages else None)
        loaded = set(loads.pages)
        first, later = PageCopies([], []), PageCopies([], [])
        for page, slot in zip(stores.pages, stores.slots, strict=True):
            part = later if page in loaded else first
            part.pages.append(page)
            part.slots.append(slot)
        return TakenCopies(first if first.pages else None, loads, later if later.pages else None)

    def check_invariants(self, held: Iterable[int]) -> None:
        """Asserts that each slot is in `held`, free or fenced, exactly once."""
        self._slots.check_invariants(held)
        assert len(set(self._loads.pages)) == len(self._loads.pages), "a page is loaded twice"
        assert len(set(self._stores.slots)) == len(self._stores.slots), "a slot is stored twice"

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.release([slot], self._touched[slot])
